"""Kernels against the torch forms in float64: `python -m tests.gpu_check` on a GPU, where all sizes are the real ones.

    python -m tests.gpu_check [--device cuda] [CHECK ...]

Prints the relative error ||out - reference|| / ||reference|| of every case and ends with 1 if one is too large. The
test suite runs the same checks, with small maps, in Triton's interpreter (TRITON_INTERPRET=1, --device cpu).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cooc.cooccurrence import cooccurrence, cooccurrence_factored
from cooc.pooling import chco, chco_sct, compact_bilinear, sct, sketch_hashes

Case = tuple[str, Tensor | None, Tensor, float]  # what, by the kernel, reference in float64, largest error

HALF, SINGLE = 1e-2, 2e-6
EPS = 1e-10


class Maps:
    """Random activations, one in three above 0, that are bfloat16 numbers where asked."""

    def __init__(self, device: str) -> None:
        self.device, self.small = device, device == "cpu"
        seed = 0 if self.small else time.time_ns() % 2**31  # a test is the same every time, a check is not
        self.generator = torch.Generator(device).manual_seed(seed)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        A = (self.noise(*shape) - 0.4).relu()
        mean = A.double().flatten(1).mean(1).view(-1, *[1] * (len(shape) - 1))
        return torch.where((A - mean).abs() < 1e-6, A + 1e-5, A).to(dtype)  # float32's mean parts them as float64's

    def sizes(self, small: list[tuple[int, ...]], large: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """(B, C, H, W, radius)"""
        return small if self.small else small + large


LARGE: list[tuple[int, ...]] = [(32, 512, 24, 32, 4), (2, 2048, 24, 32, 4), (3, 500, 31, 47, 4), (1, 96, 64, 64, 7)]


def check_direct(maps: Maps) -> Iterator[Case]:
    from cooc.kernels import direct

    small: list[tuple[int, ...]] = [(2, 20, 7, 9, 2), (1, 17, 5, 33, 4), (1, 12, 1, 3, 4)]
    for B, C, H, W, radius in maps.sizes(small, LARGE):
        for dtype, most in ((torch.float32, SINGLE), (torch.bfloat16, HALF)):
            A = maps(B, C, H, W, dtype=dtype)
            found = direct.tensor(A, radius, None, EPS, C - 1)
            reference = cooccurrence(A.double(), radius)
            yield f"{(B, C, H, W)}, radius {radius}, {dtype}", found[0] if found else None, reference, most


def check_thresholds(maps: Maps) -> Iterator[Case]:
    from cooc.kernels import direct

    A = maps(3, 20, 6, 7) - 0.2
    for t in (torch.tensor([0.3]), torch.tensor([-0.1, 0.0, 0.5])):
        found = direct.tensor(A, 2, t, EPS, 19)
        reference = cooccurrence(A.double(), 2, t.to(A.device))
        yield f"thresholds {t.tolist()}", found[0] if found else None, reference, SINGLE
    A = torch.zeros_like(A)
    A[:, 0] = maps(3, 6, 7)  # a single channel fires: nothing co-occurs with it, exactly
    found = direct.tensor(A, 2, None, 0.0, 19)
    yield "one channel", found[0] + 1 if found else None, torch.ones_like(A).double(), 0.0


def check_linear(maps: Maps) -> Iterator[Case]:
    from cooc.kernels import linear

    poolings: dict[tuple[bool, bool], Callable[..., Tensor]] = {
        (True, True): chco_sct,
        (True, False): sct,
        (False, True): chco,
    }
    for B, C, H, W, radius in maps.sizes([(1, 18, 5, 17, 2)], LARGE):
        for dtype in (torch.float32, torch.bfloat16):
            A = maps(B, C, H, W, dtype=dtype)
            reference = cooccurrence(A.double(), radius)
            for (spatial, rarity), pool in poolings.items():
                weights = {"rarity_eps": 1e-5, "spatial": spatial, "rarity": rarity}
                found = linear.linear_pooling(A, radius, EPS, C - 1, **weights)
                yield f"{pool.__name__} {(B, C, H, W)}, {dtype}", found, pool(A.double(), reference), SINGLE


def check_factored(maps: Maps) -> Iterator[Case]:
    from cooc.kernels import factored

    sizes: list[tuple[int, ...]] = [(2, 20, 5, 7, 1, 5), (3, 64, 9, 11, 1, 16)]
    for B, C, H, W, radius, rank in maps.sizes(
        sizes, [(4, 512, 24, 32, 4, 32), (32, 512, 24, 32, 4, 32), (1, 100, 33, 20, 2, 32), (2, 192, 7, 13, 2, 32)]
    ):
        side = 2 * radius + 1
        left, right = maps.noise(C, rank), maps.noise(rank, C, side, side) / C**0.5
        A = maps(B, C, H, W)
        for t in (None, torch.linspace(0.1, 0.5, B, device=A.device)):
            reference = cooccurrence_factored(A.double(), left.double(), right.double(), "mean" if t is None else t)
            found = factored.factored(A, left, right, t, EPS, C - 1)
            yield f"{(B, C, H, W)}, rank {rank}{', thresholds' * (t is not None)}", found, reference, 1e-5


def check_sketch(maps: Maps) -> Iterator[Case]:
    from cooc.kernels import sketch

    for B, C, H, W, dim in maps.sizes([(2, 20, 5, 7, 150)], [(32, 512, 24, 32, 8192), (2, 700, 9, 31, 1000)]):
        bins, signs = (x.to(maps.device) for x in sketch_hashes(C, dim))
        for dtype in (torch.float32, torch.bfloat16):
            A, other = maps(B, C, H, W, dtype=dtype), maps(B, C, H, W, dtype=dtype)
            reference = compact_bilinear(A.double(), other.double(), bins=bins, signs=signs, dim=dim)
            found = sketch.compact_bilinear(A, other, bins, signs, dim)
            yield f"{(B, C, H, W)} to {dim}, {dtype}", found, reference, 1e-5


def check_repeat(maps: Maps) -> Iterator[Case]:
    """Twice the same bits."""
    from cooc.kernels import direct, linear, sketch

    B, C, H, W = (2, 20, 6, 7) if maps.small else (32, 512, 24, 32)
    A = maps(B, C, H, W)
    bins, signs = (x.to(maps.device) for x in sketch_hashes(C, 256))
    for name, call in (
        ("direct", lambda: direct.tensor(A, 4, None, EPS, C - 1)[0]),  # type: ignore[index]
        ("linear", lambda: linear.linear_pooling(A, 4, EPS, C - 1, rarity_eps=1e-5, spatial=True, rarity=True)),
        ("sketch", lambda: sketch.compact_bilinear(A, A, bins, signs, 256)),
    ):
        first = call()
        assert first is not None
        yield name, call(), first.double(), 0.0


def check_forms(maps: Maps) -> Iterator[Case]:
    """What `cooc bench speed` times, in every part."""
    from benchmarks import kernels

    device = torch.device(maps.device)
    for name in kernels.PARTS:
        channels = 512 if not maps.small else 16 if name == "segments" else 12
        H, W, radius = (5, 6, 1) if maps.small else (24, 32, 4)
        A = maps(1, channels, H, W, dtype=torch.bfloat16)
        for form in kernels.part(name, channels, H * W, radius, device, 1e12, 1e14):
            if not (maps.small and form.name.startswith("compiled")):
                yield f"{name}: {form.name}", form.build()(A.float()), form.exact(A.double()), HALF


CHECKS: dict[str, Callable[[Maps], Iterator[Case]]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"Any of {', '.join(CHECKS)}; all without.")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    failures = 0
    for name in arguments.checks or CHECKS:
        try:
            with torch.inference_mode():
                for what, found, reference, most in CHECKS[name](Maps(arguments.device)):
                    if found is None:
                        raise ValueError(f"no kernel covers {what}")
                    error = float((found.double() - reference).norm() / reference.norm())
                    good = error <= most  # NaN is not
                    failures += not good
                    print(
                        f"{name}: {what}: {error:.1e} {'ok' if good else f'TOO LARGE, at most {most:.0e}'}", flush=True
                    )
        except Exception as error:  # the other kernels are checked nevertheless
            failures += 1
            print(f"{name}: FAILED: {type(error).__name__}: {str(error)[-800:]}", flush=True)
    print(f"{failures} failures")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
