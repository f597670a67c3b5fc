"""Boxes: x0, y0, x1, y1 in pixels of the upright, full-size picture."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from cooc.errors import BoxError

Box = tuple[float, float, float, float]

HOW = "Write four numbers as x0,y0,x1,y1, in pixels."


def parse_box(text: str) -> Box:
    """'x0,y0,x1,y1' -> Box."""
    try:
        x0, y0, x1, y1 = map(float, text.split(","))
    except ValueError:
        raise BoxError(f"{text!r} is not a box. {HOW}") from None
    return check_box((x0, y0, x1, y1))


def check_box(box: Any) -> Box:
    """Whatever a caller gave as a box: a tuple, a list, an array, a tensor of four numbers; or why it is none."""
    try:
        values = tuple(box)
    except TypeError:
        values = ()
    if len(values) != 4 or not all(hasattr(value, "__float__") for value in values):  # a text has none
        raise BoxError(f"{box!r} is not a box. {HOW}")
    try:
        x0, y0, x1, y1 = map(float, values)
    except (TypeError, ValueError, OverflowError):  # an array of several values, a number of 400 digits
        raise BoxError(f"{box!r} is not a box. {HOW}") from None
    if not all(map(math.isfinite, (x0, y0, x1, y1))):
        raise BoxError(f"Box {_show((x0, y0, x1, y1))} is not finite. {HOW}")
    if x1 <= x0 or y1 <= y0:
        raise BoxError(f"Box {_show((x0, y0, x1, y1))} is empty. x1 must be larger than x0, and y1 larger than y0.")
    return x0, y0, x1, y1


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
