"""Two pictures, without an index: do they show the same thing?

agreement = verify_pair("a.jpg", "b.jpg")
agreement.inliers, agreement.query_region, agreement.transform
"""

from __future__ import annotations

from cooc.errors import InputError
from cooc.pictures.boxes import Box
from cooc.pictures.decode import Picture, load_view, name_of
from cooc.verification.agreement import Agreement
from cooc.verification.engines import LONGEST, QUERY, extract
from cooc.verification.verifier import verify


def verify_pair(
    query: Picture, picture: Picture, engine: str = "sift", *, box: Box | None = None, device: str = "cpu"
) -> Agreement:
    """What the part of `query` in `box` and `picture` agree on; `inliers` 0 where that is nothing.

    Engines that know no rotation see the query in four turns. A picture in which no engine finds anything to compare
    (one colour, a smooth gradient) is an InputError: nothing can be said of it.
    """
    found = []
    for one, part, turns in ((query, box, 4), (picture, None, 1)):
        pixels, size, shown = load_view(one, LONGEST, part)
        features = extract(engine, pixels, size=size, box=shown, limit=QUERY, turns=turns, enlarge=True, device=device)
        if not any(map(len, features)):
            where = "" if part is None else " in the box"
            raise InputError(
                f"{name_of(one)} has no texture{where} to compare: no point of it can be told from those around it. "
                "Give a picture with more detail, or a larger part."
            )
        found.append(features)
    return verify(found[0], [found[1]])[0]
