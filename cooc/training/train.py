"""The loop: mine hard negatives with the network as it is, take steps, validate, keep the best epoch.

    cache, kept, bad = build_cache(photos.items, config.descriptor, device=device)
    photos = verify(photos.subset(kept), cache, config.descriptor)     # where there are only labels
    run = train(cache, photos, config, folder=Path("run"))             # again with other settings: same cache
    finish(run, cache, photos, Path("run"))                            # an artefact, run.json

The backbone is frozen, so an epoch is a pass over activations that lie ready. All chance comes from (seed, epoch): a
run that was stopped and resumed ends with the same bits as one that was not (on a CPU; a GPU adds in any order).
Under torchrun each process takes its part of every batch and the gradients are summed, which gives the gradient of
the whole batch, since a loss is a sum over tuples.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cooc import reranking
from cooc.activations import resolve_dtype
from cooc.datasets.photos import Ints, Photos
from cooc.errors import InputError, UnknownNameError
from cooc.evaluation import Floats, Query, evaluate
from cooc.recipes import DescriptorConfig
from cooc.training.block import BLOCKS, build_block
from cooc.training.cache import ActivationCache
from cooc.training.checkpoint import Average, Checkpoint, Epoch
from cooc.training.losses import LOSSES
from cooc.training.network import CoOcNet, describe
from cooc.training.processes import rank, world
from cooc.training.tuples import mine, tuples
from cooc.whitening import Whitening, fit_pca

RATES = {"learned": 8e-3, "factored": 1e-2}  # measured: docs/training.md
BLOCK_RATE = 3e-4  # of a block's kernels
EXPONENT_RATE = 1000  # times the filter's: an exponent is one number near 3,
EXPONENT_STEP = 0.05  # and takes no longer step than this: the rates above would throw it about
WHITENING_SAMPLE, WHITENING_DIM = 2000, 512  # of the whitening that validation uses
EXPONENTS = 0.5, 0.4, 0.3  # of a whitening: which suits depends on the pooling, and what is held out chooses


@dataclass(frozen=True)
class TrainConfig:
    """All that a run depends on, beside the photos. As it stands it is what did best on photos held out
    (docs/training.md); the paper has a full filter and the contrastive loss on 1 positive and 5 negatives."""

    descriptor: DescriptorConfig
    form: str = "factored"
    rank: int = 32  # of the factored form
    block_rank: int = 32  # of the change of a block's kernels
    block_lr: float = BLOCK_RATE
    train: tuple[str, ...] = ("filter",)
    layer: int = 0  # dimensions of a whitening layer in front of the loss, fitted before the first step; 0 is none
    loss: str = "smooth-ap"
    options: Mapping[str, float] = field(default_factory=dict)  # of the loss: margin, temperature
    lr: float | None = None  # None: RATES
    beta1: float = 0.85
    average: float = 0.0  # what is kept is the mean over steps, each of which leaves so much of the mean before it
    epochs: int = 8
    patience: int = 3  # epochs without a better validation mAP before it stops
    batch: int = 24  # tuples in a step
    at_once: int = 24  # tuples in memory; fewer give the same gradients
    queries: int = 2000  # tuples in an epoch
    positives: int = 2
    negatives: int = 10
    pool: int = 20000  # photos that negatives are mined from
    dtype: str = "auto"  # of the convolution with a full filter
    seed: int = 0

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise UnknownNameError("loss", self.loss, LOSSES)
        counts = ("epochs", "patience", "batch", "at_once", "queries", "positives", "negatives", "pool", "rank")
        for name in (*counts, "block_rank"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.lr is not None and not self.lr > 0:
            raise InputError(f"The learning rate must be positive, not {self.lr}.")
        if not 0 <= self.average < 1:
            raise InputError(f"The mean over steps keeps at least 0 and less than 1 of itself, not {self.average}.")
        if len([part for part in self.train if part in BLOCKS]) > 1:
            raise InputError("block4 is trained with what follows it: name the first block alone.")

    @property
    def block(self) -> str:
        """The block from which on the network is trained; "" where it is frozen."""
        return next((part for part in self.train if part in BLOCKS), "")

    @property
    def rate(self) -> float:
        return self.lr if self.lr is not None else RATES[self.form]

    def as_dict(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return values | {"descriptor": self.descriptor.as_dict(), "train": list(self.train), "lr": self.rate}


@dataclass(frozen=True)
class Run:
    """A finished training: the network as it was after its best epoch (0 is before the first)."""

    config: TrainConfig
    net: CoOcNet
    history: list[Epoch]
    best: int
    seconds: float
    peak_bytes: int  # of GPU memory, or of the process on a CPU


class Writer(Protocol):
    def add_scalar(self, tag: str, value: float, step: int) -> None: ...
    def close(self) -> None: ...


def train(
    cache: ActivationCache,
    photos: Photos,
    config: TrainConfig,
    *,
    folder: Path | None = None,
    whitening: Whitening | None = None,
    resume: bool = False,
    tensorboard: bool = False,
    report: Callable[[Epoch], None] = lambda epoch: None,
) -> Run:
    """Train on photos (row i of the cache is photo i). With a folder, it keeps a checkpoint and a log there.

    whitening: that of the recipe, where the photos are too few to fit one: the loss and the validation see what it
    gives, so that epoch 0 is the recipe as it is. (Adapted to these photos, it would leave no loss to learn from.)
    report is called after every epoch with its line of the log.
    """
    if len(cache) != len(photos):
        raise InputError(f"{len(photos)} photos, but activations of {len(cache)}: keep the rows of both together.")
    if len(photos.queries()) < 1:
        raise InputError("No photo to train on has a match. Hold out fewer labels, or verify less strictly.")
    started = time.monotonic()
    device = cache.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    net = _build(cache, photos, config, whitening).to(device)
    rates = {"exponent": min(config.rate * EXPONENT_RATE, EXPONENT_STEP), "block": config.block_lr}
    groups: dict[float, list[Tensor]] = {}
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(rates.get(name.partition(".")[0], config.rate), []).append(parameter)
    optimiser = torch.optim.Adam([{"params": p, "lr": lr} for lr, p in groups.items()], betas=(config.beta1, 0.999))
    kept = Checkpoint(config, folder, net, optimiser)
    if resume:
        kept.load()
    else:
        kept.add({"epoch": 0, **validate(net, cache, photos, config)}, 0)
        report(kept.history[-1])
    writer = _writer(folder) if tensorboard and folder is not None and rank() == 0 else None
    earlier = kept.seconds
    while kept.epoch < config.epochs and kept.epoch - kept.best < config.patience:
        epoch = kept.epoch + 1
        begun = time.monotonic()
        loss = _epoch(net, optimiser, kept.average, cache, photos, config, epoch)
        with kept.average.used():
            found = {"epoch": epoch, "loss": loss, **validate(net, cache, photos, config)}
        found["seconds"] = round(time.monotonic() - begun, 3)
        kept.add(found, earlier + time.monotonic() - started)
        report(found)
        for name, value in found.items():
            if writer is not None and name != "epoch":
                writer.add_scalar(name, value, epoch)
    if writer is not None:
        writer.close()
    net.load_state_dict(kept.best_net)
    seconds = earlier + time.monotonic() - started
    return Run(config, net, kept.history, kept.best, round(seconds, 3), _peak(device))


def _build(cache: ActivationCache, photos: Photos, config: TrainConfig, whitening: Whitening | None) -> CoOcNet:
    block = None
    if config.block:
        block = build_block(config.descriptor, config.block, cache.device, rank=config.block_rank, seed=config.seed)
    if config.layer:
        direct = CoOcNet(config.descriptor, cache.channels, train=(), block=block).to(cache.device)
        with torch.no_grad():
            whitening = fit_pca(_describe(direct, cache, np.flatnonzero(~photos.held_out)), config.layer)
    return CoOcNet(
        config.descriptor,
        cache.channels,
        form=config.form,
        rank=config.rank,
        train=config.train,
        whitening=whitening,
        dtype=resolve_dtype(config.dtype, cache.device),
        seed=config.seed,
        block=block,
    )


def as_it_is(recipe: DescriptorConfig, cache: ActivationCache, block: str = "") -> CoOcNet:
    """The recipe, before anything is learned, for activations that end before that block."""
    end = build_block(recipe, block, cache.device) if block else None
    return CoOcNet(recipe, cache.channels, train=(), block=end).to(cache.device)


def _epoch(
    net: CoOcNet,
    optimiser: torch.optim.Optimizer,
    average: Average,
    cache: ActivationCache,
    photos: Photos,
    config: TrainConfig,
    epoch: int,
) -> float:
    """One pass over freshly mined tuples; the mean loss."""
    rng = np.random.default_rng([config.seed, epoch])
    rows = mined(net, cache, photos, config, rng)
    total = 0.0
    for start in range(0, len(rows), config.batch):
        optimiser.zero_grad(set_to_none=True)
        batch = rows[start : start + config.batch]
        total += gradients(net, cache, batch, config) * len(batch)
        optimiser.step()
        average.update()
    return total / len(rows)


def mined(net: CoOcNet, cache: ActivationCache, photos: Photos, config: TrainConfig, rng: np.random.Generator) -> Ints:
    """An epoch's tuples in random order, with the negatives that the network finds hardest now. (T, 1 + P + N)"""
    candidates = photos.queries()
    queries = rng.permutation(candidates)[: config.queries]
    pool = rng.permutation(np.flatnonzero(~photos.held_out))[: config.pool]
    rows, places = np.unique(np.concatenate([queries, pool]), return_inverse=True)
    with torch.no_grad():
        vectors = _describe(net, cache, rows)
    clusters = torch.from_numpy(photos.clusters).to(vectors.device)
    at = torch.from_numpy(places).to(vectors.device)
    found = mine(
        vectors[at[: len(queries)]],
        clusters[torch.from_numpy(queries).to(clusters.device)],
        vectors[at[len(queries) :]],
        clusters[torch.from_numpy(pool).to(clusters.device)],
        config.negatives,
    )
    return tuples(photos, queries, pool[found.cpu().numpy()], config.positives, rng)


