"""Small versions of pictures. Decoding processes import this module, so it imports nothing heavy."""

from __future__ import annotations

import io

from PIL import Image

from cooc.pictures.decode import Picture, open_image

QUALITY = 82


def thumbnail(picture: Picture, side: int) -> bytes:
    """A JPEG, upright, whose longest side is `side`, unless the picture is smaller."""
    image = open_image(picture, size=side)
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=QUALITY)
    return stream.getvalue()
