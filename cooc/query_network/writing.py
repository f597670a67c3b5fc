"""A Descriptor that has been loaded -> files by which the next process describes a query without torch."""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from dataclasses import asdict
from pathlib import Path

import cv2
import numpy as np

from cooc.descriptor import Descriptor
from cooc.errors import CoocError, InputError
from cooc.files import write_whole
from cooc.query_network.graph import WEIGHTS, graph_of
from cooc.query_network.running import ABOUT, NETWORK, WHITENING, QueryNetwork, Settings, checksum, maker

AGREES = 0.999  # the least cosine of what both make of a picture: torch may compute in bfloat16

_log = logging.getLogger("cooc")


def keep(descriptor: Descriptor, folder: Path, space: str | None) -> bool:
    """Is it kept there? Written if need be, and only where OpenCV then gives the vector that torch gives.

    What cannot be expressed, or not be written, is no error: torch describes the next query, too.
    """
    if QueryNetwork.find(folder, descriptor.config.size) is not None:
        return True
    new = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    try:
        settings = _settings(descriptor, space)
        new.mkdir(parents=True)
        graph = graph_of(descriptor.backbone.network)
        write_whole(new / NETWORK, graph.onnx)
        write_whole(new / WEIGHTS, graph.weights)
        if descriptor.whitening is not None:
            rows = [descriptor.whitening.mean[None], descriptor.whitening.projection]
            np.save(new / WHITENING, np.concatenate([row.detach().float().numpy() for row in rows]))
        files = {file.name: checksum(file) for file in new.iterdir()}
        about = {"maker": maker(), "files": files, "settings": asdict(settings)}
        write_whole(new / ABOUT, json.dumps(about, indent=1) + "\n")
        _try(descriptor, QueryNetwork(new, settings, descriptor.config.size))
        shutil.rmtree(folder, ignore_errors=True)
        new.replace(folder)
        return True
    except (CoocError, OSError, ValueError, cv2.error) as error:
        _log.debug("Queries are described by torch: %s", error)
        return False
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _settings(descriptor: Descriptor, space: str | None) -> Settings:
    config, backbone = descriptor.config, descriptor.backbone
    if (config.pooling, config.mask, config.scales) != ("gem", "none", (1.0,)):
        raise InputError("Only GeM of one scale, without a mask, is kept for queries.")
    options = {"p": 3.0, "eps": 1e-6} | dict(config.options)
    mean, std = (x.flatten().tolist() for x in (backbone.mean, backbone.std))
    return Settings(backbone.stride, config.least, mean, std, options["p"], options["eps"], space)


def _try(descriptor: Descriptor, network: QueryNetwork) -> None:
    """Two pictures of noise: of two shapes, and of odd sides."""
    for height, width in ((97, 161), (224, 130)):
        noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
        (one,), (other,) = network.describe([noise], [None]), descriptor.describe(noise).numpy()
        if not one @ other >= AGREES:
            raise InputError(f"OpenCV gives other vectors than torch: their cosine is {one @ other:.5f}.")
