"""What the GPU kernels are measured against, in the same run: the floor of the machine, and torch itself.

direct      C_T by the closed form               floor: A read and C_T written once, at copy speed
linear      ChCO-SC_T without C_T                floor: A read once
factored    C_T with direct + rank 32            floor: its operations at the rate of a large bfloat16 product
segments    compact bilinear pooling to 8192     floor: A read once
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.timing import Call
from cooc.cooccurrence import EPS, cooccurrence, cooccurrence_factored
from cooc.pooling import CompactBilinear, chco_sct, compact_bilinear

PARTS = ("direct", "linear", "factored", "segments")
RANK = 32
Row = dict[str, Any]
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Form:
    """One way to compute it, from float32 maps."""

    name: str
    build: Callable[[], Call]
    exact: Call
    floor: float  # ms of one image


def sizes(name: str, channels: Sequence[int], batches: Sequence[int]) -> list[tuple[int, int]]:
    """(channels, batch) that a part is measured at: those of networks, in the smallest and the largest batch."""
    wide = [n for n in channels if n >= 512] or list(channels)
    some = wide if name in ("direct", "linear") else [min(wide)]
    return [(n, batch) for n in some for batch in sorted({min(batches), max(batches)})]


def part(
    name: str, channels: int, positions: int, radius: int, device: torch.device, bytes_s: float, flops: float
) -> list[Form]:
    """The forms of one part; `bytes_s` and `flops` are what the machine does in a second. The first is the kernel."""
    side = 2 * radius + 1
    moved = 1e3 * 4 * channels * positions / bytes_s  # ms to read float32 maps once
    generator = torch.Generator(device).manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def compiled(function: Call) -> Call:
        torch.compiler.reset()
        call: Call = torch.compile(function, dynamic=False)
        return call

    if name == "direct":

        def closed(A: Tensor) -> Tensor:
            return cooccurrence(A, radius)

        def direct() -> Call:
            from cooc.kernels import direct

            return lambda A: some(direct.tensor(A, radius, None, EPS, channels - 1))[0]

        form = partial(Form, exact=torch_only(closed), floor=2 * moved)
        return [form("kernel", direct), form("compiled torch", partial(compiled, closed))]
    if name == "linear":

        def pooled(A: Tensor) -> Tensor:
            return chco_sct(A, cooccurrence(A, radius))

        def linear() -> Call:
            from cooc.kernels.linear import linear_pooling

            weights = {"rarity_eps": 1e-5, "spatial": True, "rarity": True}
            return lambda A: some(linear_pooling(A, radius, EPS, channels - 1, **weights))  # type: ignore[arg-type]

        form = partial(Form, exact=torch_only(pooled), floor=moved)
        return [form("kernel", linear), form("compiled torch", partial(compiled, pooled))]
    if name == "factored":
        left, right = noise(channels, RANK) / channels**0.5, noise(RANK, channels, side, side) / channels**0.5

        def thin(A: Tensor) -> Tensor:
            return cooccurrence_factored(A, left.to(A.dtype), right.to(A.dtype))

        def factored() -> Call:
            from cooc.kernels import factored

            return lambda A: some(factored.factored(A, left, right, None, EPS, channels - 1))

        exact = torch_only(thin)
        form = partial(Form, exact=exact, floor=1e3 * 2.0 * positions * side**2 * channels * RANK / flops)
        return [form("kernel", factored), form("torch", lambda: exact)]
    sketch = CompactBilinear(channels).to(device)

    def scatter(A: Tensor) -> Tensor:
        return compact_bilinear(A, A, bins=sketch.bins, signs=sketch.signs, dim=sketch.dim)

    def segments() -> Call:
        from cooc.kernels.sketch import compact_bilinear

        return lambda A: some(compact_bilinear(A, A, sketch.bins, sketch.signs, sketch.dim))

    exact = torch_only(scatter)
    form = partial(Form, exact=exact, floor=moved)
    return [form("kernel", segments), form("scatter", lambda: exact)]


def torch_only(call: Call) -> Call:
    """The same with all kernels turned off."""

    def plain(A: Tensor) -> Tensor:
        before = os.environ.get("COOC_KERNELS")
        os.environ["COOC_KERNELS"] = "0"
        try:
            return call(A)
        finally:
            os.environ.pop("COOC_KERNELS")
            if before is not None:
                os.environ["COOC_KERNELS"] = before

    return plain


def some(found: _Found | None) -> _Found:
    if found is None:
        raise RuntimeError("no kernel for this size")
    return found


def targets(rows: Sequence[Row]) -> list[Row]:
    """What is wanted of the kernels in the largest batch, beside what this run shows."""
    timed = [row for row in rows if row["section"] in PARTS and row["ms"]]
    found = []

    def add(row: Row, what: str, wanted: str, value: float, met: bool) -> None:
        where = f"{row['section']} at {row['channels']} channels, batch {row['batch']}"
        found.append({"what": f"{where}: {what}", "wanted": wanted, "value": float(f"{value:.4g}"), "met": met})

    for row in timed:
        same = [other for other in timed if other["section"] == row["section"]]
        if row["name"] != "kernel" or row["batch"] < max(other["batch"] for other in same):
            continue
        ratio = row["ms"] / row["floor"]
        if row["section"] in ("direct", "linear"):
            add(row, "times the memory floor", "<= 2.5", ratio, ratio <= 2.5)
        elif row["section"] == "segments" and row["channels"] == 512:
            add(row, "ms for one image", "< 0.01", row["ms"], row["ms"] < 0.01)
    return found
