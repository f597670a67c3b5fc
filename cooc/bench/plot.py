"""Drawings of what was measured (matplotlib: the extra `figures`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cooc.cooccurrence import Cooccurrence, direct_filter
from cooc.errors import InputError, UnknownNameError
from cooc.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, GREY = "#28282c", "#8a8a90"
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#28282c")  # Okabe and Ito: for all eyes
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "svg.hashsalt": "cooc",  # the same drawing is the same file
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}


def plot_comparison(comparison: dict[str, Any]) -> Figure:
    """mAP against time, the area of a bubble is the size of a vector; what something else beats in all is pale."""
    figure = page(7.4, 4.8)
    ax = figure.add_subplot()
    rows = [row for row in comparison["recipes"] if row["ms"] is not None]
    if not rows:
        raise InputError("mAP is drawn against time, and vectors from elsewhere have none. Name a recipe, too.")
    largest = max(row["bytes"] for row in rows)
    times = [row["ms"] for row in rows]
    for row in rows:
        low, high = row["interval"]
        colour = GREY if row["beaten_by"] else LINES[0]
        errors = [[row["mAP"] - low], [high - row["mAP"]]]
        ax.errorbar(row["ms"], row["mAP"], errors, color=colour, linewidth=1, alpha=0.5, capsize=2)
        area = 60 + 900 * row["bytes"] / largest
        ax.scatter(row["ms"], row["mAP"], area, color=colour, alpha=0.35 if row["beaten_by"] else 0.75, linewidth=0)
        label = f"{row['recipe']}\n{row['bytes']:,} bytes"
        offset = (0.5 * area**0.5 + 4, 0)
        ax.annotate(label, (row["ms"], row["mAP"]), offset, textcoords="offset points", va="center", fontsize=8)
    ax.margins(x=0.25, y=0.15)
    if max(times) > 4 * min(times):
        from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set(xlabel=f"ms for one picture on {comparison['device']}", ylabel="mAP, %, with its 95% interval")
    ax.set_title(
        f"{comparison['dataset']}: {comparison['queries']} queries, {comparison['images']} pictures", loc="left"
    )
    ax.grid(color="#e8e8ea", linewidth=0.8)
    ax.set_axisbelow(True)
    return figure


def plot_filter(layer: Cooccurrence, named: Sequence[tuple[int, int]] = ()) -> Figure:
    """Each square is the weight of every offset between two channels; direct co-occurrences weigh all of them 1."""
    weights = layer.full_filter()  # (C, C, S, S)
    channels = weights.shape[0]
    change = (weights - direct_filter(channels, layer.radius, layer.eps).to(weights)).flatten(2).norm(dim=2)  # (C, C)
    strongest = [divmod(int(i), channels) for i in change.flatten().topk(min(8, change.numel())).indices]
    rows = {
        "as in the paper": [pair for pair in named if max(pair) < channels],
        "changed most": strongest[:4],
        "": strongest[4:],
    }
    rows = {label: pairs for label, pairs in rows.items() if pairs}
    figure = page(8.2, 2.15 * len(rows) + 0.2)
    grid = figure.add_gridspec(len(rows), 4)
    for i, (label, pairs) in enumerate(rows.items()):
        for j, (k, w) in enumerate(pairs[:4]):
            ax = figure.add_subplot(grid[i, j])
            square = weights[k, w].numpy()
            middle = layer.eps if k == w else 1.0
            span = max(float(np.abs(square - middle).max()), 1e-12)
            shown = ax.imshow(square, cmap="RdBu_r", vmin=middle - span, vmax=middle + span, interpolation="nearest")
            ax.set(xticks=[], yticks=[], title=f"{k} - {w}")
            ax.spines[:].set_visible(False)
            bar = figure.colorbar(shown, ax=ax, shrink=0.85)
            bar.outline.set_visible(False)
            bar.ax.tick_params(labelsize=7, length=2)
            if j == 0:
                ax.set_ylabel(label)
    return figure


def save(drawing: Callable[[], Figure], path: str | Path) -> Path:
    """Draw in our style, into a .png, .svg, .pdf or .jpg, as the name says; written whole or not at all."""
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise InputError("Figures need matplotlib: install the extra `figures`.") from error
    path = Path(path)
    with rc_context(STYLE):
        figure = drawing()
        _write(figure, path)
    return path


def _write(figure: Figure, path: Path) -> None:
    kinds = figure.canvas.get_supported_filetypes()
    kind = path.suffix.lstrip(".").lower()
    if kind not in kinds:
        raise UnknownNameError("type of figure", path.suffix, [f".{name}" for name in kinds])
    options: dict[str, Any] = {"pil_kwargs": {"quality": 78, "optimize": True}} if kind in ("jpg", "jpeg") else {}
    if kind == "svg":
        options["metadata"] = {"Date": None}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        figure.savefig(file, format=kind, dpi=120, facecolor="white", **options)


def page(width: float, height: float) -> Figure:
    """An empty figure, without pyplot's global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")
