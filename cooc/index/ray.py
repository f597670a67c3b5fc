"""Describe on many machines: what `cooc.index.sync` does between the walk and the commit, by actors of a Ray cluster.

    driver   walk, what changed? -> chunks of files             -> known elsewhere? ->                   commit
    worker                          read, hash, read the header                        decode, describe

The driver, which is the one writer of the index, keeps a few chunks under way at each worker and takes further files
only as chunks come back, so memory is bounded everywhere. Workers hold nothing that counts: a chunk whose worker or
machine is lost is given to another one, its vectors are committed once, and whatever stops the driver the next run
goes on from the last commit, as on one machine. A file that takes its worker along each time is found out and
reported; what a worker's machine failed on is given to others, before it counts as failed. All machines must see the
pictures under the same address, and have cooc and the network's weights.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from cooc.errors import CoocError, InputError, MachineError, StoreMismatchError
from cooc.index.engine import Decide, Described, Describer, Extraction, Made, describe_items
from cooc.index.examine import READERS, Candidate, Examined, examine
from cooc.pictures import Collection
from cooc.pictures.faults import is_machine

UNDER_WAY = 3  # chunks at each worker: one is described, one is read, one waits
CHUNK_SECONDS = 2.0  # of work in a chunk: little is lost with one, and calls cost nothing beside it
SMALLEST, LARGEST = 4, 256  # files of a chunk
SUSPECT, GUILTY = 2, 4  # losses of its worker after which a file is tried alone, and after which it is given up
TRIES = 3  # of a file by workers whose machines fail on it
FAILURES = 20  # starts that may fail, such as when a machine goes
HELD = 256 << 20  # bytes of pictures that a worker keeps after it has examined them
START_SECONDS = 300  # for the first worker to be there
LOST = "Each worker that was given it ended without an answer; it may be too large for their memory. Try it alone."

log = logging.getLogger("cooc")


Build = Callable[[str, int], Describer]  # device, threads -> descriptor; runs on the workers


@dataclass
class _Chunk:
    files: list[Candidate]
    seen: list[Examined] | None = None  # those that must be described; None: not yet known
    losses: int = 0
    tries: int = 1

    def parts(self) -> list[_Chunk]:
        if self.seen is not None:
            return [_Chunk([], [one], self.losses) for one in self.seen]
        return [_Chunk([one], None, self.losses) for one in self.files]


@dataclass
class _Worker:
    actor: Any
    chunks: int = 0
    alone: bool = False
    lost: bool = False


class OnRay:
    """An engine of `cooc.index.sync`. `weights_hash`: the fingerprint that each worker's descriptor must have."""

    def __init__(
        self,
        build: Build,
        weights_hash: str = "",
        *,
        address: str = "",
        workers: int | None = None,
        device: str = "auto",
        extraction: Extraction | None = None,
    ) -> None:
        self.build, self.weights_hash, self.extraction = build, weights_hash, extraction
        self.address, self.workers, self.device = address, workers, device

    def describe(self, collection: Collection, files: Iterable[Candidate], decide: Decide) -> Iterator[Described]:
        remaining = iter(files)
        first = list(itertools.islice(remaining, 1))
        if not first:  # nothing has changed: no cluster is needed
            return
        ray, connected = _connect(self.address)
        run = _Run(ray, self, collection, decide, itertools.chain(first, remaining))
        try:
            yield from run.results()
        except ray.exceptions.RayError as error:
            raise CoocError(f"The Ray cluster is gone ({error}). Run it again: it goes on where it was.") from error
        finally:
            run.close()
            if connected:
                ray.shutdown()


def _connect(address: str) -> tuple[Any, bool]:
    """Ray, and whether it was connected here: to a cluster that is named, or to one started on this machine alone."""
    try:
        import ray
    except ImportError as error:
        raise InputError("--engine ray needs Ray: pip install 'cooc[ray]'") from error
    if ray.is_initialized():
        return ray, False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anyone
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    where = address or os.environ.get("RAY_ADDRESS", "")
    try:
        options = {"address": where} if where else {"include_dashboard": False}
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(f"There is no Ray cluster at {where!r} ({error}). Start one: ray start --head") from error
    return ray, True