def gradients(net: CoOcNet, cache: ActivationCache, rows: Ints, config: TrainConfig) -> float:
    """Add the gradient of the mean loss of these tuples to the network's, summed over all processes; that loss."""
    own = rows[rank() :: world()]
    total = torch.zeros((), device=cache.device)
    for start in range(0, len(own), config.at_once):
        part = own[start : start + config.at_once]  # (t, 1 + P + N)
        once, places = np.unique(part, return_inverse=True)  # of few photos each is in many tuples
        vectors = describe(net, cache, torch.from_numpy(once))[torch.from_numpy(places).to(cache.device)]
        vectors = vectors.reshape(*part.shape, -1)  # (t, 1 + P + N, D)
        query, others = vectors[:, 0], vectors[:, 1:]
        positive, negative = others[:, : config.positives], others[:, config.positives :]
        loss = LOSSES[config.loss](query, positive, negative, **config.options).sum() / len(rows)
        torch.autograd.backward(loss)
        total += loss.detach()
    if world() > 1:
        dist.all_reduce(total)
        for parameter in (p for p in net.parameters() if p.requires_grad):
            whole = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad  # fewer tuples than us
            dist.all_reduce(whole := whole.contiguous())
            parameter.grad = whole
    return float(total)


@torch.no_grad()
def validate(net: CoOcNet, cache: ActivationCache, photos: Photos, config: TrainConfig) -> Epoch:
    """mAP on the held-out part: of the vectors as they are, and whitened as a search would (PCA of training photos, of
    the best exponent).

    "mAP" is the one that chooses the best epoch: whitened, or raw where there are too few photos to fit a whitening. A
    whitening layer that is trained, or the recipe's own, is not fitted again.
    """
    queries, database, truth = photos.validation()
    if not len(queries):
        return {}
    own = net.layer is not None and not config.layer
    raw_vectors = "whitening" not in config.train and not own
    rows = np.union1d(database, queries)
    held = _describe(net, cache, rows, raw=raw_vectors)
    places = np.searchsorted(rows, queries), np.searchsorted(rows, database)
    raw = mean_ap(average_precisions(held, *places, truth))
    chosen = np.random.default_rng(config.seed).permutation(np.flatnonzero(~photos.held_out))[:WHITENING_SAMPLE]
    dim = min(WHITENING_DIM, len(chosen) // 4, held.shape[1])
    if not raw_vectors or dim < 32:
        return {"mAP": raw}
    whitening = fit_pca(_describe(net, cache, chosen, raw=True), dim)
    found = (average_precisions(whitening.with_exponent(e)(held), *places, truth) for e in EXPONENTS)
    return {"mAP": max(map(mean_ap, found)), "mAP raw": raw}


def average_precisions(vectors: Tensor, queries: Ints, database: Ints, truth: Sequence[Query]) -> Floats:
    """Of each query among the database, both of which are rows."""
    array = vectors.float().cpu().numpy()
    rankings, _ = reranking.rank(array[queries], array[database])
    return evaluate(rankings, truth, "holidays").ap


def mean_ap(ap: Floats) -> float:
    return round(100 * float(np.nanmean(ap)), 4)


def _describe(net: CoOcNet, cache: ActivationCache, rows: Ints, raw: bool = False) -> Tensor:
    """Vectors of those photos, each process describing its share."""
    if world() == 1:
        return describe(net, cache, torch.from_numpy(rows), raw=raw)
    share = torch.arange(rank(), len(rows), world())
    vectors = describe(net, cache, torch.from_numpy(rows)[share], raw=raw)
    whole = vectors.new_zeros(len(rows), vectors.shape[1])
    whole[share.to(whole.device)] = vectors
    dist.all_reduce(whole)  # x + 0: the same bits everywhere
    return whole


def _writer(folder: Path) -> Writer:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError(
            "TensorBoard is not installed: pip install tensorboard, or leave --tensorboard out."
        ) from error
    writer: Writer = SummaryWriter(str(folder / "tensorboard"))  # lines of log.jsonl as curves
    return writer


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows does not tell
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
