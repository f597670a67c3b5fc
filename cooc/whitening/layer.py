"""A fitted whitening as a layer, and what it computes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cooc.errors import WhiteningError


class Whitening(nn.Module):
    """A fitted whitening, as the last layer of a network: (..., D) -> (..., d), unit length. See `whiten`.

    `meta` says where it comes from: kind, samples, exponent, and what the caller adds. It is fixed unless somebody
    trains it: whitening.requires_grad_().
    """

    mean: Tensor
    eigenvalues: Tensor | None

    def __init__(
        self,
        mean: Tensor,  # (D,)
        projection: Tensor,  # (d, D), most important row first
        meta: Mapping[str, str] | None = None,
        eigenvalues: Tensor | None = None,  # (d,), decreasing, before the exponent
    ) -> None:
        super().__init__()
        shapes = tuple(mean.shape), tuple(projection.shape)
        if mean.ndim != 1 or projection.ndim != 2 or projection.shape[1] != len(mean):
            raise WhiteningError(f"A whitening needs mean (D,) and projection (d, D), not {shapes[0]} and {shapes[1]}.")
        if eigenvalues is not None and eigenvalues.shape != (len(projection),):
            raise WhiteningError(f"A whitening to {len(projection)} needs as many eigenvalues, not {len(eigenvalues)}.")
        self.meta = dict(meta or {})
        self.register_buffer("mean", mean)
        self.projection = nn.Parameter(projection, requires_grad=False)
        self.register_buffer("eigenvalues", eigenvalues)

    @property
    def dim(self) -> int:
        return self.projection.shape[0]

    @property
    def input_dim(self) -> int:
        return self.projection.shape[1]

    def forward(self, vectors: Tensor) -> Tensor:
        return whiten(vectors, self.mean, self.projection)

    def truncate(self, dim: int) -> Whitening:
        """The whitening to fewer dimensions, equal to a fit at that size."""
        if not 1 <= dim <= self.dim:
            raise WhiteningError(f"This whitening gives 1 to {self.dim} dimensions, not {dim}; fit one with more.")
        values = None if self.eigenvalues is None else self.eigenvalues[:dim]
        return Whitening(self.mean, self.projection[:dim].detach(), self.meta, values)

    def with_exponent(self, exponent: float) -> Whitening:
        """The same axes, evened out more or less: equal to a fit with that exponent."""
        if self.eigenvalues is None:
            raise WhiteningError(
                "This whitening does not keep its eigenvalues: fit one with the exponent that you want."
            )
        scale = self.eigenvalues.pow(float(self.meta["exponent"]) - exponent)
        meta = self.meta | {"exponent": repr(float(exponent))}
        return Whitening(self.mean, self.projection.detach() * scale[:, None], meta, self.eigenvalues)

    def extra_repr(self) -> str:
        return f"{self.input_dim} -> {self.dim}"


def whiten(vectors: Tensor, mean: Tensor, projection: Tensor) -> Tensor:
    """(..., D) -> (..., d), unit length, in float32 or better. A zero vector has no direction and stays zero."""
    if vectors.shape[-1] != projection.shape[1]:
        raise WhiteningError(
            f"Vectors of {vectors.shape[-1]} dimensions, but this whitening takes {projection.shape[1]}: "
            "it belongs to another recipe; use that recipe, or fit a whitening for this one."
        )
    dtype = torch.promote_types(vectors.dtype, torch.float32)
    mean, projection = (t.to(vectors.device, dtype) for t in (mean, projection))
    x = unit(vectors.to(dtype))  # (..., D)
    empty = (x == 0).all(dim=-1, keepdim=True)
    return unit((x - mean) @ projection.T).masked_fill(empty, 0)  # (..., d)


def unit(x: Tensor) -> Tensor:
    """Divides by the largest component first, so that squares neither overflow nor vanish; length is scale-free."""
    largest = x.detach().abs().amax(dim=-1, keepdim=True)
    return F.normalize(x / torch.where(largest > 0, largest, 1), dim=-1)
