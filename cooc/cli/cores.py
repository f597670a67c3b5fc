"""Who gets the cores while an index is filled on a CPU: the network, or what decodes and makes local features."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

LIGHT = ("resnet50", "resnet50-caffe", "efficientnet-lite0")  # networks that take no longer than SIFT does


@contextmanager
def sharing_cores(backbone: str, features: str, device: str, workers: int | None) -> Iterator[int | None]:
    """How many processes decode, if nobody has said it: for a command that fills an index.

    On a CPU they make the local features, too, which takes as long as a light network does. So it gets half of the
    cores: threads of it that wait for a core that another has use up their own meanwhile (docs/performance.md).
    """
    import torch

    from cooc.activations import resolve_device
    from cooc.pictures.batches import cores_of_this_process

    if workers is not None or not features or backbone not in LIGHT or resolve_device(device).type != "cpu":
        yield workers
        return
    cores, before = cores_of_this_process(), torch.get_num_threads()
    torch.set_num_threads(threads := max(1, cores // 2))
    try:
        yield cores - threads + 1
    finally:
        torch.set_num_threads(before)