@dataclass
class _Run:
    """One run: the workers, and the chunks at each of them."""

    ray: Any
    engine: OnRay
    collection: Collection
    decide: Decide
    files: Iterator[Candidate]
    size: int = SMALLEST
    failures: int = 0
    again: deque[_Chunk] = field(default_factory=deque)  # whose worker was lost, or failed
    starting: dict[Any, _Worker] = field(default_factory=dict)
    ready: list[_Worker] = field(default_factory=list)
    running: dict[Any, tuple[_Worker, _Chunk]] = field(default_factory=dict)

    def results(self) -> Iterator[Described]:
        for _ in range(self._plan()):
            self._start()
        began = time.monotonic()
        while True:
            self._give()
            if self.ready and not self.running and not self.again:  # nor is there a file left to give
                return
            refs = [*self.running, *self.starting]
            done, _ = self.ray.wait(refs, num_returns=1, timeout=1.0) if refs else ([], [])
            for ref in done:
                if ref in self.starting:
                    self._started(ref)
                else:
                    yield from self._finished(ref)
            if not self.ready and time.monotonic() - began > START_SECONDS:
                raise CoocError(f"No worker could be started in {START_SECONDS} s: the cluster has no free core.")
            if self.ready:
                began = time.monotonic()

    def close(self) -> None:
        with suppress(Exception):  # a cluster that is gone has no workers to end
            for worker in [*self.starting.values(), *self.ready]:
                self.ray.kill(worker.actor)

    # workers

    def _plan(self) -> int:
        """How many, and what each has: a GPU with its share of the machine's cores, or, where there is none, a core."""
        machines = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        with_gpu = [machine for machine in machines if machine.get("GPU", 0) >= 1]
        if self.engine.device == "cuda" and not with_gpu:
            raise InputError("The cluster has no GPU: use --device cpu, or let a machine with one join.")
        if with_gpu and self.engine.device != "cpu":
            cores = min(machine.get("CPU", 1) / machine["GPU"] for machine in with_gpu)
            self.options = {"num_cpus": max(1, int(cores)), "num_gpus": 1}
            return self.engine.workers or int(sum(machine["GPU"] for machine in with_gpu))
        self.options = {"num_cpus": 1, "num_gpus": 0}
        return self.engine.workers or max(1, int(sum(machine.get("CPU", 0) for machine in machines)))

    def _start(self) -> None:
        """Wherever there is room; while there is none, it waits, and comes to a machine that joins."""
        remote = self.ray.remote(Worker).options(
            **self.options, max_concurrency=UNDER_WAY + 1, scheduling_strategy="SPREAD"
        )
        shares = self.options["num_cpus"], self.options["num_gpus"]
        actor = remote.remote(self.engine.build, self.collection, *shares, self.engine.extraction)
        self.starting[actor.fingerprint.remote()] = _Worker(actor)

    def _started(self, ref: Any) -> None:
        worker = self.starting.pop(ref)
        try:
            found = self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:
            raise CoocError(f"A worker cannot describe: {error.cause}") from error
        except self.ray.exceptions.RayError as error:
            if "__init__" in str(error):
                raise CoocError(f"A worker cannot start: {str(error).strip().splitlines()[-1]}") from error
            self.failures += 1
            if self.failures > FAILURES:
                raise CoocError(f"Workers end as soon as they start: {error}") from error
            self._start()
            return
        if self.engine.weights_hash and found != self.engine.weights_hash:
            raise StoreMismatchError(
                f"A worker has other weights ({found[:12]}) than the index ({self.engine.weights_hash[:12]}). "
                "Bring the same to all machines: cooc weights verify, cooc weights export, cooc weights import."
            )
        self.ready.append(worker)

    def _lose(self, worker: _Worker, chunk: _Chunk) -> None:
        if not worker.lost:
            worker.lost = True
            self.ready.remove(worker)
            self.ray.kill(worker.actor)
            log.warning("A worker was lost; its pictures go to another one.")
            self._start()
        chunk.losses += 1
        self.again.extend(chunk.parts() if chunk.losses >= SUSPECT else [chunk])

    # chunks

    def _give(self) -> None:
        """Evenly: to the worker that has least. A suspect has a worker for itself."""
        while self.ready:
            worker = min(self.ready, key=lambda one: one.chunks + UNDER_WAY * one.alone)
            if worker.alone or worker.chunks >= UNDER_WAY:
                return
            chunk = self.again.popleft() if self.again else _Chunk(list(itertools.islice(self.files, self.size)))
            if not chunk.files and not chunk.seen:
                return
            if chunk.losses >= GUILTY:
                self._give_up(chunk)
                continue
            if chunk.losses >= SUSPECT:
                if worker.chunks:
                    self.again.appendleft(chunk)
                    return
                worker.alone = True
            worker.chunks += 1
            self._send(worker, chunk)

    def _give_up(self, chunk: _Chunk) -> None:
        for one in chunk.seen or [Examined(one.file, one.known, one.damaged) for one in chunk.files]:
            self.decide(replace(one, error=MachineError(LOST)))

    def _send(self, worker: _Worker, chunk: _Chunk) -> None:
        call = worker.actor.examine if chunk.seen is None else worker.actor.describe
        self.running[call.remote(chunk.files if chunk.seen is None else chunk.seen)] = worker, chunk

    def _finished(self, ref: Any) -> Iterator[Described]:
        worker, chunk = self.running.pop(ref)
        try:
            result = self.ray.get(ref)
        except self.ray.exceptions.RayTaskError as error:
            if is_machine(error.cause):
                self._lose(worker, chunk)
                return
            raise CoocError(f"A worker failed: {error.cause}") from error
        except self.ray.exceptions.RayError:
            self._lose(worker, chunk)
            return
        if chunk.seen is None:
            failed = {one.file.name for one in result if isinstance(one.error, MachineError)}
            if failed and chunk.tries < TRIES:
                files = [one for one in chunk.files if one.file.name in failed]
                self.again.append(_Chunk(files, None, chunk.losses, chunk.tries + 1))
                result = [one for one in result if one.file.name not in failed]
            chunk.seen = [one for one in result if self.decide(one)]
            if chunk.seen:
                self._send(worker, chunk)
                return
        else:
            made, seconds = result
            self.size = min(max(round(len(made) / max(seconds, 1e-9) * CHUNK_SECONDS), SMALLEST), LARGEST)
            found = list(zip(chunk.seen, made, strict=True))
            failing = [one for one, result in found if isinstance(result, MachineError)]
            if failing and chunk.tries < TRIES:
                self.again.append(_Chunk([], failing, chunk.losses, chunk.tries + 1))
                found = [(one, result) for one, result in found if not isinstance(result, MachineError)]
            yield from found
        worker.chunks -= 1
        worker.alone = False


