"""Search your own pictures: an index, and the descriptor that its vectors were made with, as one object.

    with ImageSearch.create("photos/.cooc", root="photos") as search:
        search.index(["photos"])                                     # again and again: only changes cost time
        for match in search.search("query.jpg", box=(40, 60, 300, 400)).matches:
            print(match.path, match.score)

The command line and the web page are this object and nothing else. Searching may go on in many threads and processes
while one process, which has opened the index with write=True, changes it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cooc.errors import ImageError, InputError, MachineError
from cooc.image_search.changing import ChangingIndex
from cooc.image_search.opening import DEFAULT_FEATURES, DEFAULT_QUALITY, QUALITIES, Quality, Status
from cooc.index.away import which_are_away
from cooc.index.records import Filter, Record, id_bytes
from cooc.index.report import Report
from cooc.index.shortlist import (
    NEAR_DUPLICATE,
    Match,
    Options,
    Results,
    Ways,
    as_query,
    find_duplicates,
    find_matches,
    unit,
)
from cooc.index.store import Vectors
from cooc.pictures.boxes import Box, check_box
from cooc.pictures.decode import Decoded, image_info, is_picture, load_view
from cooc.query_network.running import surely_cpu
from cooc.text import find as find_by_text
from cooc.verification.agreement import Agreement
from cooc.verification.engines import LONGEST, QUERY, extract
from cooc.verification.features import unpack
from cooc.verification.verifier import gpu_of
from cooc.verification.verifier import verify as verify_features
from cooc.verified_duplicates import find_copies
from cooc.verified_search import Features, Query, find_verified

if TYPE_CHECKING:
    from cooc.descriptor import Image

__all__ = [
    "DEFAULT_FEATURES",
    "DEFAULT_QUALITY",
    "QUALITIES",
    "ImageSearch",
    "Match",
    "Quality",
    "Report",
    "Results",
    "Status",
]

_log = logging.getLogger("cooc")


class ImageSearch(ChangingIndex):
    """See the module."""

    def search(
        self,
        image: Image | Sequence[Image],
        box: Box | Sequence[Box | None] | None = None,
        k: int = 20,
        *,
        expand: str | None = None,
        rerank: str | None = None,
        augment: bool = False,
        where: Filter | None = None,
        min_score: float | None = None,
        offset: int = 0,
        without: str | None = None,
        verify: bool | None = None,
        thorough: bool = False,
    ) -> Results:
        """The k pictures that show the same as a picture, as the part of it in a box, or as several pictures joined.

        `verify` checks the best results by geometry: what agrees with the query leads, the rest is merely similar. By
        default it is done where the index keeps local features. `thorough` verifies three times as many, in full, and
        then what agrees with the best of those: it finds more views of the same thing, in several times the time.

        `expand` (average, alpha) searches again with the query and its best results joined; `augment` compares with
        each result's own neighbours too; `rerank` (k-reciprocal, diffusion, superglobal) re-ranks the best results.
        `offset` leaves out as many of the first results, `without` the picture of that id.
        """
        started = time.monotonic()
        options = Options(k, expand, rerank, augment, where, min_score, offset, thorough)
        images, boxes = _together(image, box)
        query, asked = self._asked(images, boxes, self._verifies(verify, options))
        return self._found(query, options, asked, without, started)

    def search_id(
        self, id: str, k: int = 20, *, box: Box | None = None, verify: bool | None = None, **ways: Unpack[Ways]
    ) -> Results:
        """The same for a picture of the index, by its vector, or for the part of it in a box; it is not among them."""
        started = time.monotonic()
        options = Options(k, **ways)
        id_bytes(id)  # or results could hold it under another spelling
        asked: list[Features] = []
        if box is None:
            query: Vectors | Query = self.vectors([id])[0]
            if self._verifies(verify, options):
                asked = [unpack(code) for code in self.store.features([id]) if code is not None]
        else:
            query, asked = self._asked([self.file(id)], [check_box(box)], self._verifies(verify, options))
        return self._found(query, options, asked, id, started)

    def search_vector(self, vector: ArrayLike, k: int = 20, **ways: Unpack[Ways]) -> Results:
        """The same for a vector (D,) of this descriptor; a vector alone cannot be verified."""
        if ways.get("thorough"):
            raise InputError("A thorough search verifies, and a vector has no local features: give the picture.")
        return self._found(as_query(vector, self.meta.dim), Options(k, **ways), [], None, time.monotonic())

    def search_text(
        self, text: str, k: int = 20, *, where: Filter | None = None, min_score: float | None = None, offset: int = 0
    ) -> Results:
        """The pictures that words describe best, where the index has a space for them: see `cooc.text`."""
        options = Options(k, where=where, min_score=min_score, offset=offset)
        return self._with_away(find_by_text(self.index_path, self.store, text, options, device=self._device))

    def _found(
        self, query: Vectors | Query, options: Options, asked: Sequence[Features], without: str | None, started: float
    ) -> Results:
        """Verified by the local features of what was asked for, if there are any."""
        if any(len(part) for features in asked for part in features):
            found = find_verified(
                self.store,
                query,
                asked,
                options,
                words=self.words,
                without=without,
                device=self._accelerator,
                started=started,
            )
        else:
            vector = query() if callable(query) else query
            curve = None if asked else self.calibration
            found = find_matches(self.store, vector, options, curve=curve, without=without, started=started)
            if asked:  # pictures without any texture: nothing can be verified, and so nothing is claimed
                found = replace(found, no_match=True, checked=True)
        return self._with_away(found)

    def agreement(
        self, id: str, *, image: Image | None = None, box: Box | None = None, query_id: str | None = None
    ) -> Agreement | None:
        """In what a picture of the index agrees with an image, or with another picture of the index.

        None where there are no local features to tell; inliers 0 where nothing agrees.
        """
        (code,) = self.store.features([id]) if self.meta.features else [None]
        asked: list[Features] = []
        if code is not None and query_id is not None and box is None:
            asked = [unpack(own) for own in self.store.features([query_id]) if own is not None]
        elif code is not None:
            part = None if box is None else check_box(box)
            asked = self._local([image if query_id is None else self.file(query_id)], [part])
        if not asked or code is None:
            return None
        return verify_features(asked[0], [unpack(code)])[0]

    def _verifies(self, wanted: bool | None, options: Options | None = None) -> bool:
        thorough = options is not None and options.thorough
        if thorough and wanted is False:
            raise InputError("A thorough search verifies: leave out verify=False (--no-verify), or thorough.")
        if (wanted or thorough) and not self.meta.features:
            raise InputError(
                f"The index {self.index_name} keeps no local features to verify by. Add them: cooc index --verify sift"
            )
        return bool(self.meta.features) if wanted is None else wanted

    def _asked(
        self, images: list[Any], boxes: list[Box | None], verifies: bool
    ) -> tuple[Vectors | Query, list[Features]]:
        """The vector of a query, or what waits for it, and the local features of its pictures, made side by side."""
        if verifies and all(isinstance(image, (str, bytes, os.PathLike, np.ndarray, Decoded)) for image in images):
            pool = ThreadPoolExecutor(1, "network")
            vector = pool.submit(self._describe, images, boxes)
            pool.shutdown(wait=False)  # its thread ends with its work
            return vector.result, self._local(images, boxes)
        query = self._describe(images, boxes)  # a stream has one reader at a time
        return query, self._local(images, boxes) if verifies else []

    def _local(self, images: list[Any], boxes: list[Box | None]) -> list[Features]:
        """The local features of a query's pictures. Tensors have none: nobody knows how they were scaled."""
        found = list[Features]()
        for image, box in zip(images, boxes, strict=True):
            if is_picture(image):
                pixels, size, part = load_view(image, LONGEST, box)
                features = self.meta.features
                found.append(
                    extract(features, pixels, size=size, box=part, limit=QUERY, enlarge=True, device=self._device)
                )
        return found

    def _with_away(self, results: Results) -> Results:
        """It is said of each match whether its file is away."""
        away = which_are_away(self.store, self.collection, [match.record.entry for match in results.matches])
        if not away:
            return results
        return replace(results, matches=[replace(match, away=match.path in away) for match in results.matches])

    def _describe(self, images: list[Any], boxes: list[Box | None]) -> NDArray[np.float32]:
        """One query: the sum of what each picture gives, as a unit vector (D,)."""
        if all(map(is_picture, images)) and (network := self.query_network) is not None:
            try:
                return unit(network.describe(images, boxes).sum(axis=0))
            except MachineError as error:
                _log.debug("This query is described by torch: %s", error)
        if self.config.given:
            return unit(self.vectors([self._known(*query) for query in zip(images, boxes, strict=True)]).sum(axis=0))
        return unit(self.descriptor.describe(images, boxes).numpy().sum(axis=0))

    def _known(self, image: Any, box: Box | None) -> str:
        """The id of a picture of the index, by its content: no other has a vector, if none can be made here."""
        found: list[Record] = []
        if box is None and isinstance(image, (bytes, str, os.PathLike)):
            image_info(image)  # or what is wrong with it is said
            data = image if isinstance(image, bytes) else Path(image).read_bytes()
            found = self.store.by_sha256(hashlib.sha256(data).hexdigest())
        if not found:
            from cooc.recipes import no_network

            raise no_network(self.config)
        return found[0].id

    def duplicates(
        self,
        threshold: float | None = None,
        *,
        where: Filter | None = None,
        verify: bool | None = None,
        progress: Callable[[int], None] = lambda count: None,
    ) -> Iterator[list[Record]]:
        """Groups of copies: re-saved, smaller, cropped, turned or mirrored.

        Where the index keeps local features, geometry decides, and `threshold` is only the least similarity of two
        (by default a low one). Without, or with `verify=False`, pictures are joined by a similarity of at least
        `threshold`, 0.8 by default: then smaller copies and crops are missed, and very similar views are joined.

        Geometry takes long: `progress(count)` is told how many pictures were compared.
        """
        if not self._verifies(verify):
            return find_duplicates(self.store, NEAR_DUPLICATE if threshold is None else threshold, where)
        return find_copies(
            self.store,
            threshold,
            where,
            words=self.words,
            mirrored=self._mirrored,
            device=self._accelerator(),
            progress=progress,
        )

    def _accelerator(self) -> str | None:
        if surely_cpu(self._device):
            return None
        from cooc.activations import resolve_device

        return gpu_of(resolve_device(self._device))

    def _mirrored(self, id: str) -> Features:
        """Local features of a picture's mirror image; none if its file cannot be read now."""
        try:
            pixels, size, _ = load_view(self.file(id), LONGEST)
        except (ImageError, InputError):
            return ()
        flipped = np.ascontiguousarray(pixels[:, ::-1])
        return extract(self.meta.features, flipped, size=size, device=self._device)


def _together(image: Any, box: Any) -> tuple[list[Any], list[Box | None]]:
    """One picture with its box, or several with a box or None for each."""
    images = list(image) if isinstance(image, (list, tuple)) else [image]
    if not images:
        raise InputError("There is no picture to search for: give at least one.")
    if box is None:
        return images, [None] * len(images)
    lists = (list, tuple, np.ndarray)
    boxes = list(box) if isinstance(box, lists) and any(n is None or isinstance(n, lists) for n in box) else [box]
    if len(boxes) != len(images):
        raise InputError(f"{len(images)} pictures came with {len(boxes)} boxes: give a box, or None, for each of them.")
    return images, [one if one is None else check_box(one) for one in boxes]
