"""How fast: C_T in every form, the sketch against its FFT form, a descriptor beside its bare network, GPU kernels.

One run, the same tensors for all. Forms take turns, one sample each, so that a busy moment of the machine falls on all
of them; a row holds the median, the 10th and the 90th percentile. Inputs are random, look like activations (80 percent
zeros) and rotate, so that no form finds its input in the cache. Each form is checked in the same run: `error` is the
relative distance to the same thing in float64. What is too slow for a device stays in the table as "not run", what
fails with its reason. Nothing is fetched: time does not depend on a network's weights, which are random here.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.backends import cudnn

from benchmarks import kernels
from benchmarks.timing import ROTATION, Call, measure, sampler
from cooc.activations import build_backbone, resolve_device, resolve_dtype
from cooc.cooccurrence import (
    Cooccurrence,
    cooccurrence,
    cooccurrence_factored,
    cooccurrence_learned,
    direct_filter,
    shih_cooccurrence,
)
from cooc.descriptor import Descriptor
from cooc.errors import InputError, UnknownNameError
from cooc.files import write_whole
from cooc.pooling import CompactBilinear, compact_bilinear
from cooc.provenance import provenance
from cooc.recipes import find_recipe

SECTIONS = ("cooccurrence", "sketch", "descriptor", *kernels.PARTS)  # the last ones on a GPU only
FORMS = ("closed form", "compiled", "convolution float32", "convolution bfloat16", "direct + rank 32", "Shih")
RECIPES = ("paper-linear+raw", "paper-bilinear+raw")

POOL_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}  # of all rotating inputs: more than the last cache holds
RANK = 32
CPU_OPERATIONS = 2e11  # of one call: a few seconds on two cores

Row = dict[str, Any]


@dataclass(frozen=True)
class SpeedConfig:
    """What to measure. `seconds` are those of one form at one size; three samples are taken at least."""

    device: str = "auto"
    channels: tuple[int, ...] = (32, 512, 2048)
    batches: tuple[int, ...] = (1, 5, 32)
    map_size: tuple[int, int] = (24, 32)  # H, W
    picture: tuple[int, int] = (768, 1024)  # H, W
    radius: int = 4
    sections: tuple[str, ...] = SECTIONS
    forms: tuple[str, ...] = FORMS
    seconds: float = 0.4
    pool_bytes: int | None = None
    progress: Callable[[str], None] = lambda what: None
    save: Callable[[dict[str, Any]], object] = lambda result: None  # after every size: what was measured is not lost

    def __post_init__(self) -> None:
        for kind, names, known in (("section", self.sections, SECTIONS), ("form", self.forms, FORMS)):
            for name in names:
                if name not in known:
                    raise UnknownNameError(kind, name, known)
        sizes = (*self.channels, *self.batches, *self.map_size, *self.picture)
        if not self.channels or not self.batches or min(sizes) < 1 or not self.seconds > 0:
            raise InputError("Channels, batches and sizes must be whole numbers above 0, and there must be some.")


@dataclass(frozen=True)
class Job:
    """One form at one size. `build` makes the filter or the compiled code, only if the form will run."""

    name: str
    inputs: Sequence[Tensor]
    build: Callable[[], Call]
    exact: Call | None = None  # the same thing for float64 inputs
    operations: float = 0.0
    graph: bool = False  # on a GPU: captured once and replayed, so that launches cost nothing
    refusal: str = ""  # why this device cannot run it
    floor: float = 0.0  # ms of one image that no form can beat


def run_speed(options: SpeedConfig) -> dict[str, Any]:
    """All tables of one device, as `results/speed-<device>.json` keeps them."""
    device = resolve_device(options.device)
    if device.type not in POOL_BYTES:
        raise InputError(f"Speed is measured on cpu and cuda, not on {options.device}.")
    load = _load()
    with torch.inference_mode(), cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        bench = _Bench(options, device)
        rows: list[Row] = []
        for section in options.sections:
            for some in bench.section(section):
                rows += some
                options.save(_result(options, bench, rows, load))
    return _result(options, bench, rows, load)


def _result(options: SpeedConfig, bench: _Bench, rows: list[Row], load: float | None) -> dict[str, Any]:
    device = bench.device
    return {
        "benchmark": "speed",
        "device": device.type,
        "threads": torch.get_num_threads(),
        "load": {"before": load, "after": _load()},
        "map_size": list(options.map_size),
        "picture": list(options.picture),
        "radius": options.radius,
        "copy_gb_per_s": _short(bench.bandwidth / 1e9),
        "bfloat16_tflops": _short(bench.rate / 1e12) if bench.rate else None,
        "rows": rows,
        "targets": targets(rows, device.type) + kernels.targets(rows),
        **provenance(options.device),
    }


def write_speed(result: Mapping[str, Any], folder: Path) -> Path:
    """results/speed-<device>.json"""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"speed-{result['device']}.json"
    write_whole(path, json.dumps(result, indent=1) + "\n")
    return path


def targets(rows: Sequence[Row], device: str) -> list[Row]:
    """What the project wants, beside what this run shows. `met` is None where something was not run."""
    wanted = {("cpu", 512): 100, ("cuda", 512): 100, ("cuda", 2048): 200}
    times = {(row["name"], row["channels"], row["batch"]): row["ms"] for row in rows if row["ms"] is not None}
    found = []
    for row in rows:
        size = row["channels"], row["batch"]
        if row["name"] == "convolution float32" and (least := wanted.get((device, row["channels"]))):
            direct = [times[form, *size] for form in ("closed form", "compiled") if (form, *size) in times]
            ratio = _short(row["ms"] / min(direct)) if row["ms"] and direct else None
            what = "C_T at {} channels, batch {}: times faster than the float32 convolution".format(*size)
            found.append({"what": what, "wanted": f">= {least}", "value": ratio, "met": ratio and ratio >= least})
        elif row["name"].endswith("pooling alone"):
            ratio, what = row["ratio"], f"{row['name']}, batch {row['batch']}: share of the network's time"
            found.append({"what": what, "wanted": "< 0.1", "value": ratio, "met": ratio and ratio < 0.1})
    return found


class _Bench:
    """One device, one pool of activations that all forms draw their inputs from."""

    def __init__(self, options: SpeedConfig, device: torch.device) -> None:
        self.options, self.device = options, device
        self.positions = math.prod(options.map_size)
        least = (options.pool_bytes or POOL_BYTES[device.type]) // 4
        largest = max(options.channels) * max(options.batches) * self.positions
        noise = torch.randn(max(least, largest), generator=torch.Generator(device).manual_seed(0), device=device)
        # One in five is above 0. Rounded to bfloat16, the inputs are the same numbers for every form.
        self.pool = noise.sub_(0.8416).relu_().bfloat16().float()
        copy = sampler(torch.empty_like(self.pool).copy_, [self.pool], device)
        self.bandwidth = 2 * self.pool.nbytes / (statistics.median(copy() for _ in range(9)) / 1e3)  # bytes per second
        self.rate = 0.0  # operations per second of a large bfloat16 product
        if device.type == "cuda" and set(options.sections) & set(kernels.PARTS):
            square = torch.randn(2, 8192, 8192, device=device).bfloat16()
            product = sampler(square[0].matmul, [square[1]], device)
            self.rate = 2 * 8192**3 / (statistics.median(product() for _ in range(9)) / 1e3)

    def section(self, name: str) -> Iterator[list[Row]]:
        """The rows of one section, size by size. A hole in the table, with its reason, is better than no table."""
        batches = sorted(self.options.batches)
        jobs: Callable[[int, int], list[Job]]
        sizes: Iterable[tuple[int, int]]
        if name == "cooccurrence":
            jobs, sizes = self._cooccurrence, itertools.product(self.options.channels, batches)
        elif name == "sketch":
            channels = min(self.options.channels, key=lambda n: abs(n - 512))
            jobs, sizes = self._sketch, [(channels, batch) for batch in sorted({batches[0], batches[-1]})]
        elif name in kernels.PARTS:
            jobs, sizes = partial(self._kernels, name), []
            if self.device.type == "cuda":
                sizes = kernels.sizes(name, self.options.channels, batches)
        else:
            jobs, sizes = self._descriptor, [(512, batch) for batch in ((1, 8) if self.device.type == "cuda" else (1,))]
        for channels, batch in sizes:
            self.options.progress(f"{name}: {channels} channels, batch {batch}")
            about = {"section": name, "channels": channels, "batch": batch}
            try:
                yield self._rows(jobs(channels, batch), about)
            except Exception as error:
                yield [_row(about, "all", note=_reason(error))]
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _rows(self, jobs: Sequence[Job], about: Row) -> list[Row]:
        """Check every job, then let them take turns. The first is what the others are compared to."""
        rows, samples = {job.name: _row(about, job.name) for job in jobs}, {}
        floors = {job.name: job.floor for job in jobs}
        for job in jobs:
            row = rows[job.name]
            too_slow = self.device.type == "cpu" and job.operations > CPU_OPERATIONS
            if job.refusal or too_slow:
                row["note"] = f"not run: {job.refusal or 'takes many seconds for one call on a CPU'}"
                continue
            try:
                call = job.build()
                out = call(job.inputs[0])
                if job.exact is not None:
                    exact = job.exact(job.inputs[0][-1:].double())  # the last of a batch is as if it were alone
                    row["error"] = _short(float((out[-1:] - exact).norm() / exact.norm()))
                samples[job.name] = sampler(call, job.inputs, self.device, job.graph)
            except Exception as error:  # no compiler, out of memory, ...
                row["note"] = _reason(error)
        for name, times in measure(samples, self.options.seconds).items():
            low, *_, high = statistics.quantiles(times, n=10, method="inclusive")
            values = (statistics.median(times), low, high)
            rows[name] |= {
                key: _short(ms / about["batch"]) for key, ms in zip(("ms", "low", "high"), values, strict=True)
            }
        base = rows[jobs[0].name]["ms"] if jobs else None
        for row in rows.values():
            row["ratio"] = _short(row["ms"] / base) if row["ms"] and base else None
            if floors.get(row["name"]):
                row["floor"] = _short(floors[row["name"]])
            elif row["section"] == "cooccurrence":  # A read once, C_T written once, in float32
                row["floor"] = _short(1e3 * 2 * 4 * row["channels"] * self.positions / self.bandwidth)
        return list(rows.values())

    def _inputs(self, channels: int, batch: int) -> Sequence[Tensor]:
        size = batch * channels * self.positions
        count = min(self.pool.numel() // size, ROTATION)
        return self.pool[: count * size].view(count, batch, channels, *self.options.map_size).unbind()

    def _cooccurrence(self, channels: int, batch: int) -> list[Job]:
        radius, device = self.options.radius, self.device
        side = 2 * radius + 1
        inputs = self._inputs(channels, batch)
        bfloat16 = resolve_dtype("auto", device) == torch.bfloat16
        refusal = "" if bfloat16 else "no native bfloat16 here"
        narrow = [A.to(torch.bfloat16, memory_format=torch.channels_last) for A in inputs] if bfloat16 else inputs
        generator = torch.Generator().manual_seed(0)
        left = (torch.randn(channels, RANK, generator=generator) / channels**0.5).to(device)
        right = (torch.randn(RANK, channels, side, side, generator=generator) / channels**0.5).to(device)

        closed = kernels.torch_only(lambda A: cooccurrence(A, radius))

        def compiled() -> Call:
            if device.type == "cuda":  # code for each size; on a CPU, where compiling takes long, one for all sizes
                torch.compiler.reset()
            call: Call = torch.compile(Cooccurrence(radius=radius), dynamic=device.type == "cpu")
            return call

        def convolution(dtype: torch.dtype, layout: torch.memory_format) -> Call:
            with device:  # 340 million values at 2048 channels: made where they are needed
                filter = direct_filter(channels, radius, dtype=dtype).contiguous(memory_format=layout)
            return kernels.torch_only(lambda A: cooccurrence_learned(A, filter))

        factored = kernels.torch_only(lambda A: cooccurrence_factored(A, left.to(A.dtype), right.to(A.dtype)))
        shih = kernels.torch_only(lambda A: shih_cooccurrence(A, radius))

        pairs = 2.0 * batch * self.positions * side**2 * channels**2  # operations of the convolution
        float32 = partial(convolution, torch.float32, torch.contiguous_format)
        half = partial(convolution, torch.bfloat16, torch.channels_last)
        jobs = [
            Job("closed form", inputs, lambda: closed, closed),
            Job("compiled", inputs, compiled, closed, graph=True),
            Job("convolution float32", inputs, float32, closed, pairs),
            Job("convolution bfloat16", narrow, half, closed, pairs, refusal=refusal),
            Job("direct + rank 32", inputs, lambda: factored, factored, pairs * RANK / channels),
            Job("Shih", inputs, lambda: shih, shih, 2 * pairs),
        ]
        return [job for job in jobs if job.name in self.options.forms]

    def _kernels(self, name: str, channels: int, batch: int) -> list[Job]:
        inputs, radius = self._inputs(channels, batch), self.options.radius
        forms = kernels.part(name, channels, self.positions, radius, self.device, self.bandwidth, self.rate)
        return [Job(form.name, inputs, form.build, form.exact, graph=True, floor=form.floor) for form in forms]

    def _sketch(self, channels: int, batch: int) -> list[Job]:
        inputs = self._inputs(channels, batch)
        sketch = CompactBilinear(channels).to(self.device)

        hashed = partial(compact_bilinear, bins=sketch.bins, signs=sketch.signs, dim=sketch.dim)
        scatter = kernels.torch_only(lambda A: hashed(A, A))

        def fft(A: Tensor) -> Tensor:
            return compact_bilinear_fft(A, A, bins=sketch.bins, signs=sketch.signs, dim=sketch.dim)

        return [Job("scatter", inputs, lambda: scatter, scatter), Job("FFT", inputs, lambda: fft, scatter)]

    def _descriptor(self, channels: int, batch: int) -> list[Job]:
        """The network alone; then each recipe whole, and its pooling alone on activations that are ready."""
        config = find_recipe(RECIPES[0]).config
        dtype = resolve_dtype(config.dtype, self.device)
        network = build_backbone(config.backbone, config.layer, weights=None, device=self.device, dtype=dtype)
        shape = (batch, 3, *self.options.picture)
        pictures = [torch.randint(256, shape, dtype=torch.uint8, device=self.device) for _ in range(2)]
        maps = [network(picture) for picture in pictures]
        jobs = [Job("network", pictures, lambda: network)]
        for name in RECIPES:
            descriptor = Descriptor(find_recipe(name).config, device=str(self.device), backbone=network)
            jobs.append(Job(name, pictures, partial(getattr, descriptor, "describe")))
            jobs.append(Job(f"{name}, pooling alone", maps, partial(getattr, descriptor, "pooler")))
        return jobs


def compact_bilinear_fft(A: Tensor, C: Tensor, *, bins: Tensor, signs: Tensor, dim: int) -> Tensor:
    """Compact bilinear pooling as it was published: both maps sketched at each position, multiplied by FFT. (B, dim)

    The same values as `pooling.compact_bilinear`, which needs no transform: here only to be measured against.
    """
    h, s = (x.view(A.shape[1], C.shape[1]) for x in (bins, signs))  # of pairs of channels

    def transform(x: Tensor, bins: Tensor, signs: Tensor) -> Tensor:
        x = x.flatten(2) * signs[:, None]  # (B, C, HW)
        spectrum: Tensor = torch.fft.rfft(x.new_zeros(x.shape[0], dim, x.shape[2]).index_add_(1, bins, x), dim=1)
        return spectrum  # (B, dim/2 + 1, HW)

    # h[i, j] = h1[i] + h2[j] and s[i, j] = s1[i] s2[j]: first column less its corner, and first row, are such factors
    product = transform(A, (h[:, 0] - h[0, 0]) % dim, s[:, 0] * s[0, 0]) * transform(C, h[0], s[0])
    out: Tensor = torch.fft.irfft(product.sum(2), n=dim, dim=1)
    return out


def _row(about: Row, name: str, note: str = "") -> Row:
    numbers = dict.fromkeys(("ms", "low", "high", "ratio", "floor", "error"))  # ms for each image
    return {"section": about["section"], "name": name, **about, **numbers, "note": note}


def _reason(error: Exception) -> str:
    first = (str(error).strip() or repr(error)).splitlines()[0]
    return f"failed: {type(error).__name__}: {first[:200]}"


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _load() -> float | None:
    """Processes that wanted to run in the last minute: whether the machine was quiet."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
