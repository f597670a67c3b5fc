"""Write docs/cli.md from the commands' own --help: `make docs`. tests/test_docs.py fails when the two differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from cooc.cli import every

PAGE = Path(__file__).with_name("cli.md")
HEAD = """# Commands

Written by `make docs` from `--help`; do not edit. Pictures may be of any common format, EXIF rotation is applied.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | something unforeseen |
| 2 | wrong input: the message says what, and how to repair it |
| 3 | done, but some files were left out and reported |
| 4 | weights missing, damaged or not to be had |
| 5 | an index that cannot be used as asked |
| 6 | a benchmark's data are missing or wrong |
| 7 | this machine failed: no memory, no file handles, a disk with read errors. What was done is kept |
| 130 | interrupted |

`COOC_HOME` moves the cache, `COOC_OFFLINE=1` forbids fetching, `COOC_DEBUG=1` shows tracebacks.
"""


def page() -> str:
    return HEAD + "".join(sections(typer.main.get_command(every()), "cooc"))


def sections(command: Any, path: str, parent: Any = None) -> Iterator[str]:
    """The help of a command, then of the commands below it, at a width that does not depend on the terminal."""
    context = command.context_class(command, info_name=path.rpartition(" ")[2], parent=parent, terminal_width=100)
    text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    yield f"\n## {path}\n\n```text\n{text}\n```\n"
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        if not (child := command.commands[name]).hidden:
            yield from sections(child, f"{path} {name}", context)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
