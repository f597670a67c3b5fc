"""image -> activations -> co-occurrences -> pooled vector -> whitening: the stages of the paper, joined in one Module.

    describe = Descriptor.from_pretrained("paper-linear-topdown")
    vectors = describe(images)                  # (B, 3, H, W) bytes, or floats in 0..1 -> (B, 512), unit length
    vectors = describe(["a.jpg", "b.jpg"])      # (2, 512) on the CPU; files are decoded, scaled and batched

Tensors go through `forward`: differentiable, on whatever device the module was moved to. Files go through `stream`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from cooc.activations import Activations, build_backbone, resolve_device, resolve_dtype
from cooc.artefacts import write_artefact
from cooc.cooccurrence import Cooccurrence
from cooc.errors import CoocError, ImageError, InputError, MachineError
from cooc.onnx_files import write_onnx
from cooc.pictures.batches import Item
from cooc.pictures.decode import Picture, is_picture, load_image
from cooc.pooler import Pooler
from cooc.pooling import l2_normalise, power_mean
from cooc.recipes import DescriptorConfig, find_recipe, find_tuning, find_whitening, no_network
from cooc.stream import download, stream, upload
from cooc.tuning import read_tuning
from cooc.weights import content_hash, load_weights
from cooc.whitening import Whitening

if TYPE_CHECKING:
    from cooc.pictures.boxes import Box
    from cooc.pictures.shared_memory import Beside

    Vector = np.ndarray[Any, np.dtype[np.float32]]
    Image = Picture | Tensor

NOT_FINITE = "The network gave NaN or infinity. Check its weights and the dtype, or use --device cpu."
FEATURELESS = "The network finds nothing in it (a picture of one colour?). Remove it, or use another recipe."


class Descriptor(nn.Module):
    """Images -> unit vectors. Alone, in a batch or in another run, an image gives the same vector (to 1e-5)."""

    def __init__(
        self,
        config: DescriptorConfig,
        *,
        device: str | torch.device = "auto",
        backbone: Activations | None = None,
        whitening: Whitening | None = None,
        check: bool = True,
    ) -> None:
        """`check=False`: the caller compares the fingerprint, and the network's weights need not be hashed before."""
        super().__init__()
        place = resolve_device(device)
        self.backbone = backbone or load_backbone(config, place, check=check)
        dtype = str(next(self.backbone.parameters()).dtype).removeprefix("torch.")
        self.config = config.replace(dtype=dtype)  # what was chosen is recorded
        self.pooler = Pooler(config, self.backbone.channels)
        found = whitening or (find_whitening(config) if config.whitening else None)
        self.whitening = found.truncate(config.dim or found.dim) if found is not None else None
        self.to(place)
        self._spare: list[Descriptor] = []  # the same on the CPU, once a GPU has failed

    @classmethod
    def from_pretrained(
        cls, name_or_folder: str | Path, *, device: str | torch.device = "auto", **changes: Any
    ) -> Descriptor:
        """A named recipe (`cooc recipes` lists them), or a folder that `cooc train` or `save_pretrained` wrote.

        Changes are settings of the recipe: from_pretrained("paper-bilinear", size=640).
        """
        return cls(find_recipe(str(name_or_folder)).config.replace(**changes), device=device)

    from_recipe = from_pretrained

    def save_pretrained(self, folder: str | Path) -> None:
        """Settings, filter and whitening as one artefact; the network is named in it, with the hash of its weights."""
        layer = self.pooler.cooccurrence
        learned = layer if isinstance(layer, Cooccurrence) and layer.form != "direct" else None
        write_artefact(folder, self.config, learned, self.whitening, about={"fingerprint": self.fingerprint})

    def export_onnx(self, path: str | Path, *, size: tuple[int, int] | None = None) -> None:
        """The whole chain as one ONNX file: `images` uint8 (B, 3, H, W) -> `vectors` (B, D), float32, unit length.

        Pictures may have any size; the recipe wants them at most `config.size` long, which is left to the caller.
        R-MAC, whose regions follow from the size, and several scales are written for one: (H, W).
        """
        files = {name: Path(getattr(self.config, name)).name for name in ("filter", "tuning", "whitening")}
        about = {"cooc": json.dumps(self.config.as_dict() | files), "fingerprint": self.fingerprint}
        write_onnx(self._copy_on_cpu(), path, size=size, about=about)

    @property
    def device(self) -> torch.device:
        return self.backbone.mean.device

    @property
    def dim(self) -> int:
        """Dimensions of a vector."""
        return self.whitening.dim if self.whitening is not None else self.raw_dim

    @property
    def raw_dim(self) -> int:
        """Dimensions of a vector before whitening."""
        with torch.no_grad():
            return int(self.pooler(torch.zeros(1, self.backbone.channels, 1, 1, device=self.device)).shape[1])

    @property
    def fingerprint(self) -> str:
        """Of the values behind the config: network weights, filter and whitening. Vectors of one may be compared.

        Weights count in bfloat16, so that a machine that computes in it may read what another wrote in float32."""
        parts = {f"backbone.{k}": v.bfloat16().float().cpu() for k, v in self.backbone.network.state_dict().items()}
        parts |= {f"filter.{k}": v.cpu() for k, v in self.pooler.state_dict().items() if "cooccurrence" in k}
        if self.whitening is not None:
            parts |= {"mean": self.whitening.mean.cpu(), "projection": self.whitening.projection.detach().cpu()}
        return content_hash(parts)[:32]

    # tensors

    def __call__(self, images: Any, boxes: Sequence[Box | None] | None = None) -> Tensor:
        """A batch (B, 3, H, W) as a Module does; else pictures, or one, as `describe` does."""
        if isinstance(images, Tensor) and images.dim() == 4 and boxes is None:
            return torch.as_tensor(super().__call__(images))
        return self.describe(images, boxes)

    def forward(self, images: Tensor) -> Tensor:
        """Bytes, or floats in 0..1, (B, 3, H, W) -> whitened unit vectors (B, D), float32."""
        vectors = self.raw(images)
        return vectors if self.whitening is None else torch.as_tensor(self.whitening(vectors))

    def raw(self, images: Tensor) -> Tensor:
        """Unit vectors before whitening: of each scale, then their mean, L2. (B, 3, H, W) -> (B, D')"""
        stride = self.backbone.stride
        return self.combine([self.pooler(self.backbone(rescale(images, s, stride))) for s in self.config.scales])

    def combine(self, vectors: Sequence[Tensor]) -> Tensor:
        """Unit vectors of the scales -> one: their mean (GeM: its own power mean), L2."""
        if len(vectors) == 1:
            return vectors[0]
        return l2_normalise(power_mean(torch.stack(list(vectors)), self.config.scale_power))

    # pictures

    def load(self, image: Image, box: Box | None = None) -> Tensor:
        """Decode, crop and scale as the recipe says. (3, H, W) uint8"""
        if not isinstance(image, Tensor):
            config, stride = self.config, self.backbone.stride
            pixels = load_image(image, size=config.size, box=box, min_side=stride, least=config.least)
            return torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)
        if box is not None:
            raise InputError("A tensor is described as it is: crop it before, or give the picture's file.")
        return image

    def describe(self, pictures: Image | Iterable[Image], boxes: Sequence[Box | None] | None = None) -> Tensor:
        """Vectors (N, D), float32 on the CPU, of files, arrays or tensors (3, H, W). Only the vectors are held.

        One that cannot be read is an error; one in which the network finds nothing has a vector of zeros.
        """
        single = is_picture(pictures) or (isinstance(pictures, Tensor) and pictures.dim() == 3)
        images: Iterable[Any] = [pictures] if single else pictures  # type: ignore[assignment]
        if boxes is not None:
            images = list(images)
            if len(boxes) != len(images):
                raise InputError(
                    f"{len(images)} images, but {len(boxes)} boxes; give one box, or None, for each image."
                )
        found: dict[int, Vector] = {}

        def items() -> Iterator[Item]:
            for i, image in enumerate(images):
                box = boxes[i] if boxes is not None else None
                if isinstance(image, Tensor):
                    found[i] = self.begin(self.load(image, box)[None])()[0]
                else:
                    yield Item(i, image, box)

        for item, vector in self._stream(items(), workers=0):
            if isinstance(vector, CoocError):
                raise vector
            found[item.key] = vector
        rows = [found[i] for i in range(len(found))]
        vectors = torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, self.dim)
        if not bool(vectors.isfinite().all()):
            raise MachineError(NOT_FINITE)
        return vectors

    def stream(
        self, items: Iterable[Item], *, workers: int | None = None, beside: Beside | None = None
    ) -> Iterator[tuple[Item, Vector | CoocError]]:
        """Each item with its unit vector, or why it has none, in whatever order batches fill up: see `cooc.stream`."""
        for item, found in self._stream(items, workers, beside):
            good = isinstance(found, CoocError) or abs(np.linalg.norm(found) - 1) <= 1e-3
            yield item, found if good else _why_none(found)  # type: ignore[arg-type]

    def _stream(
        self, items: Iterable[Item], workers: int | None, beside: Beside | None = None
    ) -> Iterator[tuple[Item, Vector | CoocError]]:
        return stream(
            items,
            self.begin,
            device=self.device,
            size=self.config.size,
            min_side=self.backbone.stride,
            least=self.config.least,
            workers=workers,
            fallback=None if self.device.type == "cpu" else self._on_cpu,
            beside=beside,
        )

    @torch.no_grad()
    def begin(self, images: Tensor) -> Callable[[], Vector]:
        """One batch, as a call that waits for its vectors: a GPU works on, and may be given more, until then."""
        return download(self(upload(images, self.device)).float())

    def _on_cpu(self, images: Tensor) -> Callable[[], Vector]:
        self._spare = self._spare or [self._copy_on_cpu()]
        return self._spare[0].begin(images)

    def _copy_on_cpu(self) -> Descriptor:
        """In float32. Tensors go to the CPU at once: the device may have no room for a second copy."""
        known: dict[int, Any] = {id(x): x.cpu() for x in self.buffers()}
        known |= {id(x): nn.Parameter(x.detach().cpu(), requires_grad=False) for x in self.parameters()}
        return copy.deepcopy(self, known).to("cpu", torch.float32)


def _why_none(vector: Vector) -> CoocError:
    return ImageError(FEATURELESS) if np.isfinite(vector).all() else MachineError(NOT_FINITE)


def load_backbone(config: DescriptorConfig, device: torch.device, *, check: bool = True) -> Activations:
    """The config's network with its weights, on the device; several descriptors may share it."""
    if config.given:
        raise no_network(config)
    weights, dtype = load_weights(config.weights, check=check), resolve_dtype(config.dtype, device)
    tuning = read_tuning(find_tuning(config)) if config.tuning else None
    return build_backbone(
        config.backbone, config.layer or None, weights=weights, device=device, dtype=dtype, tuning=tuning
    )


def rescale(images: Tensor, scale: float, smallest: int) -> Tensor:
    """A batch at a smaller scale, no side below `smallest`. (B, 3, H, W) -> (B, 3, H', W')"""
    if scale == 1:
        return images
    images = images.float() / 255 if images.dtype == torch.uint8 else images
    size = [max(round(n * scale), min(n, smallest)) for n in images.shape[2:]]
    return nn.functional.interpolate(images, size=size, mode="bilinear", antialias=True)
