"""A Milvus server as an index needs it: its address, asking until there is an answer, and one writer at a time.

Milvus has no transactions, and none are imitated. A change is made of upserts and deletes by primary key: sending one
twice does no harm, so a request is repeated while the server is away, and a change that was cut short is made again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from uuid import uuid4

import grpc
from pymilvus import MilvusClient
from pymilvus.exceptions import ConnectionConfigException, MilvusException

from cooc.errors import InputError, StoreError
from cooc.index import without_password
from cooc.index.checks import closed, locked, missing, read_only
from cooc.index.store import PAGE, blocks

Row = dict[str, Any]

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
STRUCTURES = ("auto", "flat", "hnsw", "ivf_pq", "diskann")
OPTIONS = {"index": str, "timeout": float, "shards": int, "replicas": int, "features": str}

WRITER = "cooc.writer"  # property of the collection
BEAT, EXPIRY = 60.0, 600.0  # seconds between a working writer's signs of life, and after which it is taken for dead
SETTLE = 0.2  # seconds after which nobody who saw the writer's place free can still be about to take it
LIMIT = 16_384  # rows that one request gives at most
LAG = 10.0  # seconds; more than "Bounded" is ever behind (5 as it comes: common.gracefulTime)

# Codes of pkg/util/merr/errors.go in Milvus, and of gRPC. All others may pass: a server that starts, loads or moves a
# collection has dozens of them, and "unexpected" (65535) is one.
NOT_FOUND = 100  # the collection
DENIED = (1400, 1401, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
REFUSED = (6, 800, 1100, 1101, 1102, 1700, 1701, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
REPAIRS = dict.fromkeys(DENIED, "Put user:password@ before the host")
REPAIRS |= dict.fromkeys(REFUSED, "See that address and server fit together")

for _name in ("pymilvus", "milvus_lite"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)  # they log what they raise as well; we say it once


@dataclass(frozen=True)
class Address:
    """milvus://user:password@host:19530/database/name?options, or milvus:///folder/file.db/name for milvus-lite."""

    uri: str  # what pymilvus connects to
    name: str  # of the collection
    shown: str
    token: str
    lite: bool = False
    database: str = ""
    index: str = "auto"
    timeout: float = 30.0  # seconds for which a request is tried again
    shards: int = 1
    replicas: int = 1
    features: str = ""  # where local features lie, see `features.py`

    @classmethod
    def parse(cls, address: str) -> Address:
        shown = without_password(address)
        try:
            parts = urlsplit(address)
            given = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
            scheme = "https" if given.pop("secure", "false") == "true" else "http"
            token = given.pop("token", "") or os.environ.get("MILVUS_TOKEN", "")
            if parts.username is not None:
                token = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            folder, _, name = unquote(parts.path).strip("/").rpartition("/")
            options = {option: OPTIONS[option](value) for option, value in given.items()}
            lite = not parts.hostname
            named = NAME.fullmatch(name) and (folder.endswith(".db") or not lite)
            if not named or options.get("index", "auto") not in STRUCTURES:
                raise ValueError
            uri = f"/{folder}" if lite else f"{scheme}://{parts.hostname}:{parts.port or 19530}"
            return cls(uri, name, shown, token, lite, "" if lite else folder, **options)
        except (ValueError, KeyError):  # whose text may hold the password
            raise InputError(
                f"{shown} is no address of an index on Milvus: write milvus://host:19530/name or "
                "milvus:///folder/file.db/name (letters, digits, _ in the name); options are "
                f"index={'|'.join(STRUCTURES)}, timeout, shards, replicas, secure, features=FOLDER|URL."
            ) from None


