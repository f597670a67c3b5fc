"""The paper's figures, drawn from real pictures, learned filters and result files.

    draw("correlation", Inputs(data=("data",)), "docs/images")      # -> docs/images/correlation.png

    correlation        Fig. 3   C_V of the query images against one another, sorted by landmark
    spatial            Fig. 5   spatial co-occurrences over pictures
    filters            Fig. 7   learned filters between pairs of channels
    learned-maps       Fig. 8   direct and learned co-occurrences over pictures
    precision-recall            mean curves of recipes, from result files
    best-worst                  the best and the worst queries with their ten nearest pictures
    growth                      time, memory and disk by the number of images, from results/growth-cpu.json

Needs the extra `figures` (matplotlib). Photographs come from the user's own data set, or from scikit-image's
public-domain ones; figures that show a data set's photos are for looking at, its licence says what may be passed on.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.results import Results, load_results
from cooc.bench.plot import LINES, page, plot_filter, save
from cooc.bench.scoring import RECALL
from cooc.cooccurrence import Cooccurrence, cooccurrence, cooccurrence_vector
from cooc.datasets.retrieval import Dataset, QueryImage, load_dataset
from cooc.descriptor import Descriptor
from cooc.errors import DatasetError, InputError, UnknownNameError
from cooc.evaluation import PROTOCOLS
from cooc.explanation.heatmaps import RAMP, overlay, spatial_cooccurrences
from cooc.pictures.decode import load_image
from cooc.recipes import DescriptorConfig, find_filter

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Pixels = NDArray[np.uint8]
RIGHT, WRONG, IGNORED = "#1a9850", "#d73027", "#b8b8bd"
CURVES = (
    "ucrow",
    "crow",
    "paper-linear",
    "paper-linear-topdown",
    "paper-bilinear-topdown",
    "paper-bilinear-topdown-4096",
    "learned",
)


@dataclass(frozen=True)
class Inputs:
    """Where figures take their material from; each uses what it needs."""

    data: tuple[str | Path, ...] = ("data",)
    dataset: str = ""  # "" is oxford5k for the correlation, roxford5k for the best and worst queries
    images: tuple[Path, ...] = ()  # of the maps; without any, scikit-image's public-domain photos
    filter: str = "landmarks"  # a file, or the name of a filter that ships with cooc
    pairs: tuple[tuple[int, int], ...] = ((5, 5), (12, 8), (5, 9), (1, 9))  # channels, as in the paper's Fig. 7
    results: Path = Path("results")
    recipes: tuple[str, ...] = ()  # of the curves; the first one is that of the best and worst queries
    backbone: str = "vgg16-caffe"
    size: int = 512
    device: str = "auto"

    def descriptor(self) -> Descriptor:
        config = DescriptorConfig(backbone=self.backbone, size=self.size, pooling="ucrow")
        return Descriptor(config, device=self.device)

    def load(self, default: str) -> Dataset:
        return load_dataset(self.dataset or default, [Path(folder) for folder in self.data])

    def photographs(self) -> list[Pixels]:
        if self.images:
            return [load_image(path, size=self.size) for path in self.images]
        try:
            from skimage import data
        except ImportError as error:
            raise InputError("Give pictures with --images, or install scikit-image (the extra `demo`).") from error
        photographs = (data.astronaut(), data.rocket(), data.coffee(), data.chelsea())
        return [load_image(pixels, size=self.size) for pixels in photographs]


# Fig. 3


def correlation(inputs: Inputs) -> Figure:
    """Images of one landmark should be alike in which channels co-occur: bright squares along the diagonal."""
    dataset = inputs.load("oxford5k")
    known = landmarks(dataset)
    order = sorted(range(len(known)), key=lambda i: (known[i], i))
    labels = [known[i] for i in order]
    vectors = cooccurrence_vectors(inputs.descriptor(), [dataset.queries[i] for i in order])
    matrix = np.asarray(np.corrcoef(vectors))
    same = np.equal.outer(labels, labels)
    off = ~np.eye(len(labels), dtype=bool)

    figure = page(7.6, 6.4)
    ax = figure.add_subplot()
    shown = ax.imshow(matrix, cmap=_ramp(), interpolation="nearest", vmin=float(matrix.min()), vmax=1)
    starts = [i for i, label in enumerate(labels) if i == 0 or label != labels[i - 1]]
    middles = [(a + b - 1) / 2 for a, b in zip(starts, [*starts[1:], len(labels)], strict=True)]
    for start in starts[1:]:
        ax.axhline(start - 0.5, color="white", linewidth=0.6)
        ax.axvline(start - 0.5, color="white", linewidth=0.6)
    names = [labels[start] for start in starts]
    ax.set_xticks(middles, names, rotation=45, ha="right", rotation_mode="anchor")
    ax.set_yticks(middles, names)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    pairs = {"within a landmark": matrix[same & off], "between landmarks": matrix[~same]}
    means = ", ".join(f"{values.mean():.2f} {where}" for where, values in pairs.items() if values.size)
    ax.set_title(f"Correlation of co-occurrence vectors\non average {means}", loc="left", fontsize=11)
    figure.colorbar(shown, ax=ax, shrink=0.8, pad=0.02).outline.set_visible(False)
    return figure


@torch.inference_mode()
def cooccurrence_vectors(descriptor: Descriptor, queries: Sequence[QueryImage]) -> NDArray[np.float32]:
    """C_V of each query, cropped to its box. (N, C)"""
    vectors = []
    for query in queries:
        A = descriptor.backbone(descriptor.load(query.path, query.box)[None]).float()
        vectors.append(cooccurrence_vector(cooccurrence(A, descriptor.config.radius))[0].cpu().numpy())
    return np.stack(vectors)


def landmarks(dataset: Dataset) -> list[str]:
    """What each query asks for: queries that share most positives ask for one thing, named as most of them are."""
    groups: list[tuple[set[int], list[int]]] = []  # positives of the first query, all queries
    for i, truth in enumerate(dataset.ground_truth):
        positives = {int(j) for j in truth.select(("positives", "easy", "hard", "itself"))}
        for first, members in groups:
            if 2 * len(first & positives) > len(first | positives):
                members.append(i)
                break
        else:
            groups.append((positives, [i]))
    names = [""] * len(dataset.queries)
    for positives, members in groups:
        paths = [dataset.image_paths[j] for j in sorted(positives)] or [dataset.queries[i].path for i in members]
        (name, _), *_ = Counter(re.sub(r"_?\d+$", "", path.stem) for path in paths).most_common(1)
        for i in members:
            names[i] = name.replace("_", " ")
    return names


# Fig. 5 and 8


def spatial(inputs: Inputs) -> Figure:
    """Where in a picture channels co-occur: salient things stand out, plain ground does not."""
    descriptor, photographs = inputs.descriptor(), inputs.photographs()
    maps = [spatial_cooccurrences(descriptor, pixels) for pixels in photographs]
    heated = [overlay(p, alpha, descriptor.backbone.stride) for p, alpha in zip(photographs, maps, strict=True)]
    return _gallery({"": photographs, "spatial co-occurrences": heated})


def learned_maps(inputs: Inputs) -> Figure:
    """What learning changed: the same pictures with direct and with learned co-occurrences."""
    descriptor, photographs = inputs.descriptor(), inputs.photographs()
    layer = Cooccurrence.load(find_filter(inputs.filter)).requires_grad_(False)
    stride = descriptor.backbone.stride
    direct = [overlay(p, spatial_cooccurrences(descriptor, p), stride) for p in photographs]
    learned = [overlay(p, spatial_cooccurrences(descriptor, p, layer), stride) for p in photographs]
    return _gallery({"": photographs, "direct": direct, "learned": learned})


def _gallery(rows: dict[str, list[Pixels]]) -> Figure:
    """Pictures side by side at one height, one row under the other."""
    first = next(iter(rows.values()))
    widths = [pixels.shape[1] / pixels.shape[0] for pixels in first]
    height = min(2.3, 11 / sum(widths))
    figure = page(height * sum(widths) + 0.3, height * len(rows))
    grid = figure.add_gridspec(len(rows), len(first), width_ratios=widths)
    for i, (label, pictures) in enumerate(rows.items()):
        for j, pixels in enumerate(pictures):
            ax = figure.add_subplot(grid[i, j])
            _picture(ax, pixels)
            if j == 0:
                ax.set_ylabel(label)
    return figure


# Fig. 7


def filters(inputs: Inputs) -> Figure:
    return plot_filter(Cooccurrence.load(find_filter(inputs.filter)), inputs.pairs)


# From result files


def precision_recall(inputs: Inputs) -> Figure:
    """Mean precision at each recall: which recipe keeps its first places clean, and which one finds the last ones."""
    results = load_results(inputs.results)
    names = [name for name in inputs.recipes or CURVES if any(recipe == name for _, recipe in results.by_name)]
    panels = {
        (dataset, protocol): [name for name in names if (dataset, name) in results.by_name]
        for (dataset, recipe), result in results.by_name.items()
        if recipe in names
        for protocol in result["results"]["none"]
    }
    if not panels:
        raise DatasetError(
            f"{inputs.results} has no result of {', '.join(inputs.recipes or CURVES)}: run `cooc bench`."
        )
    columns = min(3 if len(panels) > 4 else 2, len(panels))
    rows = -(-len(panels) // columns)
    figure = page(4.9 * columns, 3.9 * rows)
    for i, ((dataset, protocol), members) in enumerate(sorted(panels.items(), key=_by_name)):
        ax = figure.add_subplot(rows, columns, i + 1)
        for name in members:
            scores = results.by_name[dataset, name]["results"]["none"][protocol]
            colour = LINES[names.index(name) % len(LINES)]
            ax.plot(100 * RECALL, 100 * np.array(scores["curve"]), color=colour, label=f"{scores['mAP']:.1f}  {name}")
        ax.set(xlim=(0, 100), ylim=(0, 102), xlabel="recall, %", ylabel="precision, %")
        ax.set_title(dataset if protocol == "plain" or dataset.startswith(protocol) else protocol, loc="left")
        ax.grid(color="#e8e8ea", linewidth=0.8)
        legend = ax.legend(title="mAP  recipe", frameon=True, framealpha=0.85, edgecolor="none", fontsize=8)
        legend.get_title().set_fontsize(8)
    return figure


def _by_name(panel: tuple[tuple[str, str], list[str]]) -> tuple[str, int]:
    (dataset, protocol), _ = panel
    return dataset, list(PROTOCOLS).index(protocol)


def best_worst(inputs: Inputs, count: int = 3) -> Figure:
    """Three best and three worst queries by AP, of different landmarks, each with its ten nearest pictures."""
    dataset = inputs.load("roxford5k")
    recipe = (inputs.recipes or ("paper-linear-topdown",))[0]
    result = _result(load_results(inputs.results), dataset, recipe)
    protocol = dataset.protocols[len(dataset.protocols) // 2]  # medium, where there are three
    ap: list[float | None] = result["results"]["none"][protocol]["ap"]
    known = [i for i, value in enumerate(ap) if value is not None]
    order = sorted(known, key=lambda i: -(ap[i] or 0.0))
    names = landmarks(dataset)
    chosen = _of_different_landmarks(order, names, count)
    chosen += [i for i in reversed(_of_different_landmarks(order[::-1], names, count)) if i not in chosen]

    index = {path.stem: i for i, path in reversed(list(enumerate(dataset.image_paths)))}
    rule = PROTOCOLS[protocol]
    columns = max(len(result["top"][i]) for i in chosen)
    figure = page(1.05 * (columns + 1.4), 1.1 * len(chosen))
    grid = figure.add_gridspec(len(chosen), columns + 1, width_ratios=[1.4] + [1.0] * columns)
    for row, i in enumerate(chosen):
        query, truth = dataset.queries[i], dataset.ground_truth[i]
        ax = figure.add_subplot(grid[row, 0])
        _picture(ax, load_image(query.path, size=320, box=query.box))
        ax.set_title(f"AP {100 * (ap[i] or 0.0):.0f}", fontsize=8, pad=2)
        positive, ignored = set(truth.select(rule.positive)), set(truth.select(rule.ignored))
        for column, name in enumerate(result["top"][i]):
            found = index[name]
            frame = RIGHT if found in positive else IGNORED if found in ignored else WRONG
            ax = figure.add_subplot(grid[row, column + 1])
            _picture(ax, _square(load_image(dataset.image_paths[found], size=240)), frame)
    figure.suptitle(
        f"{recipe}, {protocol}: the query and its ten nearest; green is right, red wrong, grey not counted",
        fontsize=9,
        x=0.01,
        ha="left",
    )
    return figure


def _result(results: Results, dataset: Dataset, recipe: str) -> dict[str, Any]:
    result = results.by_name.get((dataset.name, recipe))
    if result is None:
        raise DatasetError(f"No result of {recipe} on {dataset.name}: run `cooc bench {dataset.name} -r {recipe}`.")
    if "top" not in result:
        raise DatasetError(f"The result of {recipe} on {dataset.name} has no nearest pictures: measure it again.")
    return result


def _of_different_landmarks(order: Sequence[int], names: Sequence[str], count: int) -> list[int]:
    first: dict[str, int] = {}
    for i in order:
        first.setdefault(names[i], i)
    return list(first.values())[:count]


def _square(pixels: Pixels) -> Pixels:
    """The middle of a picture, so that a row of them is even."""
    height, width = pixels.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return pixels[top : top + side, left : left + side]


def growth(inputs: Inputs) -> Figure:
    """Adding, memory while adding, disk and exact search, against the number of images; both axes logarithmic."""
    found = load_results(inputs.results).other.get("growth-cpu")
    if found is None:
        raise DatasetError(f"{inputs.results} has no growth-cpu.json: run cooc bench growth first.")
    panels: dict[str, Callable[[dict[str, Any]], float]] = {
        "adding, seconds": lambda row: float(row["adding, seconds"]),
        "memory while adding, MB": lambda row: float(row["adding, memory in MB"]["most"]),
        "on disk, MB": lambda row: float(row["on disk, MB"]),
        "exact search, ms": lambda row: float(row["exact search, ms"]),
    }
    figure = page(10, 3)
    for ax, (title, value) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for storage, colour in zip(dict.fromkeys(row["storage"] for row in found["rows"]), LINES, strict=False):
            rows = [row for row in found["rows"] if row["storage"] == storage]
            ax.plot([row["images"] for row in rows], [value(row) for row in rows], "o-", color=colour, label=storage)
        ax.set(xscale="log", yscale="log", xlabel="images")
        ax.set_title(title, loc="left", fontsize=10)
        ax.grid(color="#e8e8ea", linewidth=0.8)
    ax.legend(frameon=False)
    return figure


# Drawing

FOUND = {  # what is indexed -> the result file of what it finds, and which of its scores counts
    "fast": ("verified/{}--resnet-tuned+size=384", "none"),
    "balanced": ("verified/{}--resnet-tuned", "sift thorough"),
    "best": ("verified/{}--resnet-tuned", "sift+xfeat thorough"),
}


def qualities(inputs: Inputs) -> Figure:
    """What each quality finds against the seconds that a photo takes: how the default was chosen."""
    results = load_results(inputs.results)
    if "qualities-cpu" not in results.other:
        raise DatasetError(f"{inputs.results} has no qualities-cpu.json: run `python -m benchmarks qualities PHOTOS`.")
    rows = results.other["qualities-cpu"]["qualities"]
    figure = page(7, 3.6)
    ax = figure.subplots()
    sets = ("Landmark dev set", "gldv2_dev", 0), ("ROxford Medium", "roxford5k", 1)
    for (label, dataset, protocol), colour in zip(sets, LINES, strict=False):
        points = []
        for name, (file, score) in FOUND.items():
            found = results.other.get(file.format(dataset))
            if found is not None and name in rows and score in found["results"]:
                value = list(found["results"][score].values())[protocol]["mAP"]
                points.append((rows[name]["seconds of a photo"], value))
                ax.annotate(name, points[-1], xytext=(4, 4), textcoords="offset points")
        ax.plot([x for x, _ in points], [y for _, y in points], "o-", color=colour, label=label)
    ax.set(xscale="log", xlabel="seconds for a photo of 12 megapixels, two cores", ylabel="mAP, verified where it is")
    ax.grid(color="#e8e8ea", linewidth=0.8)
    ax.legend(frameon=False)
    return figure


FIGURES: dict[str, tuple[Callable[[Inputs], Figure], str]] = {  # name -> how to draw it, file type
    "correlation": (correlation, ".png"),
    "spatial": (spatial, ".jpg"),
    "filters": (filters, ".png"),
    "learned-maps": (learned_maps, ".jpg"),
    "precision-recall": (precision_recall, ".svg"),
    "best-worst": (best_worst, ".jpg"),
    "growth": (growth, ".svg"),
    "qualities": (qualities, ".svg"),
}


def draw(name: str, inputs: Inputs, folder: str | Path) -> Path:
    """One figure of FIGURES, written to folder/<name>.png, .svg or .jpg."""
    if name not in FIGURES:
        raise UnknownNameError("figure", name, FIGURES)
    function, suffix = FIGURES[name]
    return save(lambda: function(inputs), Path(folder) / f"{name}{suffix}")


def _ramp() -> Any:
    from matplotlib.colors import ListedColormap

    return ListedColormap(RAMP / 255)


def _picture(ax: Axes, pixels: Pixels, frame: str = "") -> None:
    ax.imshow(pixels, aspect="equal")
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(bool(frame))
    if frame:
        ax.spines[:].set(color=frame, linewidth=3)
