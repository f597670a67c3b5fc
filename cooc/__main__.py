"""The command `cooc`, and `python -m cooc`. A search is offered to the process that stays before anything is loaded."""

from __future__ import annotations

import gc
import os
import sys

from cooc.asking import KEPT, ask
from cooc.errors import CoocError


def main() -> None:
    if sys.argv[1:2] == ["search"] and "--help" not in sys.argv:
        _search()
    from cooc.cli import main

    main()


def _search() -> None:
    try:
        code = ask(sys.argv[1:])
    except CoocError as error:
        print(f"cooc: {error}", file=sys.stderr)
        code = error.exit_code
    if code is not None:
        sys.exit(code)
    gc.set_threshold(KEPT)
    from cooc.cli import main
    from cooc.cli.warm import begin

    begin(sys.argv)
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, int):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code)  # the index is closed; Python would take a quarter of a second to clear torch's modules
        raise


if __name__ == "__main__":
    main()
