"""The command line. Each command is thin: it reads its arguments, makes one call, and shows what came back.

    options.py        options that several commands have
    bars.py, runs.py  how far a run is, and what it did
    showing.py        results for people: a table, a contact sheet, a page
    writing.py        files that a command writes
    describing.py     describe, heatmap, whiten, recipes
    weights.py        weights list | fetch | verify | export | import
    indexing.py       index, add
    holding.py        remove, tag, status
    watching.py       watch
    calibrating.py    calibrate
    upkeep.py         verify, compact, snapshot, restore, rebuild, export, import
    searching.py      search
    copies.py         duplicates
    warm.py           a process that stays for a while, so that the next search need not load anything
    matching.py       match
    serving.py        serve, explain
    training.py       train
    filters.py        filter show | compress | import
    benching.py       bench DATASET, data list | check | where
    reporting.py      tables, compare
    planning.py       plan

Exit codes: 0 done; 2 wrong input; 3 done, but some files were left out and reported; 4 weights; 5 index; 6 data set;
7 this machine failed; 130 interrupted; 1 anything else, and of `cooc match`: not verified. The heavy modules are
imported inside the commands, so that --help is quick; of the modules above only the one whose command is asked for.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from cooc import __version__
from cooc.asking import SLEEPING
from cooc.errors import CoocError, InputError, MachineError

for _name, _value in SLEEPING.items():
    os.environ.setdefault(_name, _value)

# What people do with their pictures, in this order; all other commands come after these in the help.
EVERYDAY = (
    "index", "search", "duplicates", "status", "watch", "add", "remove", "tag", "serve", "match", "explain", "heatmap"
)  # fmt: skip
MOVED = ("figures",)  # cooc measuring itself: python -m benchmarks
COMMANDS = {  # of each module, in the order of the help: one that is not asked for is not imported
    "reporting": ("tables", "compare"),
    "calibrating": ("calibrate",),
    "copies": ("duplicates",),
    "describing": ("describe", "heatmap", "whiten", "recipes"),
    "holding": ("remove", "tag", "status"),
    "indexing": ("index", "add"),
    "matching": ("match",),
    "planning": ("plan",),
    "searching": ("search",),
    "serving": ("explain", "serve"),
    "training": ("train",),
    "upkeep": ("verify", "compact", "snapshot", "restore", "rebuild", "export", "import"),
    "watching": ("watch",),
    "benching": ("bench", "data"),
    "filters": ("filter",),
    "weights": ("weights",),
}


class Grouped(typer.core.TyperGroup):
    """The help in two groups. Commands that moved away say where they are."""

    def list_commands(self, ctx: Any) -> list[str]:
        order = dict.fromkeys([*EVERYDAY, *itertools.chain.from_iterable(COMMANDS.values())])
        return [name for name in order if name in self.commands]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        names = [name for name in self.list_commands(ctx) if not self.commands[name].hidden]
        everyday = [name for name in names if name in EVERYDAY]
        limit = formatter.width - 6 - max(map(len, names))
        for title, group in (("Everyday", everyday), ("Research and operation", names[len(everyday) :])):
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit)) for name in group])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in MOVED:
            raise InputError(f"`cooc {args[0]}` is about cooc itself. In a clone: python -m benchmarks {args[0]}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="cooc",
    cls=Grouped,
    help="Find the pictures that show the same thing.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def renew_consoles() -> None:
    """What they show (colours, width) is decided by the terminal at hand, which may have become another one."""
    for console in (out, err):
        vars(console).update(vars(Console(stderr=console.stderr, highlight=False, soft_wrap=True)))


def _version(show: bool) -> None:
    if show:
        out.print(f"cooc {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say more about what is done.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    handler = RichHandler(console=err, show_time=False, show_path=False, markup=False)
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s", handlers=[handler])


def main() -> None:
    try:
        run(only(*sys.argv[1:2]))
    finally:  # all is done and said; Ctrl-C while Python clears up would print tracebacks
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def every() -> typer.Typer:
    """The app with all commands."""
    for module in COMMANDS:
        importlib.import_module(f"cooc.cli.{module}")
    return app


def only(*name: str) -> typer.Typer:
    """The app with the command of that name alone, if there is one: to put all of them together takes long."""
    for module, names in COMMANDS.items():
        if not set(name).isdisjoint(names):
            importlib.import_module(f"cooc.cli.{module}")
    asked = copy.copy(app)
    asked.registered_groups = []
    asked.registered_commands = [
        command
        for command in app.registered_commands
        if (command.name or typer.main.get_command_name(command.callback.__name__)) in name  # type: ignore[union-attr]
    ]
    return asked if asked.registered_commands else every()


def run(app: Callable[..., None]) -> None:
    """Run a command; errors become a message and an exit code, never a traceback (COOC_DEBUG=1 shows it)."""
    try:
        app(standalone_mode=True)
    except CoocError as error:
        if os.environ.get("COOC_DEBUG"):
            raise
        err.print(f"cooc: {error}", style="red", markup=False)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        err.print("cooc: interrupted.")
        sys.exit(130)
    except BrokenPipeError:  # `cooc ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (OSError, MemoryError) as error:
        from cooc.pictures.faults import is_machine

        if os.environ.get("COOC_DEBUG") or not is_machine(error):
            raise
        err.print(f"cooc: this machine failed: {error or type(error).__name__}", style="red", markup=False)
        sys.exit(MachineError.exit_code)
