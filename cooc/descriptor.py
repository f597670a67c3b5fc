"""image -> activations -> co-occurrences -> pooled vector -> whitening: the stages of the paper, joined.

`DescriptorConfig` says which of each, frozen and hashable, as an index stores it. `Descriptor` does it:

    describe = Descriptor.from_recipe("paper-linear-topdown")
    vectors = describe(["a.jpg", "b.jpg"])      # (2, 512) float32, unit length
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from cooc import kernels
from cooc.activations import BACKBONES, Activations, build_backbone, resolve_device, resolve_dtype
from cooc.cooccurrence import EPS, Cooccurrence, shih_cooccurrence
from cooc.errors import InputError, WhiteningError
from cooc.pictures.boxes import Box
from cooc.pictures.decode import Picture, load_image
from cooc.pooling import POOLINGS, l2_normalise, mask
from cooc.recipes import DescriptorConfig, find_filter, find_recipe, shipped
from cooc.weights.cache import load_weights
from cooc.weights.table import content_hash
from cooc.whitening import Whitening, whiten
from cooc.whitening import load as load_whitening

__all__ = ["Descriptor", "Pooler", "load_backbone"]

LINEAR = {"chco-sct": (True, True), "sct": (True, False), "chco": (False, True)}  # alpha counts, beta counts
BATCH_PIXELS = {"cpu": 1 << 20, "cuda": 24 << 20}  # images of one shape that go through the network together
BATCHES_AHEAD = {"cpu": 0, "cuda": 2}  # of them that wait at a device, which has no rest then
NOT_FINITE = "A picture gave a vector with NaN or infinity; check the network's weights and the dtype."

if TYPE_CHECKING:
    Image = Picture | Tensor


class Pooler(nn.Module):
    """A (B, C, H, W) -> (B, D) unit vectors: mask, co-occurrence, pooling, L2. Works in float32 whatever A is."""

    def __init__(self, config: DescriptorConfig, channels: int) -> None:
        super().__init__()
        self.config = config
        pooling = POOLINGS[config.pooling]
        self.pool: Callable[[Tensor, Tensor | None], Tensor] = pooling.build(channels, **dict(config.options))
        kind = config.cooccurrence if pooling.cooccurrence else "none"
        self.cooccurrence: nn.Module | None = None
        if kind == "learned":
            self.cooccurrence = Cooccurrence.load(find_filter(config.filter)).requires_grad_(False)
        elif kind == "direct":
            self.cooccurrence = Cooccurrence(radius=config.radius)
        elif kind == "shih":
            self.cooccurrence = Shih(config.radius)

    def forward(self, A: Tensor) -> Tensor:
        A = A.float()
        options = {"sigma": self.config.sigma} if self.config.mask == "centre" else {}
        A = mask(A, self.config.mask, **options)
        fused = self._without_tensor(A)
        if fused is not None:
            return l2_normalise(fused)
        C = None if self.cooccurrence is None else self.cooccurrence(A)
        return l2_normalise(self.pool(A, C))

    def _without_tensor(self, A: Tensor) -> Tensor | None:
        """Linear pooling of the direct tensor by a GPU kernel that never makes C_T, where there is one; else None."""
        options = dict(self.config.options)
        if self.config.pooling not in LINEAR or self.config.cooccurrence != "direct":
            return None
        if options.get("a", 2) != 2 or options.get("b", 2) != 2:
            return None
        spatial, rarity = LINEAR[self.config.pooling]
        return kernels.linear_pooling(
            A,
            self.config.radius,
            EPS,
            max(A.shape[1] - 1, 1),
            rarity_eps=options.get("eps", 1e-5),
            spatial=spatial,
            rarity=rarity,
        )


class Shih(nn.Module):
    """Shih et al.'s co-occurrence tensor in the place of C_T (the paper's table 5)."""

    def __init__(self, radius: int) -> None:
        super().__init__()
        self.radius = radius

    def forward(self, A: Tensor) -> Tensor:
        return shih_cooccurrence(A, self.radius)


class Descriptor:
    """Pictures -> unit vectors. Alone, in a batch or in another run, a picture gives the same vector (to 1e-5)."""

    def __init__(
        self,
        config: DescriptorConfig,
        *,
        device: str = "auto",
        backbone: Activations | None = None,
        whitening: Whitening | None = None,
    ) -> None:
        self.device = resolve_device(device)
        self.backbone = backbone or load_backbone(config, self.device)
        dtype = str(next(self.backbone.parameters()).dtype).removeprefix("torch.")
        self.config = config.replace(dtype=dtype)  # what was chosen is recorded
        self.pooler = Pooler(config, self.backbone.channels).to(self.device)
        self.whitening = whitening or (find_whitening(config) if config.whitening else None)
        if self.whitening is not None:
            self.whitening = self.whitening.truncate(config.dim or self.whitening.dim).to(self.device)

    @classmethod
    def from_recipe(cls, recipe: str, *, device: str = "auto", **changes: Any) -> Descriptor:
        """By name, with changes: from_recipe("paper-bilinear", scales=MULTI_SCALE). `cooc recipes` lists the names."""
        return cls(find_recipe(recipe).config.replace(**changes), device=device)

    @property
    def dim(self) -> int:
        """Values in a vector."""
        if self.whitening is not None:
            return self.whitening.dim
        return self.raw_dim

    @property
    def raw_dim(self) -> int:
        """Values in a vector before whitening."""
        with torch.inference_mode():
            return int(self.pooler(torch.zeros(1, self.backbone.channels, 1, 1, device=self.device)).shape[1])

    @property
    def fingerprint(self) -> str:
        """Of the numbers behind the config: network weights, filter and whitening. Vectors of one may be compared.

        Weights count in bfloat16, so that a machine that computes in it may read what another wrote in float32."""
        parts = {f"backbone.{k}": v.bfloat16().float().cpu() for k, v in self.backbone.network.state_dict().items()}
        parts |= {f"filter.{k}": v.cpu() for k, v in self.pooler.state_dict().items() if "cooccurrence" in k}
        if self.whitening is not None:
            parts |= {"mean": self.whitening.mean.cpu(), "projection": self.whitening.projection.cpu()}
        return content_hash(parts)[:32]

    def load(self, image: Image, box: Box | None = None) -> Tensor:
        """Decode, crop and scale as the recipe says. (3, H, W) uint8"""
        if isinstance(image, Tensor):
            if box is not None:
                raise InputError("A tensor is described as it is: crop it before, or give the picture's file.")
            return image
        return to_tensor(load_image(image, size=self.config.size, box=box, min_side=self.backbone.stride))

    def __call__(self, images: Tensor | Image | Iterable[Image], boxes: Sequence[Box | None] | None = None) -> Tensor:
        """Whitened unit vectors (B, D), float32 on the CPU, of files, arrays, or tensors (uint8, or floats in 0..1)."""
        return self.whiten(self.raw(images, boxes)).cpu()

    def raw(self, images: Tensor | Image | Iterable[Image], boxes: Sequence[Box | None] | None = None) -> Tensor:
        """Unit vectors before whitening, on the descriptor's device. (B, D')"""
        tensors = [self.load(image, box) for image, box in _pairs(images, boxes)]
        vectors: list[Tensor | None] = [None] * len(tensors)
        kinds = [(*t.shape[1:], t.is_floating_point()) for t in tensors]  # bytes and floats in 0..1 do not mix
        for indices in batches(kinds, BATCH_PIXELS[self.device.type]):
            for i, vector in zip(indices, self.describe(torch.stack([tensors[i] for i in indices])), strict=True):
                vectors[i] = vector
        return torch.stack([v for v in vectors if v is not None]) if vectors else torch.zeros(0, self.raw_dim)

    @torch.inference_mode()
    def describe(self, images: Tensor, *, check: bool = True) -> Tensor:
        """One batch of one shape -> unit vectors before whitening: the mean over scales, L2. (B, 3, H, W) -> (B, D')

        That they are finite is checked, which has to wait for a GPU."""
        vectors = [self.pooler(self.backbone(rescale(images, s, self.backbone.stride))) for s in self.config.scales]
        out = self.combine(vectors)
        if check and not bool(out.isfinite().all()):
            raise InputError(NOT_FINITE)
        return out

    @torch.inference_mode()
    def begin(self, images: Tensor) -> Callable[[], np.ndarray[Any, np.dtype[np.float32]]]:
        """The whole chain for one batch, as a call that waits for the vectors: a GPU works on, and may be given more,
        until then. Whether they are finite is not checked."""
        return download(self.whiten(self.describe(upload(images, self.device), check=False)).float())

    def combine(self, vectors: Sequence[Tensor]) -> Tensor:
        """Unit vectors of the scales -> one: their mean (GeM: its own power mean), L2."""
        stacked = torch.stack(list(vectors))  # (scales, B, D')
        if self.config.pooling == "gem" and len(vectors) > 1:
            p = float(dict(self.config.options).get("p", 3.0))
            return l2_normalise((stacked**p).mean(0) ** (1 / p))
        return l2_normalise(stacked.mean(0))

    @torch.inference_mode()
    def whiten(self, vectors: Tensor) -> Tensor:
        """The last stage alone: raw unit vectors -> whitened unit vectors."""
        return vectors if self.whitening is None else whiten(vectors.to(self.device), self.whitening)


def find_whitening(config: DescriptorConfig) -> Whitening:
    """The whitening that a config names, a file or one that ships with cooc; refused if it is for other vectors."""
    named = Path(config.whitening)
    path = named if named.suffix else shipped("whitening", f"{named}--{config.space}")
    if path is None:
        raise WhiteningError(
            f"No whitening {config.whitening!r} for {config.space} ships with cooc. Fit one on your own pictures, "
            "`cooc whiten FOLDER --recipe RECIPE -o FILE.safetensors`, and use RECIPE+whitening=FILE.safetensors; "
            "or use RECIPE+raw, without whitening."
        )
    whitening = load_whitening(path)
    if whitening.meta.get("space_hash") != config.space_hash:
        raise WhiteningError(
            f"{path} was fitted for other vectors ({whitening.meta.get('space', 'unknown')}), not for {config.space}. "
            "Fit one for this recipe: `cooc whiten FOLDER --recipe RECIPE -o FILE.safetensors`."
        )
    return whitening


def load_backbone(config: DescriptorConfig, device: torch.device) -> Activations:
    """The config's network with its weights, on the device; several descriptors may share it."""
    timm = config.backbone.startswith("timm:")
    weights = load_weights(config.backbone if timm else BACKBONES[config.backbone].weights)
    dtype = resolve_dtype(config.dtype, device)
    return build_backbone(config.backbone, config.layer or None, weights=weights, device=device, dtype=dtype)


def rescale(images: Tensor, scale: float, smallest: int) -> Tensor:
    """A batch at a smaller scale, no side below `smallest`. (B, 3, H, W) -> (B, 3, H', W')"""
    if scale == 1:
        return images
    images = images.float() / 255 if images.dtype == torch.uint8 else images
    size = [max(round(n * scale), min(n, smallest)) for n in images.shape[2:]]
    return nn.functional.interpolate(images, size=size, mode="bilinear", antialias=True)


def upload(images: Tensor, device: torch.device) -> Tensor:
    """Pictures on their device; from pinned memory to a GPU while it works on what it was given before."""
    if device.type != "cuda" or images.is_cuda:
        return images.to(device)
    work, copies = torch.cuda.current_stream(device), _copies(device)
    with torch.cuda.stream(copies):
        moved = images.to(device, non_blocking=True)
    work.wait_stream(copies)
    moved.record_stream(work)
    return moved


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def download(vectors: Tensor) -> Callable[[], np.ndarray[Any, np.dtype[np.float32]]]:
    """Begin to bring vectors to the CPU. What is returned waits for them, for nothing that a GPU was given later."""
    if not vectors.is_cuda:
        return vectors.numpy
    here = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
    here.copy_(vectors, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(vectors.device))

    def wait() -> np.ndarray[Any, np.dtype[np.float32]]:
        arrived.synchronize()
        return here.numpy()

    return wait


def to_tensor(image: np.ndarray[Any, np.dtype[np.uint8]]) -> Tensor:
    """(H, W, 3) array -> (3, H, W) tensor"""
    return torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)


def batches(shapes: Sequence[tuple[int, ...]], pixels: int) -> list[list[int]]:
    """Indices of equal shapes (H, W, ...) together, in batches of at most so many pixels."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, shape in enumerate(shapes):
        groups.setdefault(shape, []).append(i)
    out = []
    for shape, members in groups.items():
        most = max(1, pixels // max(1, shape[0] * shape[1]))
        out += [members[i : i + most] for i in range(0, len(members), most)]
    return out


def _pairs(images: Any, boxes: Sequence[Box | None] | None) -> list[tuple[Image, Box | None]]:
    single = isinstance(images, (str, bytes, os.PathLike, np.ndarray)) or (
        isinstance(images, Tensor) and images.dim() == 3
    )
    single = single or hasattr(images, "read") or hasattr(images, "getexif")
    items = [images] if single else list(images)
    if boxes is not None and len(boxes) != len(items):
        raise InputError(f"{len(items)} images, but {len(boxes)} boxes; give one box, or None, for each image.")
    return list(zip(items, boxes or [None] * len(items), strict=True))
