"""Which engine runs a backbone fastest on this CPU: torch in several ways, ONNX Runtime, OpenVINO.

One run, the same picture and the same weights for all; engines take turns. `error` is the relative distance of an
engine's activations to torch's in float32. An engine that is not installed stays in the table with its reason. torch in
float32 with channels last is what cooc uses where the CPU has no bfloat16; another engine would have to be 1.5 times
faster to be worth a dependency. Engines in 8 bits are calibrated on photos; what mAP they cost is told by `lost_map`.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.timing import Call, measure, sampler
from cooc.activations import BACKBONES, Activations, build_backbone
from cooc.bench.scoring import evaluate_vectors
from cooc.datasets.retrieval import Dataset
from cooc.descriptor import Descriptor
from cooc.errors import UnknownNameError
from cooc.pictures.decode import load_image
from cooc.provenance import provenance
from cooc.recipes import Recipe
from cooc.weights import load_weights

WORTH = 1.5  # times faster than the default: what a dependency must bring
HOPELESS = 4  # times slower: one call is enough
DEFAULT = "torch float32 channels-last"


@dataclass(frozen=True)
class Job:
    """A network with its weights, and a normalised picture for it."""

    name: str
    layer: str
    network: nn.Module  # float32
    example: Tensor  # (1, 3, H, W)
    photos: Sequence[Tensor] = ()  # (1, 3, H, W) each: to calibrate 8 bits on


def _torch(job: Job, layout: torch.memory_format, dtype: torch.dtype = torch.float32) -> Call:
    network = copy.deepcopy(job.network).to(dtype).to(memory_format=layout)  # type: ignore[call-overload]
    return lambda x: network(x.to(dtype=dtype, memory_format=layout)).float()


def _compiled(job: Job) -> Call:
    """For this shape alone: with symbols for the sides, compiling a second one did not come to an end."""
    network = torch.compile(job.network, dynamic=False)
    return lambda x: network(x.contiguous(memory_format=torch.channels_last))


def _onnxruntime(job: Job) -> Call:
    import onnxruntime

    file = io.BytesIO()
    torch.onnx.export(job.network, (job.example.contiguous(),), file, dynamo=False)  # type: ignore[arg-type,unused-ignore]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.contiguous().numpy()})[0])


def _onnxruntime_int8(job: Job) -> Call:
    import onnxruntime
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    class Photos(CalibrationDataReader):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            self.left = iter(job.photos or [job.example])

        def get_next(self) -> dict[str, Any] | None:
            photo = next(self.left, None)
            return None if photo is None else {"x": photo.contiguous().numpy()}

    with tempfile.TemporaryDirectory() as folder:
        plain, small = Path(folder, "plain.onnx"), Path(folder, "int8.onnx")
        shape = {"x": {2: "height", 3: "width"}}
        torch.onnx.export(  # type: ignore[call-arg,unused-ignore]
            job.network, (job.example.contiguous(),), plain, dynamo=False, input_names=["x"], dynamic_axes=shape
        )
        quantize_static(plain, small, Photos(), quant_format=QuantFormat.QDQ, per_channel=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(small.read_bytes(), options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"x": x.contiguous().numpy()})[0])


def _openvino(job: Job, precision: str = "f32", int8: bool = False) -> Call:
    import openvino  # type: ignore[import-not-found,import-untyped,unused-ignore]

    model = openvino.convert_model(job.network, example_input=job.example.contiguous(), input=[1, 3, -1, -1])
    if int8:
        import nncf  # type: ignore[import-not-found,import-untyped,unused-ignore]

        photos = [photo.contiguous().numpy() for photo in job.photos or [job.example]]
        model = nncf.quantize(model, nncf.Dataset(photos), subset_size=len(photos))
    settings = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": str(torch.get_num_threads())}
    compiled = openvino.compile_model(model, "CPU", {"PERFORMANCE_HINT": "LATENCY", **settings})
    return lambda x: torch.from_numpy(compiled(x.contiguous().numpy())[0].copy())


ENGINES: dict[str, Callable[[Job], Call]] = {
    DEFAULT: lambda job: _torch(job, torch.channels_last),
    "torch float32 channels-first": lambda job: _torch(job, torch.contiguous_format),
    "torch bfloat16 channels-last": lambda job: _torch(job, torch.channels_last, torch.bfloat16),
    "torch.compile": _compiled,
    "ONNX Runtime": _onnxruntime,
    "ONNX Runtime int8": _onnxruntime_int8,
    "OpenVINO": _openvino,
    "OpenVINO bfloat16": lambda job: _openvino(job, "bf16"),
    "OpenVINO int8": lambda job: _openvino(job, int8=True),
}


def run_engines(
    backbones: Sequence[str],
    sizes: Sequence[tuple[int, int]],
    engines: Sequence[str] = tuple(ENGINES),
    seconds: float = 10.0,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
    photos: Sequence[Path] = (),
) -> dict[str, Any]:
    """Rows for every network, size (H, W) and engine. `keep` is given the result after each size.

    The first photo is what is measured on; without one it is noise, on which 8 bits cannot be judged."""
    for name in engines:
        if name not in ENGINES:
            raise UnknownNameError("engine", name, ENGINES)
    result: dict[str, Any] = {
        "benchmark": "engines",
        "threads": torch.get_num_threads(),
        "bfloat16": {"amx": _has("amx_bf16"), "avx512_bf16": _has("avx512_bf16"), "avx512": _has("avx512f")},
        "load": [round(os.getloadavg()[0], 2)],
        "rows": [],
        **provenance("cpu"),
    }
    for package in ("onnxruntime", "openvino"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            result["versions"][package] = metadata.version(package)
    for backbone in backbones:
        activations = build_backbone(backbone, weights=load_weights(BACKBONES[backbone].weights))
        for size in sizes:
            with torch.inference_mode():
                result["rows"] += _rows(backbone, activations, size, engines, seconds, photos)
            result["load"].append(round(os.getloadavg()[0], 2))
            keep(result)
    return result


def _rows(
    backbone: str,
    activations: Activations,
    size: tuple[int, int],
    engines: Sequence[str],
    seconds: float,
    photos: Sequence[Path],
) -> list[dict[str, Any]]:
    noise = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0))
    inputs = [_input(activations, picture) for picture in [_photo(path, size) for path in photos] or [noise]]
    example = inputs[0]
    job = Job(backbone, activations.layer, activations.network, example, inputs)
    wanted = activations.network(example.contiguous(memory_format=torch.channels_last))
    rows, samples, once = {}, {}, dict[str, float]()
    for name in dict.fromkeys((DEFAULT, *engines)):
        row: dict[str, Any] = {"backbone": backbone, "height": size[0], "width": size[1], "engine": name}
        rows[name] = row | {"ms": None, "low": None, "high": None, "times_faster": None, "error": None, "note": ""}
        try:
            call = ENGINES[name](job)
            rows[name]["error"] = float(f"{float((call(example) - wanted).norm() / wanted.norm()):.2g}")
            sample = sampler(call, [example], torch.device("cpu"))
            once[name] = sample()
            if once[name] > HOPELESS * once[DEFAULT]:
                rows[name] |= {"ms": round(once[name], 2), "note": "one call only"}
            else:
                samples[name] = sample
        except Exception as error:  # not installed, no compiler, ...
            first = (str(error).strip() or repr(error)).splitlines()[0]
            rows[name]["note"] = f"not run: {type(error).__name__}: {first[:160]}"
    for name, times in measure(samples, seconds).items():
        low, *_, high = statistics.quantiles(times, n=10, method="inclusive")
        middle = statistics.median(times)
        rows[name] |= {"ms": round(middle, 2), "low": round(low, 2), "high": round(high, 2)}
    for row in rows.values():
        if row["ms"]:
            row["times_faster"] = round(rows[DEFAULT]["ms"] / row["ms"], 3)
    return list(rows.values())


def lost_map(recipe: Recipe, dataset: Dataset, engines: Sequence[str], photos: Sequence[Path]) -> dict[str, float]:
    """Engine -> mAP of the recipe's vectors in percent, by its first protocol; all pictures go through the engine."""
    descriptor = Descriptor(recipe.config.replace(dtype="float32"), device="cpu")
    activations, found = descriptor.backbone, {}
    size = (recipe.config.size * 3 // 4, recipe.config.size)
    inputs = [_input(activations, _photo(path, size)) for path in photos]
    job = Job(recipe.config.backbone, activations.layer, activations.network, inputs[0], inputs)
    queries = [(query.path, query.box) for query in dataset.queries]
    everything = [*((path, None) for path in dataset.image_paths), *queries]
    with torch.inference_mode():
        for name in engines:
            call, vectors = ENGINES[name](job), []
            for path, box in everything:
                maps = call(_input(activations, descriptor.load(path, box)[None].float() / 255))
                assert descriptor.whitening is not None
                vectors.append(descriptor.whitening(descriptor.pooler(maps)))
            rows = torch.cat(vectors).numpy()
            scores = evaluate_vectors(dataset, rows[: -len(queries)], rows[-len(queries) :], "none")
            found[name] = next(iter(scores.values()))["mAP"]
    return found


def _input(activations: Activations, picture: Tensor) -> Tensor:
    return (picture - activations.mean) / activations.std


def _photo(path: Path, size: tuple[int, int]) -> Tensor:
    """(1, 3, H, W) in 0..1, whatever its own shape."""
    pixels = torch.from_numpy(load_image(path).copy()).permute(2, 0, 1)[None].float() / 255
    return nn.functional.interpolate(pixels, size, mode="bilinear", antialias=True)


def _has(flag: str) -> bool | None:
    try:
        with open("/proc/cpuinfo") as file:  # noqa: PTH123
            return any(flag in line.split() for line in file if line.startswith("flags"))
    except OSError:
        return None
