"""What kernels derive from a filter or from hashes (another layout, a sorted table) is made once for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_made: Any = WeakIdKeyDictionary()  # source -> kind -> (state of the source, what was made of it)
_Result = TypeVar("_Result")


def derived(source: Tensor, kind: str, make: Callable[[], _Result]) -> _Result:
    """`make()`, kept for as long as `source` lives and stays as it is.

    Tensors made in inference mode do not count their changes: one that is changed in place there is not noticed.
    """
    state = source.data_ptr(), -1 if source.is_inference() else source._version
    before, value = _made.get(source, {}).get(kind, (None, None))
    if before != state:
        value = make()
        if value is not source:  # kept here, it would keep itself alive
            _made.setdefault(source, {})[kind] = state, value
    return value  # type: ignore[no-any-return]
