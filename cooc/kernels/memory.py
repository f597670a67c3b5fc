"""What kernels derive from a filter or from hashes (another layout, a sorted table) is made once for each of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

_made: dict[tuple[int, str], tuple[weakref.ref[Tensor], tuple[int, int], object]] = {}
_Result = TypeVar("_Result")


def derived(source: Tensor, kind: str, make: Callable[[], _Result]) -> _Result:
    """`make()`, kept for as long as `source` lives and stays as it is.

    Tensors made in inference mode do not count their changes: one that is changed in place there is not noticed.
    """
    key = id(source), kind
    state = source.data_ptr(), -1 if source.is_inference() else source._version
    known = _made.get(key)
    if known is not None and known[0]() is source and known[1] == state:
        return known[2]  # type: ignore[return-value]
    value = make()
    if value is source:  # kept here, it would keep itself alive
        return value

    def forget(_: object, made: dict[tuple[int, str], object] = _made) -> None:  # type: ignore[assignment]
        made.pop(key, None)  # bound here: when Python ends, the module's names may be gone before the tensor

    _made[key] = weakref.ref(source, forget), state, value
    return value
