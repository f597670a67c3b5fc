"""`cooc bench speed`: shows what benchmarks.speed measures, and writes it to results/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cooc.cli import err, out
from cooc.errors import InputError

WIDE = 100  # columns of a table that goes into a file or a pipe
TITLES = {
    "cooccurrence": "C_T at {0} x {1}, radius {2}; ratio: to the closed form; floor: A read, C_T written at copy speed",
    "sketch": "Compact bilinear pooling to 8192 dimensions; ratio: to the scatter form",
    "descriptor": "Whole descriptor, pictures of {3} x {4}; ratio: to the bare network",
    "direct": "GPU kernel of C_T; ratio: to the kernel; floor: A read, C_T written at copy speed",
    "linear": "GPU kernel of ChCO-SC_T without C_T; floor: A read at copy speed",
    "factored": "C_T with direct + rank 32; floor: operations at the measured bfloat16 rate",
    "segments": "GPU kernel of the sketch to 8192 dimensions; floor: A read at copy speed",
}


def speed(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    channels: Annotated[str, typer.Option(metavar="N,N,...", help="Channels of the maps.")] = "32,512,2048",
    batches: Annotated[str, typer.Option(metavar="N,N,...", help="Images in one call.")] = "1,5,32",
    picture: Annotated[str, typer.Option(metavar="WxH", help="Pixels of a picture for the descriptor.")] = "1024x768",
    sections: Annotated[str, typer.Option(help=f"Any of {','.join(TITLES)}; kernels: the last four, on a GPU.")] = "",
    forms: Annotated[str, typer.Option(help="Only these forms of C_T, joined by commas.")] = "",
    seconds: Annotated[float, typer.Option(help="For one form at one size.")] = 0.4,
    results: Annotated[Path, typer.Option(metavar="FOLDER", help="Where speed-<device>.json goes.")] = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Measure C_T in all its forms, the sketch, and the descriptor against its bare network, in one run."""
    from benchmarks.speed import FORMS, SECTIONS, SpeedConfig, run_speed, write_speed

    width, height = _numbers(picture, "x", "--picture", 2)
    wanted = sections.replace("kernels", "direct,linear,factored,segments")
    with err.status("Measuring ...") as status:
        options = SpeedConfig(
            device=device,
            channels=tuple(_numbers(channels, ",", "--channels")),
            batches=tuple(_numbers(batches, ",", "--batches")),
            picture=(height, width),
            sections=tuple(wanted.split(",")) if wanted else SECTIONS,
            forms=tuple(forms.split(",")) if forms else FORMS,
            seconds=seconds,
            progress=lambda what: status.update(f"Measuring {what}"),
            save=lambda result: write_speed(result, results),
        )
        result = run_speed(options)
    path = write_speed(result, results)
    if as_json:
        typer.echo(json.dumps(result))
        return
    for section in options.sections:
        if any(row["section"] == section for row in result["rows"]):
            _print_section(result, section)
    _print_targets(result)
    out.print(f"Written to {path}.", markup=False)


def _print_section(result: dict[str, Any], section: str) -> None:
    rows = [row for row in result["rows"] if row["section"] == section]
    sizes = (*result["map_size"], result["radius"], *reversed(result["picture"]))
    out.print(TITLES[section].format(*sizes), style="bold", markup=False)
    numbers = [name for name in ("ratio", "floor", "error") if any(row[name] is not None for row in rows)]
    table = Table(box=None, pad_edge=False, width=None if out.is_terminal else WIDE)
    table.add_column("", no_wrap=True, ratio=1)
    for heading in ("channels", "batch", "ms / image", "10 .. 90 %", *numbers):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        spread = f"{_show(row['low'])} .. {_show(row['high'])}" if row["ms"] is not None else row["note"].split(":")[0]
        cells = [_show(row[name], ".0e" if name == "error" else ".3g") for name in numbers]
        table.add_row(row["name"], str(row["channels"]), str(row["batch"]), _show(row["ms"]), spread, *cells)
    out.print(table)
    notes: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["note"]:
            notes.setdefault((row["name"], row["note"]), []).append(f"{row['channels']}x{row['batch']}")
    for (name, note), where in notes.items():
        out.print(f"{name} at {', '.join(where)}: {note}.", style="dim", markup=False)
    out.print()


def _print_targets(result: dict[str, Any]) -> None:
    for target in result["targets"]:
        verdict = {True: "met", False: "missed", None: "not run"}[target["met"]]
        out.print(f"{target['what']}: {_show(target['value'])} (wanted {target['wanted']}: {verdict})", markup=False)
    load = result["load"]
    where = result["machine"]["accelerator"] or f"{result['threads']} threads, load {load['before']} .. {load['after']}"
    out.print(f"{result['device']}: {where}; copies run at {result['copy_gb_per_s']} GB/s.", markup=False)
    if result["bfloat16_tflops"]:
        out.print(f"A bfloat16 product of 8192 x 8192 runs at {result['bfloat16_tflops']} TFLOP/s.", markup=False)


def _show(value: float | None, form: str = ".3g") -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if form == ".3g" and value >= 1000 else f"{value:{form}}"


def _numbers(text: str, between: str, option: str, count: int | None = None) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(between)]
    except ValueError:
        numbers = []
    if not numbers or (count is not None and len(numbers) != count):
        raise InputError(f"{option} {text!r}: whole numbers joined by {between!r} are wanted.")
    return numbers
