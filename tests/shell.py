"""Commands as a shell sees them: `cooc("search", path, "--json")` runs here, where torch is loaded already."""

from __future__ import annotations

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


def shell(app: typer.Typer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    def call(*words: object) -> Result:
        monkeypatch.setattr(sys, "argv", [str(app.info.name), *map(str, words)])
        with pytest.raises(SystemExit) as end:
            run(app)
        out, err = capsys.readouterr()
        return Result(int(end.value.code or 0), out, " ".join(err.split()))

    return call
