"""A Milvus server as an index needs it: its address, what is committed, one writer, and what errors mean.

Milvus has no transactions over several rows. What it does change at once is the properties of a collection, and these
hold the `State` of an index: which rows count. A change first writes its rows under numbers that do not count yet, then
commits by one new state. Rows that no longer count are deleted later, when nobody can still be reading them.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit
from uuid import uuid4

import grpc
from pymilvus import MilvusClient
from pymilvus.exceptions import MilvusException

from cooc.errors import CoocError, InputError, StoreError, StoreLockedError, StoreMissingError
from cooc.index import without_password

_T = TypeVar("_T")

META, STATE, WRITER, KEPT = "cooc.meta", "cooc.state", "cooc.writer", "cooc.kept"  # properties of the collection
GAP = 1 << 32  # row numbers that are left out when a change failed: none is ever used twice
GRACE = 20.0  # seconds for which rows stay that no longer count; a question takes less, or it is asked again
RANGES = 50_000  # of rows that do not count, at most: the server keeps a state of up to a megabyte or so
BEAT, EXPIRY = 10.0, 60.0  # seconds between a writer's signs of life, and after which it is taken for dead
SETTLE = 0.2  # seconds after which nobody who saw the writer's place free can still be about to take it
LAG = 2000 << 18  # two seconds of the server's clock: a server that has just been started has to catch up first
TRIES = 3  # of a question that is overtaken by changes
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
INDEXES = ("auto", "flat", "hnsw", "ivf_pq", "diskann")

logging.getLogger("pymilvus").setLevel(logging.CRITICAL)  # it logs what it raises as well; we say it once


@dataclass(frozen=True)
class Address:
    """milvus://user:password@host:19530/database/name?options, or milvus:///folder/file.db/name for milvus-lite."""

    uri: str  # what pymilvus connects to
    name: str  # of the collection
    shown: str
    database: str = ""
    token: str = ""
    lite: bool = False
    index: str = "auto"
    timeout: float = 30.0  # seconds for which a request is tried again
    shards: int = 1
    replicas: int = 1

    @classmethod
    def parse(cls, address: str) -> Address:
        shown = without_password(address)
        try:
            parts = urlsplit(address)
            options = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
            host, port = parts.hostname, parts.port or 19530
            secure = options.pop("secure", "false") == "true"
            token = options.pop("token", "")
            if parts.username is not None:
                token = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            folder, _, name = unquote(parts.path).strip("/").rpartition("/")
            lite = not host
            known = cls(
                uri=f"/{folder}" if lite else f"{'https' if secure else 'http'}://{host}:{port}",
                name=name,
                shown=shown,
                database="" if lite else folder,
                token=token or os.environ.get("MILVUS_TOKEN", ""),
                lite=lite,
                index=options.pop("index", "auto"),
                timeout=float(options.pop("timeout", 30)),
                shards=int(options.pop("shards", 1)),
                replicas=int(options.pop("replicas", 1)),
            )
        except ValueError:  # whose text may hold the password
            raise _no_address(shown) from None
        if not NAME.fullmatch(name) or options or known.index not in INDEXES or (lite and not folder.endswith(".db")):
            raise _no_address(shown)
        return known


def _no_address(shown: str) -> InputError:
    return InputError(
        f"{shown} is no address of an index on Milvus: write milvus://host:19530/name or milvus:///folder/file.db/name "
        f"(letters, digits, _ in the name); options are index={'|'.join(INDEXES)}, timeout, shards, replicas, secure."
    )


@dataclass(frozen=True)
class State:
    """What is committed: rows below `next` count, except those in `dead`."""

    next: int = 0
    images: int = 0
    dead: tuple[tuple[int, int, float], ...] = ()  # first, behind the last, time of the commit
    purged: int = 0  # how often dead rows were deleted for good
    time: int = 0  # the server's: a question is answered when what was written until then is there
    index: str = "FLAT"

    @property
    def condition(self) -> str:
        single = [str(first) for first, last, _ in self.dead if last == first + 1]
        several = [f"(row < {first} or row >= {last})" for first, last, _ in self.dead if last > first + 1]
        return " and ".join([f"row < {self.next}", *several, *([f"row not in [{','.join(single)}]"] if single else [])])

    def without(self, rows: list[int]) -> State:
        now, ranges = round(time.time(), 1), list[tuple[int, int, float]]()
        for row in sorted(rows):
            first = ranges.pop()[0] if ranges and ranges[-1][1] == row else row
            ranges.append((first, row + 1, now))
        return replace(self, dead=(*self.dead, *ranges))

    def skipping(self) -> State:
        """Past all row numbers that a failed change, or a killed writer's, may have used."""
        gap = (self.next, self.next + GAP, round(time.time(), 1))
        return replace(self, next=self.next + GAP, dead=(*self.dead, gap))

    @classmethod
    def parse(cls, text: str) -> State:
        values = json.loads(text)
        return cls(**values | {"dead": tuple((first, last, when) for first, last, when in values["dead"])})