class Server:
    """One index on a server. Any number of threads may ask; changes come one after another."""

    block = PAGE  # rows in one request

    def __init__(self, address: Address) -> None:
        self.address, self.place, self._mutex = address, f"at {address.shown}", threading.RLock()
        self._mine: dict[str, Any] = {}  # what the collection says of its writer, if that is us
        self._changed = self._strong = -math.inf  # when we last changed something, and last asked for all there is
        self._client: MilvusClient | None = self._patiently(
            lambda: MilvusClient(address.uri, token=address.token, db_name=address.database, timeout=address.timeout)
        )

    def close(self) -> None:
        if self._client is not None:
            with suppress(StoreError):  # a place that cannot be given back runs out
                if self._mine and self._holder(self._other):
                    self.put({WRITER: "{}"})
            self._client.close()
            self._client = None

    def ask(self, call: str, *arguments: Any, name: Any = None, **options: Any) -> Any:
        """One of MilvusClient's methods, on this collection if no other is named."""
        if self._client is None:
            raise closed(self.place)
        method, options = getattr(self._client, call), {"timeout": self.address.timeout} | options
        return self._patiently(lambda: method(name or self.address.name, *arguments, **options))

    # rows

    def read(self, call: str, **request: Any) -> Any:
        """What we changed is always seen, what others did soon. Only a "Strong" read waits for the server's clock,
        200 ms as it comes: the first one, also after each change. Then "Session" has what we wrote, on every node, but
        not what we deleted (2.3 does not say when that was); "Bounded" has that too, and is seconds behind at most."""
        began, strong = time.monotonic(), self._strong <= self._changed
        level = "Strong" if strong else "Session" if began - self._changed < LAG else "Bounded"
        found = self.ask(call, consistency_level=level, **request)
        self._strong = max(self._strong, began) if strong else self._strong
        return found

    def rows(self, condition: str, fields: list[str], after: str = "", limit: int = PAGE) -> Iterator[Row]:
        """In the order of their keys, a page at a time. One may be short, where an upsert is under way: Milvus counts
        the row that goes and the one that comes, and gives one. Only an empty one is the end."""
        in_order = {"iterator": "True"} if self.address.lite else {}  # as pymilvus' own iterators ask
        options = {"output_fields": fields, "limit": min(limit, self.block)} | in_order
        while found := self.read("query", filter=f'({condition}) and key > "{after}"', **options):
            yield from found
            after = found[-1]["key"]

    def find(self, field: str, values: Iterable[str], fields: list[str]) -> Iterator[Row]:
        """Those of these keys or ids."""
        for part in blocks(dict.fromkeys(values), self.block):
            asked = f"{field} in {json.dumps(part)}"
            yield from self.read("query", filter=asked, output_fields=fields, limit=LIMIT)

    def count(self, condition: str) -> int:
        return int(self.read("query", filter=condition, output_fields=["count(*)"])[0]["count(*)"])

    def upsert(self, changed: Iterable[Row], size: int = 0) -> int:
        return sum(self.change("upsert", data=block) for block in blocks(changed, size or self.block))

    def delete(self, keys: Iterable[str]) -> int:
        return sum(self.change("delete", ids=block) for block in blocks(keys, self.block))

    def change(self, call: str, **rows: Any) -> int:
        """How many rows or keys were given."""
        try:
            self.ask(call, **rows)
        finally:
            self._changed = time.monotonic()
        return sum(map(len, rows.values()))

    def properties(self, name: str | None = None) -> dict[str, str]:
        return dict(self.ask("describe_collection", name=name)["properties"])

    def put(self, properties: dict[str, str]) -> None:
        """Up to 2.3.5, Milvus writes to its disk what there was before a change (its issue 30144). So a second one,
        of nothing, makes the first survive the server."""
        for part in (properties, {"cooc.kept": ""}):
            self.ask("alter_collection_properties", part)

    # one writer

    def become_writer(self) -> None:
        """Take the writer's place (Fischer's way: write your name, wait, and see whether it is still there)."""
        self._holder(_alive)
        self._mine = {"token": uuid4().hex, "pid": os.getpid(), "machine": _machine()}
        self._beat()
        time.sleep(SETTLE)
        self._holder(self._other)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """For one change at a time, and only while nobody has taken our place."""
        with self._mutex:
            if self._client is None or not self._mine:
                raise read_only(self.place)
            if time.time() - self._holder(self._other)["beat"] > BEAT:
                self._beat()
            self._strong = -math.inf  # what is read now is written back
            yield

    def _beat(self) -> None:
        self.put({WRITER: json.dumps(self._mine | {"beat": time.time()})})

    def _other(self, holder: dict[str, Any]) -> bool:
        return bool(holder.get("token") != self._mine["token"])

    def _holder(self, locks: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """What the collection says of its writer, unless this one locks us out."""
        if locks(holder := dict(json.loads(self.properties().get(WRITER, "{}")))):
            who = f"process {holder['pid']} on {holder['machine'].split()[0]}" if holder else "it has just begun"
            expiry = f"; on another machine, its place is free {EXPIRY / 60:.0f} minutes after its last change"
            raise locked(self.place, who, expiry)
        return holder

    # errors

    def _patiently(self, call: Callable[[], Any]) -> Any:
        """A server that has just been started, or builds an index, cannot answer for a moment."""
        ends, pause = time.monotonic() + self.address.timeout, 0.1
        while True:
            try:
                return call()
            except (MilvusException, grpc.RpcError, OSError) as error:
                # gRPC's code where it is the cause: connecting fails with one code, whatever the reason
                cause = error.__cause__ if isinstance(error.__cause__, grpc.RpcError) else error
                code = cause.code() if isinstance(cause, grpc.RpcError) else getattr(cause, "code", None)
                if code == NOT_FOUND:
                    raise missing(self.place) from error
                if code in REPAIRS or time.monotonic() + pause > ends:
                    raise self._told(error, REPAIRS.get(code)) from error
            time.sleep(pause)
            pause = min(2 * pause, 3.0)

    def _told(self, error: BaseException, repair: str | None) -> StoreError:
        """What pymilvus says, as an error of cooc that names the server and the repair, and no password."""
        text, token = " ".join(str(error).split()), self.address.token
        for secret in filter(None, (token, token.partition(":")[2])):
            text = text.replace(secret, "***")
        if self.address.lite and isinstance(error, ConnectionConfigException):
            repair = "Another process may have the file open, which takes one only: close it there"
        repair = repair or "What was written is kept: see that the server runs and can be reached, then try again"
        return StoreError(f"The server of {self.address.shown} could not do it ({text[:300]}). {repair}.")


def _machine() -> str:
    """Two processes with the same one can see each other."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    return socket.gethostname()


def _alive(holder: dict[str, Any]) -> bool:
    if holder.get("machine") == _machine() and os.name == "posix":
        try:
            os.kill(holder["pid"], 0)
        except OSError as error:
            if isinstance(error, ProcessLookupError):  # else it is somebody else's
                return False
    return bool(holder) and time.time() - holder["beat"] < EXPIRY
