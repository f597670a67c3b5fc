"""What the GPU kernels are measured against, in the same run: the floor of the machine, compiled torch, cuDNN.

direct      C_T by the closed form               floor: A read and C_T written once, at copy speed
linear      ChCO-SC_T without C_T                floor: A read once
learned     C_T with a full filter, bfloat16     floor: its operations at the rate of a large bfloat16 product
factored    C_T with direct + rank 32            floor: the same
segments    compact bilinear pooling to 8192     floor: A read once
shih        Shih et al.'s tensor                 floor: its operations at the rate of a large bfloat16 product
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
from cooc.cooccurrence import (
    EPS,
    cooccurrence,
    cooccurrence_factored,
    cooccurrence_learned,
    direct_filter,
    shih_cooccurrence,
)
from cooc.pooling import CompactBilinear, chco_sct, compact_bilinear

__all__ = ["PARTS", "Form", "part", "sizes", "targets"]

PARTS = ("direct", "linear", "learned", "factored", "segments", "shih")
RANK = 32
# What was not chosen as the default, measured beside it.
DIRECT = ({"lag": 1}, {"lag": 8}, {"width": 16}, {"registers": 64}, {"planes": 32})
LINEAR = ({"warps": 1}, {"segments": 1})
FACTORED = ({"cut": 1}, {"planes": 128}, {"rows": 24}, {"rows": 6})
Row = dict[str, Any]
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Form:
    """One way to compute it. `narrow` takes bfloat16 maps, `last` has them channels-last."""

    name: str
    build: Callable[[], Call]
    exact: Call
    narrow: bool = False
    last: bool = False
    graph: bool = False
    floor: float = 0.0  # ms of one image


def sizes(name: str, channels: Sequence[int], batches: Sequence[int]) -> list[tuple[int, int]]:
    """(channels, batch) that a part is measured at: those of networks, in the smallest and the largest batch."""
    ends = sorted({min(batches), max(batches)})
    wide = [n for n in channels if n >= 512] or list(channels)
    some = wide if name in ("direct", "linear", "shih") else [min(wide)]
    found = [(n, batch) for n in some for batch in ends]
    return [size for size in found if name != "shih" or size[0] * size[1] <= 512 * 32]


def part(
    name: str,
    channels: int,
    batch: int,
    positions: int,
    radius: int,
    device: torch.device,
    bytes_s: float,
    flops: float,
) -> list[Form]:
    """The forms of one part; `bytes_s` and `flops` are what the machine does in a second. The first is the kernel."""
    side = 2 * radius + 1
    moved = 1e3 * 4 * channels * positions / bytes_s  # ms to read float32 maps once
    pairs = 2.0 * positions * side**2 * channels**2
    generator = torch.Generator(device).manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def compiled(function: Call) -> Call:
        torch.compiler.reset()
        call: Call = torch.compile(function, dynamic=False)
        return call

    def closed(A: Tensor) -> Tensor:
        return cooccurrence(A, radius)

    if name == "direct":
        exact = torch_only(closed)

        def direct(**choices: int) -> Call:
            from cooc.kernels import direct

            return lambda A: some(direct.tensor(A, radius, None, EPS, channels - 1, **choices))[0]

        return [
            Form("kernel float32", direct, exact, graph=True, floor=2 * moved),
            Form("kernel bfloat16", direct, exact, narrow=True, graph=True, floor=moved),
            *(
                Form(f"kernel {words(choices)}", partial(direct, **choices), exact, graph=True, floor=2 * moved)
                for choices in DIRECT
                if batch > 1
            ),
            Form("compiled torch", partial(compiled, closed), exact, graph=True, floor=2 * moved),
        ]
    if name == "linear":

        def pooled(A: Tensor) -> Tensor:
            return chco_sct(A, cooccurrence(A, radius))

        def linear(**choices: int) -> Call:
            from cooc.kernels import direct

            options: dict[str, Any] = {"rarity_eps": 1e-5, "spatial": True, "rarity": True, **choices}
            return lambda A: some(direct.linear_pooling(A, radius, EPS, channels - 1, **options))

        exact = torch_only(pooled)
        return [
            Form("kernel float32", linear, exact, graph=True, floor=moved),
            Form("kernel bfloat16", linear, exact, narrow=True, graph=True, floor=moved / 2),
            *(
                Form(f"kernel {words(choices)}", partial(linear, **choices), exact, graph=True, floor=moved)
                for choices in LINEAR
                if batch > 1
            ),
            Form("compiled torch", partial(compiled, pooled), exact, graph=True, floor=moved),
        ]
    if name == "learned":
        filter = (direct_filter(channels, radius).to(device) + noise(channels, channels, side, side)).bfloat16()
        last = filter.contiguous(memory_format=torch.channels_last)

        def convolved(A: Tensor) -> Tensor:
            return cooccurrence_learned(A, filter.double() if A.dtype == torch.float64 else last)

        def learned(tile: tuple[int, int, int]) -> Call:
            from cooc.kernels import learned

            return lambda A: some(learned.full(A, filter, None, channels - 1, tile))

        exact, floor = torch_only(convolved), 1e3 * pairs / flops
        tiles = ((128, 256, 4), (128, 256, 3), (256, 128, 3), (128, 128, 4))
        form = partial(Form, exact=exact, narrow=True, last=True, graph=True, floor=floor)
        forms = [form(f"kernel {tile[0]}x{tile[1]}x{tile[2]}", partial(learned, tile)) for tile in tiles]
        return [*forms, form("cuDNN", lambda: exact)]
    if name == "factored":
        left, right = noise(channels, RANK) / channels**0.5, noise(RANK, channels, side, side) / channels**0.5

        def thin(A: Tensor) -> Tensor:
            return cooccurrence_factored(A, left.to(A.dtype), right.to(A.dtype))

        def factored(**choices: int) -> Call:
            from cooc.kernels import learned

            return lambda A: some(learned.factored(A, left, right, None, EPS, channels - 1, **choices))

        exact, floor = torch_only(thin), 1e3 * pairs * RANK / channels / flops
        form = partial(Form, exact=exact, narrow=True, last=True, graph=True, floor=floor)
        return [
            form("kernel bfloat16", factored),
            Form("kernel float32", factored, exact, graph=True, floor=floor),
            *(form(f"kernel {words(choices)}", partial(factored, **choices)) for choices in FACTORED if batch > 1),
            form("torch bfloat16", lambda: exact),
        ]
    if name == "segments":
        sketch = CompactBilinear(channels).to(device)

        def scatter(A: Tensor) -> Tensor:
            return compact_bilinear(A, A, bins=sketch.bins, signs=sketch.signs, dim=sketch.dim)

        def segments() -> Call:
            from cooc.kernels import sketch as kernel

            return lambda A: some(kernel.compact_bilinear(A, A, sketch.bins, sketch.signs, sketch.dim))

        exact = torch_only(scatter)
        return [
            Form("kernel float32", segments, exact, graph=True, floor=moved),
            Form("kernel bfloat16", segments, exact, narrow=True, graph=True, floor=moved / 2),
            Form("scatter", lambda: exact, exact, graph=True, floor=moved),
        ]

    def tensor(A: Tensor) -> Tensor:
        return shih_cooccurrence(A, radius)

    def shih() -> Call:
        from cooc.kernels import shih

        return lambda A: some(shih.shih_cooccurrence(A, radius, "tensor"))

    exact, floor = torch_only(tensor), 1e3 * 2 * pairs / flops
    return [
        Form("kernel float32", shih, exact, floor=floor),
        Form("kernel bfloat16", shih, exact, narrow=True, floor=floor),
        Form("torch float32", lambda: exact, exact, floor=floor),
    ]


def words(choices: dict[str, int]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in choices.items())


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
    known = {(r["section"], r["name"], r["channels"], r["batch"]): r for r in rows if r["section"] in PARTS and r["ms"]}
    found = []

    def add(what: str, wanted: str, value: float, met: bool) -> None:
        found.append({"what": what, "wanted": wanted, "value": float(f"{value:.4g}"), "met": met})

    for section in dict.fromkeys(section for section, *_ in known):
        batch = max(b for s, _, _, b in known if s == section)
        for channels in sorted({c for s, _, c, b in known if s == section and b == batch}):
            here = {n: r for (s, n, c, b), r in known.items() if (s, c, b) == (section, channels, batch)}
            kernels = {n: r for n, r in here.items() if n.startswith("kernel")}
            where = f"{channels} channels, batch {batch}"
            if section in ("direct", "linear") and "kernel float32" in here:
                ratio = here["kernel float32"]["ms"] / here["kernel float32"]["floor"]
                add(f"{section} at {where}: times the memory floor", "<= 2.5", ratio, ratio <= 2.5)
            elif section == "learned":
                best = max(r["floor"] / r["ms"] for r in here.values())
                add(f"learned at {where}: share of the bfloat16 product's rate", ">= 0.6", best, best >= 0.6)
            elif section == "factored" and "kernel bfloat16" in here:
                full = [r["ms"] for (s, _, c, b), r in known.items() if (s, c, b) == ("learned", channels, batch)]
                if full:
                    ratio = min(full) / here["kernel bfloat16"]["ms"]
                    add(f"factored at {where}: times faster than the full filter", ">= 8", ratio, ratio >= 8)
            elif section in ("segments", "shih") and channels == 512 and kernels:
                ms, most = (
                    here.get("kernel float32", next(iter(kernels.values())))["ms"],
                    {"segments": 0.01}.get(section, 1.0),
                )
                add(f"{section} at {where}: ms for one image", f"< {most}", ms, ms < most)
    return found