class Server:
    """One index on a server. Any number of threads may ask; changes come one after another."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.mutex = threading.RLock()
        self._token: str | None = None  # of the writer that we are
        self._doubt = False  # did a change fail that may have written rows?
        self._ended = threading.Event()
        self._beating: threading.Thread | None = None
        with self.explained():
            self._client: MilvusClient | None = MilvusClient(
                address.uri, token=address.token, db_name=address.database, timeout=address.timeout
            )

    @property
    def client(self) -> MilvusClient:
        if self._client is None:
            raise StoreError(f"The index at {self.address.shown} has been closed: open it again.")
        return self._client

    def close(self) -> None:
        if self._client is None:
            return
        self._ended.set()
        if self._beating is not None:
            self._beating.join()
        with self.mutex, suppress(MilvusException, grpc.RpcError):  # a lease that cannot be given back runs out
            if self._token is not None and self._lease().get("token") == self._token:
                self._put({WRITER: "{}"}, timeout=2)
        self._client.close()
        self._client = None

    # questions

    def properties(self) -> dict[str, str]:
        """Those of the collection; empty when there is none."""
        try:
            found = self.client.describe_collection(self.address.name, timeout=self.address.timeout)
        except MilvusException as error:
            if _says(error, "not found", "not exist", "find collection"):
                return {}
            raise
        return dict(found["properties"])

    def state(self) -> State:
        text = self.properties().get(STATE)
        if text is None:
            raise self.missing()
        return State.parse(text)

    def missing(self) -> StoreMissingError:
        shown = self.address.shown
        return StoreMissingError(f"There is no index at {shown}. Make one: cooc index FOLDER --index '{shown}'")

    def read(self, ask: Callable[[State], _T]) -> _T:
        """An answer from one committed state. What was deleted for good on the way has it asked again."""
        with self.explained():
            for _ in range(TRIES):
                began = time.monotonic()
                state, answer = self.patiently(lambda: self._asked(ask))
                if time.monotonic() - began < GRACE / 2 or self.state().purged == state.purged:
                    return answer
        raise StoreError(f"The index at {self.address.shown} changes faster than it can be read: try again later.")

    def _asked(self, ask: Callable[[State], _T]) -> tuple[State, _T]:
        state = self.state()
        return state, ask(replace(state, time=max(state.time, self.now() - LAG)))

    def patiently(self, ask: Callable[[], _T]) -> _T:
        """A server that has just been started, or builds an index, cannot answer for a moment."""
        ends, pause = time.monotonic() + self.address.timeout, 0.1
        while True:
            try:
                return ask()
            except MilvusException as error:
                if not _passing(error) or time.monotonic() + pause > ends:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 3.0)

    # changes

    def become_writer(self) -> None:
        """Take the writer's place (Fischer's way: write your name, wait, and see whether it is still there)."""
        mine = {"token": uuid4().hex, "pid": os.getpid(), "started": _started(os.getpid()), "machine": _machine()}
        with self.explained():
            if _alive(holder := self._lease()):
                raise self._locked(holder)
            self._put({WRITER: json.dumps(mine | {"beat": time.time()})})
            self._ended.wait(SETTLE)
            if (holder := self._lease()).get("token") != mine["token"]:
                raise self._locked(holder)
            self._token = str(mine["token"])
            self.commit(self.state().skipping())
        self._beating = threading.Thread(target=self._beat, args=(mine,), daemon=True, name="cooc-milvus-writer")
        self._beating.start()

    def _beat(self, mine: dict[str, Any]) -> None:
        while not self._ended.wait(BEAT):
            with suppress(MilvusException, grpc.RpcError):
                if self._lease().get("token") == self._token:
                    self._put({WRITER: json.dumps(mine | {"beat": time.time()})}, timeout=BEAT)

    @contextmanager
    def changing(self) -> Iterator[State]:
        """The state to start from. Whoever fails before `commit` leaves nothing that counts."""
        with self.mutex, self.explained():
            if self._client is None or self._token is None:
                raise StoreError(
                    f"The index at {self.address.shown} is open for reading only: open it with write=True."
                )
            found = self.properties()
            if (holder := json.loads(found.get(WRITER, "{}"))).get("token") != self._token:
                raise self._locked(holder)
            state = State.parse(found[STATE])
            yield self.commit(state.skipping()) if self._doubt else state

    def insert(self, rows: list[dict[str, Any]]) -> None:
        """Not Milvus's upsert: no key is there already, and up to 2.3 that puts rows into wrong partitions."""
        self._doubt = True
        self.client.insert(self.address.name, rows, timeout=self.address.timeout)

    def commit(self, state: State) -> State:
        if len(state.dead) > RANGES:
            raise StoreError(f"{len(state.dead)} images cannot be changed at once in {self.address.shown}: give fewer.")
        state = replace(state, time=self.now())
        text = json.dumps(asdict(state), separators=(",", ":"))
        self._put({STATE: text})
        if self.properties().get(STATE) != text:
            raise MilvusException(message="the server was started anew before it had kept the change")
        self._doubt = False
        return state

    def now(self) -> int:
        """The server's time: everything that has been written is older. milvus-lite has and needs none."""
        if self.address.lite:
            return 0
        return int(self.client._get_connection().alloc_timestamp(timeout=self.address.timeout))

    def put_new(self, meta: str) -> None:
        """The last step in making an index: from here on there is one."""
        self._put({META: meta, STATE: json.dumps(asdict(State())), WRITER: "{}"})

    def _put(self, properties: dict[str, str], timeout: float | None = None) -> None:
        """Up to 2.3.5, Milvus writes to its disk what there was before a change (its issue 30144). So a second one,
        of nothing, makes the first survive the server. One that is lost in between is found out by `commit`."""
        for changes in (properties, {KEPT: ""}):
            self.client.alter_collection_properties(self.address.name, changes, timeout=timeout or self.address.timeout)

    def _lease(self) -> dict[str, Any]:
        return dict(json.loads(self.properties().get(WRITER, "{}")))

    def _locked(self, holder: dict[str, Any]) -> StoreLockedError:
        who = f"process {holder['pid']} on {holder['machine'].split()[0]}" if "pid" in holder else "it has just begun"
        return StoreLockedError(
            f"Another process is writing to the index at {self.address.shown}: {who}. Wait until it is done, or stop "
            f"it (on another machine, its place is free {EXPIRY:.0f} s later); reading is possible meanwhile."
        )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """What pymilvus says, as errors of cooc that name the server and the repair."""
        try:
            yield
        except CoocError:
            raise
        except (MilvusException, grpc.RpcError, OSError) as error:
            text = " ".join(str(getattr(error, "message", "") or error).split())[:300]
            if self.address.token:
                text = text.replace(self.address.token, "***").replace(
                    self.address.token.partition(":")[2] or "***", "***"
                )
            where = self.address.shown
            if self.address.lite and _says(error, "lock", "another process"):
                raise StoreLockedError(
                    f"{where} is open in another process, and a file takes one only: close it there."
                ) from error
            if _says(error, "auth", "permission", "privilege"):
                raise StoreError(
                    f"The server of {where} refuses ({text}): put user:password@ before the host."
                ) from error
            raise StoreError(
                f"The server of {where} could not do it ({text}). What was committed is kept: see that the server runs "
                "and can be reached, then try again."
            ) from error


def _says(error: BaseException, *words: str) -> bool:
    text = str(error).lower()
    return any(word in text for word in words)


def _passing(error: MilvusException) -> bool:
    return _says(
        error,
        "not loaded",
        "not fully loaded",
        "no available",
        "not available",
        "unavailable",
        "not ready",
        "recovering",
        "shard leader",
        "node not match",
        "lag",
        "find collection",  # while another one is dropped; whether it is really gone, the state says
    )


def _machine() -> str:
    """Two processes with the same one can see each other."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    return socket.gethostname()


def _started(pid: int) -> str | None:
    """When a process began, in the system's own measure; None when there is none, "?" where that cannot be told."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() else "?"
    except OSError:
        return "?"
    return None if fields[0] in "ZX" else fields[19]


def _alive(holder: dict[str, Any]) -> bool:
    if not holder:
        return False
    if holder["machine"] == _machine() and (started := _started(holder["pid"])) != "?":
        return bool(started == holder["started"])
    return bool(time.time() - holder["beat"] < EXPIRY)
