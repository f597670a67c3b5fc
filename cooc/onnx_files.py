"""A network of ours as one ONNX file, for programs without PyTorch. Needs onnxscript: pip install onnxscript."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Mapping

import torch
from torch import nn
from torch.export import Dim

from cooc.errors import InputError, first_line
from cooc.files import write_whole

OTHERS = ((161, 193), (330, 130), (129, 410))  # sizes that a network for any size is tried with


def write_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    size: tuple[int, int] | None = None,
    about: Mapping[str, str] | None = None,
) -> None:
    """`images` uint8 (B, 3, H, W) -> `vectors` (B, D), for any batch and size from 128 pixels on, or for H, W alone.

    `about` is kept in the file's metadata.
    """
    if importlib.util.find_spec("onnxscript") is None:
        raise InputError("Writing ONNX needs onnxscript: pip install onnxscript.")
    images = torch.zeros(2, 3, *(size or (256, 320)), dtype=torch.uint8)
    free = {0: Dim.DYNAMIC} if size else {0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):  # of libraries, about themselves
            program = torch.export.export(model.eval(), (images,), dynamic_shapes=(free,))
            for other in [size] if size else OTHERS:  # what holds for some sizes only fails here; ONNX would not notice
                program.module()(images.new_zeros(1, 3, *other))
            written = torch.onnx.export(
                program, dynamo=True, verbose=False, input_names=["images"], output_names=["vectors"]
            )
    except (RuntimeError, ValueError, AssertionError) as error:  # torch._dynamo's UserError is a RuntimeError
        more = "" if size else " It may be for one size of picture: size=(height, width)."
        raise InputError(f"This descriptor cannot be written as ONNX ({first_line(error)}).{more}") from error
    assert written is not None
    written.model.metadata_props.update(about or {})
    write_whole(path, written.model_proto.SerializeToString())
