"""Where a training run is: its log and its checkpoint, from which it can go on."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cooc.errors import InputError
from cooc.files import replacing, write_whole
from cooc.recipes import DescriptorConfig
from cooc.training.network import CoOcNet
from cooc.training.processes import rank

if TYPE_CHECKING:
    from cooc.training.train import TrainConfig

FORMAT = "cooc-training/1"
Epoch = dict[str, Any]  # its number, loss, mAP and seconds: a line of log.jsonl


class Average:
    """The mean of what a network was in its last steps: 1 / (1 - decay) of them, the later the more.

    Single steps of a large rate go astray in turn; what they have in common is found better. Decay 0 is no mean.
    """

    def __init__(self, net: CoOcNet, decay: float) -> None:
        self.net, self.decay = net, decay
        self.values = {name: value.detach().clone() for name, value in self._learned().items()}

    def _learned(self) -> dict[str, torch.nn.Parameter]:
        return {name: value for name, value in self.net.named_parameters() if value.requires_grad}

    @torch.no_grad()
    def update(self) -> None:
        for name, value in self._learned().items():
            self.values[name].lerp_(value, 1 - self.decay)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """The network is its mean, for as long as this lasts."""
        own = {name: value.data for name, value in self._learned().items()}
        for name, value in self._learned().items():
            value.data = self.values[name]
        try:
            yield
        finally:
            for name, value in self._learned().items():
                value.data = own[name]


class Checkpoint:
    """Where a run is: kept in memory, and in folder/checkpoint.pt and folder/log.jsonl."""

    def __init__(
        self, config: TrainConfig, folder: Path | None, net: CoOcNet, optimiser: torch.optim.Optimizer
    ) -> None:
        self.config, self.folder, self.net, self.optimiser = config, folder, net, optimiser
        self.average = Average(net, config.average)
        self.history: list[Epoch] = []
        self.best, self.seconds = 0, 0.0
        self.best_net: dict[str, Tensor] = {}

    @property
    def epoch(self) -> int:
        return len(self.history) - 1

    def add(self, epoch: Epoch, seconds: float) -> None:
        self.history.append(epoch)
        self.seconds = seconds
        if not self.best_net or "mAP" not in epoch or epoch["mAP"] > self.history[self.best]["mAP"]:
            self.best = self.epoch
            self.best_net = {k: v.detach().clone() for k, v in (self.net.state_dict() | self.average.values).items()}
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
            "average": self.average.values,
            "best_net": self.best_net,
            "optimiser": self.optimiser.state_dict(),
        }
        with replacing(folder / "checkpoint.pt") as file:
            torch.save(state, file)
        write_whole(folder / "log.jsonl", "".join(json.dumps(epoch) + "\n" for epoch in self.history))

    def load(self) -> None:
        file = (self.folder or Path()) / "checkpoint.pt"
        if self.folder is None or not file.is_file():
            raise InputError(f"{file}: there is no checkpoint to resume from. Start without --resume.")
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
            about = json.loads(state["about"])
            found, wanted = about["config"], json.loads(json.dumps(self.config.as_dict()))
            found["descriptor"] = DescriptorConfig.from_dict(found["descriptor"]).as_dict()  # it may be older
        except (pickle.UnpicklingError, RuntimeError, KeyError, ValueError, TypeError, OSError, EOFError) as error:
            raise InputError(f"{file} is no checkpoint of cooc ({error}). Start without --resume.") from error
        free = ("epochs", "patience")  # a run may be prolonged
        changed = [key for key in wanted if key not in free and found.get(key, wanted[key]) != wanted[key]]
        if changed:
            key = changed[0]
            raise InputError(
                f"{file} was trained with {key} = {found.get(key)}, not {wanted[key]}. Resume with the same settings."
            )
        device = next(self.net.parameters()).device
        self.history, self.best, self.seconds = about["history"], state["best"], state["seconds"]
        self.net.load_state_dict(_renamed(state["net"]))
        self.average = Average(self.net, self.config.average)
        self.average.values |= {name: value.to(device) for name, value in state.get("average", {}).items()}
        self.best_net = {k: v.to(device) for k, v in _renamed(state["best_net"]).items()}
        self.optimiser.load_state_dict(state["optimiser"])


def _renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Checkpoints that were written before CoOcNet had a Pooler name its parts without it."""
    places = dict.fromkeys(("delta", "left", "right"), "pooler.cooccurrence.") | dict.fromkeys(("pool",), "pooler.")
    return {places.get(name.partition(".")[0], "") + name: tensor for name, tensor in state.items()}
