"""Boxes: x0, y0, x1, y1 in pixels of the upright, full-size picture."""

from __future__ import annotations

import math
from collections.abc import Iterable

from cooc.errors import BoxError

__all__ = ["Box", "check_box", "clip", "parse_box"]

Box = tuple[float, float, float, float]


def parse_box(text: str) -> Box:
    """'x0,y0,x1,y1' -> Box."""
    try:
        x0, y0, x1, y1 = map(float, text.split(","))
    except ValueError:
        raise BoxError(f"{text!r} is not a box. Write four numbers as x0,y0,x1,y1, in pixels.") from None
    return check_box((x0, y0, x1, y1))


def check_box(box: Box) -> Box:
    x0, y0, x1, y1 = box
    if not all(map(math.isfinite, box)):
        raise BoxError(f"Box {_show(box)} is not finite. Write four numbers as x0,y0,x1,y1, in pixels.")
    if x1 <= x0 or y1 <= y0:
        raise BoxError(f"Box {_show(box)} is empty. x1 must be larger than x0, and y1 larger than y0.")
    return box


def clip(box: Box, width: int, height: int, name: str) -> tuple[int, int, int, int]:
    """The box in whole pixels inside the picture, rounded as Pillow's crop() does, but never to nothing."""
    x0, y0, x1, y1 = check_box(box)
    if x0 >= width or y0 >= height or x1 <= 0 or y1 <= 0:
        raise BoxError(
            f"Box {_show(box)} lies outside {name}, which has {width}x{height} pixels when upright. "
            "Boxes are x0,y0,x1,y1 in pixels of the full-size picture."
        )
    (left, right), (top, bottom) = _round(x0, x1, width), _round(y0, y1, height)
    return left, top, right, bottom


def _round(low: float, high: float, end: int) -> tuple[int, int]:
    low, high = max(low, 0), min(high, end)
    return (round(low), round(high)) if round(low) < round(high) else (int(low), int(low) + 1)


def _show(box: Iterable[float]) -> str:
    return ",".join(f"{value:g}" for value in box)
