"""What it takes to run a number again: command, commit, versions and machine."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from cooc.activations import resolve_device


def provenance(device: str = "auto") -> dict[str, Any]:
    """Command, commit, versions and machine: what it takes to run a number again."""
    chosen = resolve_device(device)
    versions = {name: metadata.version(name) for name in ("torch", "numpy", "pillow")}
    accelerator = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else None
    return {
        "command": portable(f"{_program()} {shlex.join(sys.argv[1:])}"),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **versions},
        "machine": {"accelerator": accelerator, "cpu": _processor(), "cores": os.cpu_count()},
    }


def _program() -> str:
    return "python -m benchmarks" if Path(sys.argv[0]).parent.name == "benchmarks" else "cooc"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    """The commit of the code that runs; "+" marks changes that were not committed. A copy without git may say it."""
    if "COOC_COMMIT" in os.environ:
        return os.environ["COOC_COMMIT"]
    here = Path(__file__).parent
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def portable(command: str) -> str:
    """A command that says nothing of the machine it ran on: of a path from the root only the last part."""
    return re.sub(r"(?<=[ ='])/(?:[^/ ]+/)*", "", command)
