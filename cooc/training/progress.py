"""Where a training run is: its log, its checkpoint, from which it can go on, and which process of several it is."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from cooc.activations import resolve_device
from cooc.errors import InputError
from cooc.training.network import CoOcNet

if TYPE_CHECKING:
    from cooc.training.train import TrainConfig

__all__ = ["Progress", "Record", "first_before_others", "processes", "rank", "world"]

FORMAT = "cooc-training/1"
Record = dict[str, Any]


def rank() -> int:
    """Which of the processes this is; the first one writes."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def processes(device: str) -> Iterator[str]:
    """Join the others that torchrun started, if it did; gives this process's own device."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield device
        return
    own = resolve_device(device)
    if own.type == "cuda":
        own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(own)
    backend = "nccl" if own.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(hours=12))  # others wait while the first fills the cache
    try:
        yield str(own)
    finally:
        dist.destroy_process_group()


@contextmanager
def first_before_others() -> Iterator[None]:
    """`with first_before_others(): ...` runs in the first process, then in the others: for work on one folder."""
    if rank() > 0:
        dist.barrier()
    yield
    if world() > 1 and rank() == 0:
        dist.barrier()


class Progress:
    """Where a run is: kept in memory, and in folder/checkpoint.pt and folder/log.jsonl."""

    def __init__(
        self, config: TrainConfig, folder: Path | None, net: CoOcNet, optimiser: torch.optim.Optimizer
    ) -> None:
        self.config, self.folder, self.net, self.optimiser = config, folder, net, optimiser
        self.history: list[Record] = []
        self.best, self.seconds = 0, 0.0
        self.best_net: dict[str, Tensor] = {}

    @property
    def epoch(self) -> int:
        return len(self.history) - 1

    def add(self, record: Record, seconds: float) -> None:
        self.history.append(record)
        self.seconds = seconds
        if not self.best_net or "mAP" not in record or record["mAP"] > self.history[self.best]["mAP"]:
            self.best = self.epoch
            self.best_net = {k: v.detach().clone() for k, v in self.net.state_dict().items()}
        if self.folder is not None and rank() == 0:
            self._save(self.folder)

    def _save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, "config": self.config.as_dict(), "history": self.history})
        state = {
            "about": text,
            "best": self.best,
            "seconds": self.seconds,
            "net": self.net.state_dict(),
            "best_net": self.best_net,
            "optimiser": self.optimiser.state_dict(),
        }
        temporary = folder / ".checkpoint.tmp"
        torch.save(state, temporary)
        temporary.replace(folder / "checkpoint.pt")
        temporary = folder / ".log.tmp"
        temporary.write_text("".join(json.dumps(record) + "\n" for record in self.history))
        temporary.replace(folder / "log.jsonl")

    def load(self) -> None:
        file = (self.folder or Path()) / "checkpoint.pt"
        if self.folder is None or not file.is_file():
            raise InputError(f"{file}: there is no checkpoint to resume from. Start without --resume.")
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
            about = json.loads(state["about"])
            found, wanted = about["config"], json.loads(json.dumps(self.config.as_dict()))
        except (pickle.UnpicklingError, RuntimeError, KeyError, ValueError, TypeError, OSError, EOFError) as error:
            raise InputError(f"{file} is no checkpoint of cooc ({error}). Start without --resume.") from error
        free = ("epochs", "patience")  # a run may be prolonged
        changed = [key for key in wanted if key not in free and found.get(key) != wanted[key]]
        if changed:
            key = changed[0]
            raise InputError(
                f"{file} was trained with {key} = {found.get(key)}, not {wanted[key]}. Resume with the same settings."
            )
        device = next(self.net.parameters()).device
        self.history, self.best, self.seconds = about["history"], state["best"], state["seconds"]
        self.net.load_state_dict(state["net"])
        self.best_net = {k: v.to(device) for k, v in state["best_net"].items()}
        self.optimiser.load_state_dict(state["optimiser"])
