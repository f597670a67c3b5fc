"""Activations of a frozen network, computed once and read many times.

Pictures differ in size. Their columns (a vector of C dimensions for each position) lie one after the other in one
matrix, with a row of zeros in front, and a padded batch (B, C, H, W) is one gather from it, in channels-last order.

    columns   (1 + all positions, C)    row 0 is zeros; picture i has rows starts[i] .. starts[i] + h*w
    batch     zeros where a picture ends, and the rows and columns (B, 2) that it has: what `Pooler` takes

The matrix is in memory, the GPU's where there is room, or on disk (float16 or bfloat16); one on disk can be resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cooc.activations import Activations
from cooc.descriptor import load_backbone
from cooc.errors import CoocError, InputError
from cooc.pictures.batches import Bad, Item
from cooc.recipes import DescriptorConfig
from cooc.stream import stream, upload

FORMAT = "cooc-activations/1"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
TOGETHER = 64  # maps at most that wait for others of their shape: what a run that is stopped may lose
Place = tuple[int, int, int]  # first row, height, width


@dataclass(frozen=True, eq=False)
class ActivationCache:
    """Activations of N pictures, read as padded batches on `device`."""

    columns: Tensor  # (1 + P, C)
    places: Tensor  # (N, 3) int64: first row, height, width
    device: torch.device

    def __len__(self) -> int:
        return len(self.places)

    @property
    def channels(self) -> int:
        return self.columns.shape[1]

    @property
    def bytes(self) -> int:
        return self.columns.numel() * self.columns.element_size()

    @property
    def largest(self) -> tuple[int, int]:
        """Height and width that every picture fits into."""
        high, wide = self.places[:, 1:].amax(0).tolist()
        return high, wide

    def subset(self, rows: Sequence[int] | Tensor) -> ActivationCache:
        """Those pictures, in that order; nothing is copied."""
        chosen = torch.as_tensor(rows, dtype=torch.int64, device=self.places.device)
        return ActivationCache(self.columns, self.places[chosen], self.device)

    def to(self, device: torch.device | str) -> ActivationCache:
        """Batches go to `device`, and so do all columns if they take less than half of the free memory there."""
        device = torch.device(device)
        columns, places = self.columns, self.places
        if device.type != "cuda" or self.bytes < torch.cuda.mem_get_info(device)[0] // 2:
            columns, places = columns.to(device), places.to(device)
        return ActivationCache(columns, places, device)

    def batch(self, pictures: Sequence[int] | Tensor, shape: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        """Those pictures, padded to the largest of them or to `shape`: A (B, C, H, W) float32, and sizes (B, 2)."""
        where = self.columns.device
        places = self.places[torch.as_tensor(pictures, dtype=torch.int64, device=where)]
        first, height, width = (column[:, None, None] for column in places.T)  # (B, 1, 1)
        H, W = shape or places[:, 1:].amax(0).tolist()
        y, x = torch.arange(H, device=where)[:, None], torch.arange(W, device=where)
        rows = torch.where((y < height) & (x < width), first + y * width + x, 0)  # (B, H, W)
        A = self.columns[rows].to(self.device).float()  # (B, H, W, C)
        return A.permute(0, 3, 1, 2), places[:, 1:].to(self.device)

    def groups(self, pictures: Sequence[int] | Tensor, positions: int) -> Iterator[Tensor]:
        """Places in `pictures`, cut into groups of like shape: wide and high ones apart, few positions padded.

        A group, padded, has at most that many positions, or is a single picture.
        """
        chosen = torch.as_tensor(pictures, dtype=torch.int64, device=self.places.device)
        sizes = self.places[chosen, 1:].tolist()
        order = sorted(range(len(sizes)), key=lambda i: (sizes[i][0] > sizes[i][1], sizes[i][0] * sizes[i][1], i))
        group: list[int] = []
        high = wide = 0
        for i in order:
            h, w = sizes[i]
            taller, wider = max(high, h), max(wide, w)
            turned = bool(group) and (h > w) != (sizes[group[0]][0] > sizes[group[0]][1])
            if group and (turned or taller * wider * (len(group) + 1) > positions):
                yield torch.tensor(group)
                group, taller, wider = [], h, w
            group.append(i)
            high, wide = taller, wider
        if group:
            yield torch.tensor(group)


# Filling it


class Columns:
    """Collects the columns of batches (B, C, H, W) in memory, where the batches are."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.parts: list[Tensor] = []
        self.places: dict[str, Place] = {}
        self.rows = 1

    def add(self, keys: Sequence[str], A: Tensor) -> None:
        h, w = A.shape[2:]
        if not self.parts:
            self.parts.append(torch.zeros(1, A.shape[1], dtype=self.dtype, device=A.device))
        self.parts.append(_columns(A, self.dtype))
        for key in keys:
            self.places[key] = (self.rows, h, w)
            self.rows += h * w

    def cache(self, keys: Iterable[str]) -> ActivationCache:
        where = self.parts[0].device
        try:
            self.parts = [torch.cat(self.parts)]
        except torch.OutOfMemoryError:  # a GPU that has room for all of them has none for all of them twice
            self.parts = [joined_on_cpu(self.parts)]
            torch.cuda.empty_cache()
        whole = self.parts[0]
        places = torch.tensor([self.places[key] for key in keys], device=whole.device)
        return ActivationCache(whole, places, where).to(where)  # if there is room


