"""Commands as a shell sees them: `cooc("search", path, "--json")` runs here, where torch is loaded already."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import typer

from cooc.cli import run


class Result(NamedTuple):
    code: int
    out: str
    err: str  # its white space made single blanks

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Shell = Callable[..., Result]


def shell(app: typer.Typer) -> Shell:
    def call(*words: object) -> Result:
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [str(app.info.name), *map(str, words)])
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
                run(app)
        return Result(int(end.value.code or 0), out.getvalue(), " ".join(err.getvalue().split()))

    return call
