"""What every engine refuses, and what it finds wrong, in the same words. A `place` is "in FOLDER" or "at ADDRESS"."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cooc.errors import InputError, StoreError, StoreLockedError, StoreMissingError
from cooc.index.records import FORMAT, Record, StoreMeta, show

VECTOR_DAMAGED = "the vector is damaged; the next `cooc index` describes the picture again"
WRONG_ID = "the id does not fit content and path; remove the image and index it again"
FEATURES_DAMAGED = "its local features are damaged; `cooc index FOLDER --verify ENGINES` makes them again"


def missing(place: str) -> StoreMissingError:
    named = shlex.quote(place.partition(" ")[2])
    return StoreMissingError(f"There is no index {place}. Make one: cooc index FOLDER --index {named}")


def read_only(place: str) -> StoreError:
    return StoreError(f"The index {place} is open for reading only: open it with write=True.")


def closed(place: str) -> StoreError:
    return StoreError(f"The index {place} has been closed: open it again.")


def locked(place: str, who: str, more: str = "") -> StoreLockedError:
    return StoreLockedError(
        f"Another process is writing to the index {place}: {who}. Wait until it is done, or stop it{more}; reading is "
        "possible meanwhile."
    )


def check_format(place: str, found: int) -> None:
    if found > FORMAT:
        raise StoreError(f"The index {place} has format {found}, and this cooc reads up to {FORMAT}: upgrade cooc.")


def checksum(data: bytes) -> bytes:
    """Of a vector or of local features, as the servers' engines keep it: 8 bytes."""
    return hashlib.sha256(data).digest()[:8]


def first_of(paths: Iterable[str]) -> str:
    """For messages about several."""
    first, *more = sorted(paths)
    return show(first) + (f" (and {len(more)} more)" if more else "")


def moving(moves: Mapping[str, str]) -> dict[str, str]:
    """What a `rename` has to do."""
    if len(set(moves.values())) < len(moves):
        raise InputError("Two images cannot be moved to one path.")
    return {old: new for old, new in moves.items() if old != new}


def check_codes(
    meta: StoreMeta, records: Sequence[Record], features: Sequence[bytes | None] | None
) -> dict[str, bytes]:
    """Features by content, sha256 -> code."""
    if features is None:
        return {}
    if len(records) != len(features):
        raise InputError(f"{len(records)} records came with {len(features)} local features: one, or None, for each.")
    codes = {one.sha256: code for one, code in zip(records, features, strict=True) if code is not None}
    if codes and not meta.features:
        raise InputError("This index keeps no local features: set_feature_engines() says by which engines it is to.")
    return codes


def check_engines(meta: StoreMeta, engines: str) -> bool:
    """Must they be set? Others than those that there are would leave features of two kinds."""
    if not engines or not engines.isprintable():
        raise InputError(f"{engines!r} names no engine of local features.")
    if meta.features not in ("", engines):
        raise InputError(
            f"This index keeps local features by {meta.features}, not by {engines}. To change that, make it again: "
            f"cooc rebuild --verify {engines}"
        )
    return not meta.features


def check_vectors(vectors: NDArray[Any], dim: int) -> NDArray[np.float32]:
    """Vectors as every engine wants them: (n, dim) float32, finite, of unit length, contiguous."""
    if vectors.dtype != np.float32 or vectors.ndim != 2 or vectors.shape[1] != dim:
        raise InputError(f"Vectors must be (n, {dim}) float32, not {vectors.shape} {vectors.dtype}.")
    norms = np.sqrt(np.einsum("nd,nd->n", vectors, vectors))
    wrong = np.flatnonzero(~(np.abs(norms - 1) <= 1e-3))  # so written, NaN is wrong too
    if len(wrong):
        raise InputError(
            f"{len(wrong)} of {len(vectors)} vectors are not finite and of length 1 (row {wrong[0]} has length "
            f"{norms[wrong[0]]:.4g}). Divide each vector by its L2 norm."
        )
    return np.ascontiguousarray(vectors)
