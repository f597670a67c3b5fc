"""The command `cooc`, and `python -m cooc`. A search is offered to the process that stays before anything is loaded."""

from __future__ import annotations

import atexit
import gc
import sys

from cooc.asking import KEPT, ask
from cooc.errors import CoocError


def main() -> None:
    if sys.argv[1:2] == ["search"] and "--help" not in sys.argv:
        try:
            code = ask(sys.argv[1:])
        except CoocError as error:
            print(f"cooc: {error}", file=sys.stderr)
            code = error.exit_code
        if code is not None:
            sys.exit(code)
        gc.set_threshold(KEPT)
    atexit.register(gc.freeze)  # or Python looks for garbage once more, for a quarter of a second after torch
    from cooc.cli import main

    main()


if __name__ == "__main__":
    main()