class Worker:
    """Reads several chunks at once, for that is waiting, and describes one after another."""

    def __init__(
        self, build: Build, collection: Collection, cpus: int, gpus: int, extraction: Extraction | None = None
    ) -> None:
        self.extraction = extraction
        self.decoders = cpus - 1 if gpus else 0  # processes; a worker with one core decodes in threads beside itself
        self.descriptor, self.collection = build("cuda" if gpus else "cpu", cpus), collection
        self.one_at_a_time, self.keeping = threading.Lock(), threading.Lock()
        self.readers = ThreadPoolExecutor(READERS)
        self.kept: OrderedDict[str, Any] = OrderedDict()  # pictures that need not be read again, the oldest first
        self.held = 0

    def fingerprint(self) -> str:
        return self.descriptor.fingerprint

    def examine(self, files: list[Candidate]) -> list[Examined]:
        seen = list(self.readers.map(partial(examine, self.collection), files))
        with self.keeping:
            for one in seen:
                if getattr(one.picture, "content", None) is not None:
                    self.kept[one.file.name] = one.picture
                    self.held += one.file.size
            while self.held > HELD:
                self.held -= self.kept.popitem(last=False)[1].size
        return [replace(one, picture=None) for one in seen]

    def describe(self, seen: list[Examined]) -> tuple[list[Made | CoocError], float]:
        """In the order of `seen`; and the seconds that it took."""
        with self.one_at_a_time:
            started = time.perf_counter()
            items = [replace(one, picture=self._picture(one)) for one in seen]
            results = describe_items(self.descriptor, items, self.decoders, self.extraction)
            found = {one.file.name: result for one, result in results}
            return [found[one.file.name] for one in seen], time.perf_counter() - started

    def _picture(self, one: Examined) -> Any:
        with self.keeping:
            picture = self.kept.pop(one.file.name, None)
            if picture is None:
                return self.collection.picture(one.file)
            self.held -= picture.size
            return picture
