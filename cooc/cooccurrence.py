"""The paper: the co-occurrence tensor of deep convolutional features.

Forcen, Pagola, Barrenechea, Bustince, "Co-occurrence of deep convolutional features for image search".

Two activations a(i,j,k) and a(u,v,w) of different channels co-occur when both exceed a threshold t and lie within r of
each other in both directions (Eq. 2). The tensor collects, at every activation, what co-occurs with it (Eq. 3):

    C_T(i,j,k) = 1/(C-1) * sum over |u-i| <= r, |v-j| <= r, w != k of rho(i,j,k) * rho(u,v,w) * a(u,v,w)

with rho = A > t and t the mean of A. It is a convolution (Eq. 5, 6, Algorithm 1) with S = 2r+1:

    C_T = rho * conv2d(A * rho, F, padding=r) / (C-1),     F[k,w] = 1 off the diagonal, eps on it

All those ones make the convolution a box sum. With a = A * rho and s = the sum of a over channels,

    C_T[k] = rho[k] * box(s - (1 - eps) * a[k]) / (C-1)

which costs O(C H W) where the convolution costs O(C^2 S^2 H W). Nobody should run the convolution for the direct form;
it remains for learned filters (section 5 of the paper), in full or as direct + low rank.

Tensors are (B, C, H, W). The threshold is the mean of *each image*, so a result never depends on the rest of the batch.

On a GPU, where no gradient is needed, the direct and the factored form are fused kernels of cooc.kernels with the same
result; what is written here is the reference, and what runs everywhere else. The equations come first, then the layer,
then what is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cooc import kernels
from cooc.errors import InputError, UnknownNameError, check_name
from cooc.filter_files import read_filter, write_filter

FORMS = ("direct", "learned", "factored")
EPS = 1e-10  # the diagonal of F in Algorithm 1

Threshold = str | float | Tensor  # "mean" of each image, a number, or one number for each image (B,)


def cooccurrence(
    A: Tensor, radius: int = 4, threshold: Threshold = "mean", eps: float = EPS, window_mean: bool = False
) -> Tensor:
    """The direct co-occurrence tensor C_T (Eq. 3) of activations A (B, C, H, W), by the closed form. Same shape as A.

    window_mean=True divides by S^2 as the authors' code does; L2 normalisation removes that factor, a learning rate
    does not.
    """
    _check_radius(radius)
    t, divisor = _levels(A, threshold), _divisor(A, radius, window_mean)
    if (fused := kernels.cooccurrence(A, radius, t, eps, divisor)) is not None:
        return fused
    rho, a = _threshold(A, t)
    others = torch.sub(a.sum(1, keepdim=True), a, alpha=1 - eps)  # (B, C, H, W): all channels but k itself
    return box_sum(others, radius).mul_(rho).div_(divisor).to(A.dtype)


def cooccurrence_learned(A: Tensor, filter: Tensor, threshold: Threshold = "mean", window_mean: bool = False) -> Tensor:
    """C_T with a filter F (C, C, S, S) of its own: rho * conv2d(A * rho, F) / (C-1) (Eq. 6, Algorithm 1)."""
    t, radius = _levels(A, threshold), _filter_radius(filter, A.shape[1])
    rho, a = _threshold(A, t, accumulate=False)
    together = F.conv2d(a, filter.to(a.dtype), padding=radius)  # (B, C, H, W)
    return rho * together / _divisor(A, radius, window_mean)


def cooccurrence_factored(
    A: Tensor, left: Tensor, right: Tensor, threshold: Threshold = "mean", eps: float = EPS, window_mean: bool = False
) -> Tensor:
    """C_T with F = direct + left @ right: left (C, R), right (R, C, S, S). C/R times cheaper than a full filter."""
    t, radius = _levels(A, threshold), _filter_radius(right, A.shape[1], left)
    divisor = _divisor(A, radius, window_mean)
    if (fused := kernels.cooccurrence_factored(A, left, right, t, eps, divisor)) is not None:
        return fused
    rho, a = _threshold(A, t, accumulate=False)
    low = F.conv2d(a, right.to(a.dtype), padding=radius)  # (B, R, H, W)
    delta = F.conv2d(low, left.to(a.dtype)[:, :, None, None])  # (B, C, H, W)
    return cooccurrence(A, radius, threshold, eps, window_mean) + rho * delta / divisor


def cooccurrence_vector(C_T: Tensor) -> Tensor:
    """C_V(k): all co-occurrences of a channel (Eq. 4). (B, C, H, W) -> (B, C)"""
    return C_T.sum((2, 3))


def direct_filter(channels: int, radius: int = 4, eps: float = EPS, dtype: torch.dtype = torch.float32) -> Tensor:
    """The filter F of the direct form (Eq. 5): ones, and eps between a channel and itself. (C, C, S, S)"""
    side = 2 * radius + 1
    filter = torch.ones(channels, channels, side, side, dtype=dtype)
    filter[range(channels), range(channels)] = eps
    return filter


def box_sum(x: Tensor, radius: int) -> Tensor:
    """Sum over the (2r+1) x (2r+1) window around each position, zeros outside. (B, C, H, W) -> same.

    A box is separable and each direction is a product with a banded 0/1 matrix: two small matrix products that sum
    non-negative numbers only (no cancellation, as running sums have), faster than pooling or cumsum on CPU and GPU.
    """
    H, W = x.shape[-2:]
    return _band(H, radius, x) @ (x @ _band(W, radius, x))


def _band(n: int, radius: int, like: Tensor) -> Tensor:
    return like.new_ones(n, n).triu(-radius).tril(radius)  # (n, n)


def _threshold(A: Tensor, t: Tensor | None, accumulate: bool = True) -> tuple[Tensor, Tensor]:
    """rho and a = A * rho, with the thresholds t (B,) or (1,), None for the mean of each image.

    Half precision becomes float32 where `accumulate` says that sums follow. rho is 0 or 1 in the dtype of a: on a CPU a
    boolean mask costs more than all the rest but the box sums.
    """
    wide = A.float() if A.dtype in (torch.float16, torch.bfloat16) else A
    level = wide.mean((1, 2, 3), keepdim=True) if t is None else t.to(wide).reshape(-1, 1, 1, 1)
    _check_finite(level if t is None else level + wide.detach().sum())  # a mean or sum is, if all terms are
    a = wide if accumulate else A
    rho = a.detach().clone().gt_(level.detach())
    return rho, a * rho


def _divisor(A: Tensor, radius: int, window_mean: bool) -> float:
    """C-1 other channels (Eq. 3); a lone channel has none, and its tensor is 0 whatever it is divided by."""
    return max(A.shape[1] - 1, 1) * ((2 * radius + 1) ** 2 if window_mean else 1)


def shih_cooccurrence(A: Tensor, radius: int = 4, form: str = "tensor") -> Tensor:
    """Shih et al.'s co-occurrence, the paper's baseline (Eq. 1 and section 6).

    form="vector": c(k,w) = max over offsets o, |o| <= r, of sum over p of a_p^k a_(p+o)^w.  (B, C, C)
    form="tensor": with o*(k,w) the best offset, C''(p,k) = sum over w of a_p^k a_(p+o*)^w.  (B, C, H, W)

    One C x HW x C product for each offset finds the maxima, one more with the 0/1 matrix [o* = o] adds up the tensor;
    the D^2 x H x W tensor that ran out of the authors' memory is never made.
    """
    _check_maps(A)
    _check_radius(radius)
    check_name("form of Shih's co-occurrence", form, ("vector", "tensor"))
    _check_finite(A)
    B, C, H, W = A.shape
    if not torch.compiler.is_compiling():  # where sizes are symbols
        radius = min(radius, max(H, W))  # whatever lies farther is as empty as the first offset outside
    flat = A.flatten(2)  # (B, C, HW)
    padded = F.pad(A, (radius,) * 4)
    side = 2 * radius + 1

    def shifted(offset: int) -> Tensor:
        dy, dx = divmod(offset, side)
        return padded[:, :, dy : dy + H, dx : dx + W].flatten(2)  # (B, C, HW): a at p + o

    best = flat @ shifted(0).mT  # (B, C, C)
    where = torch.zeros(B, C, C, dtype=torch.int32, device=A.device)
    for offset in range(1, side * side):
        correlation = flat @ shifted(offset).mT
        where = torch.where(correlation.detach() > best.detach(), offset, where)
        best = torch.maximum(best, correlation)
    if form == "vector":
        return best
    partners = torch.zeros_like(flat)
    for offset in range(side * side):
        partners = partners + (where == offset).to(A.dtype) @ shifted(offset)  # (B, C, HW)
    return (flat * partners).reshape(B, C, H, W)


class Cooccurrence(nn.Module):
    """C_T as a layer: `direct` has no parameters, `learned` a full filter, `factored` the direct filter plus low rank.

    A batch may hold maps of different shapes, padded to one: layer(A, sizes), where sizes (B, 2) are the rows and
    columns of each that count. Each is then what it would be alone, and 0 beyond them, whatever the padding held.

    Cooccurrence()                                     the direct tensor
    Cooccurrence("learned", channels=512)              trainable, starts as the direct filter
    Cooccurrence("factored", channels=512, rank=32)    trainable, starts as the direct filter
    Cooccurrence.load("filter.safetensors" | "authors.npy")
    """

    def __init__(
        self,
        form: str = "direct",
        *,
        channels: int | None = None,
        radius: int = 4,
        rank: int = 32,
        threshold: str | float = "mean",
        eps: float = EPS,
        window_mean: bool = False,
        filter: Tensor | None = None,
    ) -> None:
        super().__init__()
        check_name("form of co-occurrence", form, FORMS)
        _check_radius(radius)
        if form != "direct" and channels is None and filter is None:
            raise InputError(f"Cooccurrence({form!r}) needs channels=, the number of channels of the activations.")
        self.form, self.radius, self.threshold, self.eps, self.window_mean = form, radius, threshold, eps, window_mean
        if form == "learned":
            start = direct_filter(channels or 0, radius, eps) if filter is None else filter
            self.radius = _filter_radius(start, channels)
            self.weight = nn.Parameter(start.clone())  # (C, C, S, S)
        elif form == "factored":
            delta = None
            if filter is not None:
                radius = _filter_radius(filter, channels)
                delta = filter - direct_filter(filter.shape[0], radius, eps).to(filter)
            left, right = _low_rank(delta, channels or 0, radius, rank)
            self.radius = radius
            self.left = nn.Parameter(left)  # (C, R)
            self.right = nn.Parameter(right)  # (R, C, S, S)

    def forward(self, A: Tensor, sizes: Tensor | None = None) -> Tensor:
        if sizes is None:
            return self.tensor(A, self.threshold)
        outside, threshold = ~inside(A, sizes), cast(Threshold, self.threshold)
        A = A.masked_fill(outside, 0)
        if threshold == "mean":  # of what counts
            total = A.sum((1, 2, 3), dtype=torch.promote_types(A.dtype, torch.float32))
            threshold = total / (sizes.to(A.device).prod(1) * A.shape[1])
        return self.tensor(A, threshold).masked_fill(outside, 0)

    def tensor(self, A: Tensor, threshold: Threshold) -> Tensor:
        if self.form == "learned":
            return cooccurrence_learned(A, self.weight, threshold, self.window_mean)
        if self.form == "factored":
            return cooccurrence_factored(A, self.left, self.right, threshold, self.eps, self.window_mean)
        return cooccurrence(A, self.radius, threshold, self.eps, self.window_mean)

    def extra_repr(self) -> str:
        return f"{self.form!r}, radius={self.radius}, threshold={self.threshold!r}"

    def full_filter(self, channels: int | None = None) -> Tensor:
        """The filter (C, C, S, S) that this layer applies, whatever its form."""
        if self.form == "learned":
            return self.weight.detach()
        if self.form == "factored":
            delta = torch.einsum("kr,rwyx->kwyx", self.left, self.right).detach()
            return direct_filter(delta.shape[0], self.radius, self.eps).to(delta) + delta
        if channels is None:
            raise InputError(
                "The direct form has a filter for any number of channels: say which, full_filter(channels)."
            )
        return direct_filter(channels, self.radius, self.eps)

    def save(
        self, path: str | os.PathLike[str], *, storage: str = "float32", about: Mapping[str, Any] | None = None
    ) -> None:
        """Write the filter, and what is to be said `about` it: see `cooc.filter_files`."""
        if self.form == "direct":
            raise InputError(f"{path}: the direct form has nothing to save; it follows from the radius.")
        options = {key: getattr(self, key) for key in ("form", "threshold", "eps", "window_mean")}
        write_filter(path, dict(self.named_parameters()), options, self.full_filter, storage, about)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cooccurrence:
        """Read a filter: `.npy` (C, C, S, S) as the authors publish it, or what `save` wrote."""
        tensors, options = read_filter(path)
        try:
            first = tensors["weight" if options["form"] == "learned" else "right"]
            radius = _filter_radius(first, left=tensors.get("left"))
            layer = cls(**options, channels=first.shape[1], radius=radius, rank=len(first))
            layer.load_state_dict(tensors)
        except (KeyError, IndexError, RuntimeError, InputError) as error:
            raise InputError(f"{path}: not a filter that cooc can use ({error}). Save or export it again.") from error
        return layer


def inside(A: Tensor, sizes: Tensor) -> Tensor:
    """Which positions of padded maps A (B, C, H, W) count: the first rows and columns, sizes (B, 2). (B, 1, H, W)"""
    if sizes.shape != (A.shape[0], 2):
        raise InputError(f"sizes are rows and columns of each map, ({len(A)}, 2); got {tuple(sizes.shape)}.")
    high, wide = sizes.to(A.device)[:, :, None, None].unbind(1)  # (B, 1, 1) each
    rows, columns = (torch.arange(n, device=A.device) for n in A.shape[2:])
    return ((rows[:, None] < high) & (columns < wide))[:, None]


def _low_rank(delta: Tensor | None, channels: int, radius: int, rank: int) -> tuple[Tensor, Tensor]:
    """left (C, R), right (R, C, S, S) with left @ right nearest to delta; without delta, a start whose product is 0."""
    if rank < 1:
        raise InputError(f"rank must be at least 1; got {rank}. Without a delta, use the direct form.")
    if delta is None:
        side = 2 * radius + 1
        right = torch.randn(rank, channels, side, side) / (channels * side * side) ** 0.5
        return torch.zeros(channels, rank), right
    C, side = delta.shape[0], delta.shape[-1]
    if rank > C:
        raise InputError(f"rank {rank} is more than the filter's {C} channels; give at most {C}.")
    rows = delta.flatten(1).double()  # (C, C*S*S)
    _, vectors = torch.linalg.eigh(rows @ rows.T)  # left singular vectors of the rows, at the price of C x C
    left = vectors[:, -rank:].flip(1)  # (C, R), strongest first
    right = left.T @ rows
    return left.to(delta.dtype), right.reshape(rank, C, side, side).to(delta.dtype)


# What is refused


def _levels(A: Tensor, threshold: Threshold) -> Tensor | None:
    """Thresholds as tensors: (B,) or (1,), None for the mean of each image."""
    _check_maps(A)
    if isinstance(threshold, str):
        if threshold != "mean":
            raise UnknownNameError("threshold", threshold, ("mean", "a number", "a tensor (B,)"))
        return None
    if not isinstance(threshold, Tensor):
        return torch.full((1,), float(threshold), device=A.device, dtype=torch.promote_types(A.dtype, torch.float32))
    if threshold.numel() not in (1, A.shape[0]):
        raise InputError(f"{threshold.numel()} thresholds for {len(A)} images; give one, or one for each.")
    return threshold.reshape(-1)


def _check_maps(A: Tensor) -> None:
    if A.dim() != 4 or not A.is_floating_point() or 0 in A.shape[1:]:
        raise InputError(f"Activations must be a floating-point (B, C, H, W) tensor; got {tuple(A.shape)}, {A.dtype}.")


def _check_finite(x: Tensor) -> None:
    """Only on the CPU and in eager mode: reading a value stalls a GPU, and there Descriptor checks its vectors."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(x.isfinite().all()):
        raise InputError("Activations or threshold hold NaN or infinity; check the image and the network's weights.")


def _check_radius(radius: int) -> None:
    if isinstance(radius, bool) or not isinstance(radius, int) or radius < 0:
        raise InputError(f"radius must be a whole number of at least 0; got {radius!r}.")


def _filter_radius(filter: Tensor, channels: int | None = None, left: Tensor | None = None) -> int:
    """r of a filter (C, C, S, S), S = 2r+1; or, beside left (C, R), of the right (R, C, S, S) of a factored one."""
    good = filter.dim() == 4 and filter.shape[2] == filter.shape[3] and filter.shape[2] % 2 == 1
    if good:
        good = filter.shape[0] == filter.shape[1] if left is None else tuple(left.shape) == (*filter.shape[1::-1],)
    if not good:
        wanted = "A filter is (C, C, S, S)" if left is None else "Factors are left (C, R) and right (R, C, S, S)"
        shapes = [tuple(part.shape) for part in (left, filter) if part is not None]
        raise InputError(f"{wanted} with S odd; got {' and '.join(map(str, shapes))}.")
    if channels is not None and filter.shape[1] != channels:
        raise InputError(f"This filter is for {filter.shape[1]} channels, the activations have {channels}.")
    return int(filter.shape[2] // 2)