def joined_on_cpu(parts: list[Tensor]) -> Tensor:
    """torch.cat in the CPU's memory. `parts` is emptied as it goes, so that nothing is held twice."""
    whole = torch.empty(sum(map(len, parts)), *parts[0].shape[1:], dtype=parts[0].dtype)
    end = len(whole)
    while parts:
        part = parts.pop()
        whole[end - len(part) : end] = part
        end -= len(part)
    return whole


class ColumnsOnDisk(Columns):
    """The same in a folder: `activations.bin` and `index.jsonl`, whose lines are written after the columns they name.

    A run that was stopped leaves whole batches behind, and the next one goes on after them.
    """

    def __init__(self, folder: Path, about: dict[str, Any], channels: int, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.channels, self.file, self.index = channels, folder / "activations.bin", folder / "index.jsonl"
        name = str(dtype).removeprefix("torch.")
        header = {"format": FORMAT, "dtype": name, "channels": channels} | about
        folder.mkdir(parents=True, exist_ok=True)
        if self.index.is_file():
            self._resume(header)
        else:
            self.file.write_bytes(bytes(channels * dtype.itemsize))
            self.index.write_text(json.dumps(header) + "\n")

    def _resume(self, header: dict[str, Any]) -> None:
        content = self.index.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        try:
            found, *lines = map(json.loads, whole.splitlines())
        except ValueError as error:
            raise InputError(f"{self.index} is damaged ({error}). Delete the folder; it is filled again.") from error
        if found != header:
            changed = next(key for key in header | found if header.get(key) != found.get(key))
            raise InputError(
                f"{self.index.parent} keeps activations with {changed} = {found.get(changed)!r}, not "
                f"{header.get(changed)!r}. Give another folder, or delete this one."
            )
        for line in lines:
            self.places |= {key: (place[0], place[1], place[2]) for key, place in line.items()}
            self.rows = max([self.rows, *(first + h * w for first, h, w in line.values())])
        with self.index.open("r+b") as index, self.file.open("r+b") as file:
            index.truncate(len(whole))
            file.truncate(self.rows * self.channels * self.dtype.itemsize)

    def add(self, keys: Sequence[str], A: Tensor) -> None:
        h, w = A.shape[2:]
        places = {key: (self.rows + i * h * w, h, w) for i, key in enumerate(keys)}
        with self.file.open("ab") as file:
            file.write(_columns(A, self.dtype).cpu().view(torch.uint8).numpy().tobytes())
        with self.index.open("a") as index:
            index.write(json.dumps(places) + "\n")
        self.places |= places
        self.rows += len(keys) * h * w

    def cache(self, keys: Iterable[str]) -> ActivationCache:
        size = self.rows * self.channels
        columns = torch.from_file(str(self.file), shared=False, size=size, dtype=self.dtype)  # mapped, not read
        places = torch.tensor([self.places[key] for key in keys])
        return ActivationCache(columns.view(self.rows, self.channels), places, torch.device("cpu"))


def half(dtype: torch.dtype) -> torch.dtype:
    """What activations are kept in: bfloat16 if that is what the network gives, else float16, which is more exact."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16


def _columns(A: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, C, H, W) -> (B*H*W, C)"""
    columns = A.permute(0, 2, 3, 1).flatten(0, 2).to(dtype).contiguous()
    if not bool(columns.isfinite().all()):
        raise InputError(f"Activations too large for {dtype}, or not finite; keep them as float32 (--keep float32).")
    return columns


def build_cache(
    items: Sequence[Item],
    config: DescriptorConfig,
    *,
    device: torch.device,
    folder: Path | None = None,
    keep: str = "auto",
    workers: int | None = None,
    backbone: Activations | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[ActivationCache, list[int], list[Bad]]:
    """Activations of pictures at the config's image size, at its first scale; which of the items they are of, in order;
    and those that could not be read. Without a folder they are kept in memory, on the device if there is room."""
    if keep not in (*DTYPES, "auto"):
        raise InputError(f"Activations are kept as auto, {', '.join(DTYPES)}, not {keep!r}.")
    backbone = backbone or load_backbone(config, device)
    dtype = half(next(backbone.network.parameters()).dtype) if keep == "auto" else DTYPES[keep]
    keys = [_key(item) for item in items]
    sink = Columns(dtype)
    if folder is not None:
        about = {"backbone": config.backbone, "layer": config.layer, "size": config.size}
        about |= {"least": config.least} if config.least else {}
        sink = ColumnsOnDisk(folder, about, backbone.channels, dtype)
    wanted = [
        Item(key, item.picture, item.box) for key, item in zip(keys, items, strict=True) if key not in sink.places
    ]
    wanted = list({item.key: item for item in wanted}.values())
    bad: dict[str, Bad] = {}
    done = len(items) - len(wanted)

    def begin(images: Tensor) -> Callable[[], list[Tensor]]:
        with torch.no_grad():
            A = backbone(upload(images, device))
        return lambda: list(A)

    waiting: list[tuple[str, Tensor]] = []
    for item, found in stream(
        wanted, begin, device=device, size=config.size, min_side=backbone.stride, least=config.least, workers=workers
    ):
        if isinstance(found, CoocError):
            bad[item.key] = Bad(item, found)
        else:
            if waiting and (waiting[0][1].shape != found.shape or len(waiting) == TOGETHER):
                _flush(sink, waiting)
            waiting.append((item.key, found))
        done += 1
        progress(done, len(items))
    _flush(sink, waiting)
    good = [i for i, key in enumerate(keys) if key not in bad]
    if not good:
        raise InputError("None of the pictures could be read." + "".join(f"\n{b.reason}" for b in [*bad.values()][:3]))
    return sink.cache(keys[i] for i in good).to(device), good, list(bad.values())


def _flush(sink: Columns, waiting: list[tuple[str, Tensor]]) -> None:
    """Maps of one shape, together."""
    if waiting:
        sink.add([key for key, _ in waiting], torch.stack([A for _, A in waiting]))
        waiting.clear()


def _key(item: Item) -> str:
    path = Path(str(item.picture))
    size = path.stat().st_size if path.is_file() else 0
    return f"{path} {size} {item.box or ''}".strip()
