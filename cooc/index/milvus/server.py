"""A collection on a Milvus server: asking until there is an answer, and one writer at a time.

Milvus has no transactions, and none are imitated. A change is made of upserts and deletes by primary key: sending one
twice does no harm, so a request is repeated while the server is away, and a change that was cut short is made again.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import grpc
from pymilvus import MilvusClient
from pymilvus.exceptions import ConnectionConfigException, MilvusException

from cooc.errors import StoreError, StoreLockedError
from cooc.index.checks import closed, locked, missing, read_only
from cooc.index.milvus.address import Address

_T = TypeVar("_T")
Row = dict[str, Any]

WRITER, KEPT = "cooc.writer", "cooc.kept"  # properties of the collection
BEAT, EXPIRY = 60.0, 600.0  # seconds between a working writer's signs of life, and after which it is taken for dead
SETTLE = 0.2  # seconds after which nobody who saw the writer's place free can still be about to take it
LIMIT = 16_384  # rows that one request gives at most
LAG = 10.0  # seconds; more than "Bounded" is ever behind (5 as it comes: common.gracefulTime)

# Codes of pkg/util/merr/errors.go in Milvus, and of gRPC. All others may pass: a server that starts, loads or moves a
# collection has dozens of them, and "unexpected" (65535) is one.
NOT_FOUND = 100  # the collection
DENIED = {1400, 1401, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
REFUSED = {6, 800, 1100, 1101, 1102, 1700, 1701, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED}

for _name in ("pymilvus", "milvus_lite"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)  # they log what they raise as well; we say it once


class Server:
    """One index on a server. Any number of threads may ask; changes come one after another."""

    def __init__(self, address: Address) -> None:
        self.address, self._mutex = address, threading.RLock()
        self._mine: dict[str, Any] = {}  # what the collection says of its writer, if that is us
        self._changed = self._strong = -math.inf  # when we last changed something, and last asked for all there is
        self._client: MilvusClient | None = self._patiently(
            lambda: MilvusClient(address.uri, token=address.token, db_name=address.database, timeout=address.timeout)
        )

    def close(self) -> None:
        if self._client is not None:
            with suppress(StoreError):  # a place that cannot be given back runs out
                if self._mine and self._own():
                    self.put({WRITER: "{}"})
            self._client.close()
            self._client = None

    def ask(self, call: str, *arguments: Any, name: str | None = None, **options: Any) -> Any:
        """One of MilvusClient's methods, on this collection if no other is named."""
        if self._client is None:
            raise closed(self.address.place)
        method, options = getattr(self._client, call), {"timeout": self.address.timeout} | options
        return self._patiently(lambda: method(name or self.address.name, *arguments, **options))

    def read(self, call: str, **request: Any) -> Any:
        """What we changed is always seen, what others did soon.

        A strong read waits for the server's clock, 200 ms as it comes, and so is only the first one, also after each
        change. From then on "Session" contains what we wrote, on every node and after a restart, but not what we
        deleted (2.3 does not say when that was); later "Bounded" does, which is seconds behind at most. Neither waits.
        """
        began, strong = time.monotonic(), self._strong <= self._changed
        level = "Strong" if strong else "Session" if began - self._changed < LAG else "Bounded"
        found = self.ask(call, consistency_level=level, **request)
        self._strong = max(self._strong, began) if strong else self._strong
        return found

    def query(self, condition: str, fields: list[str], **options: Any) -> list[Row]:
        return list(self.read("query", filter=condition, output_fields=fields, **options))

    def pages(self, condition: str, fields: list[str], size: int, after: str = "") -> Iterator[Row]:
        """Rows in the order of their keys. A page may be short, where an upsert is under way: Milvus counts the row
        that goes and the one that comes, and gives one. Only an empty one is the end."""
        in_order = {"iterator": "True"} if self.address.lite else {}  # as pymilvus' own iterators ask
        while found := self.query(f'({condition}) and key > "{after}"', fields, limit=size, **in_order):
            yield from found
            after = found[-1]["key"]

    def change(self, call: str, **request: Any) -> None:
        try:
            self.ask(call, **request)
        finally:
            self._changed = time.monotonic()

    def properties(self) -> dict[str, str]:
        return dict(self.ask("describe_collection")["properties"])

    def put(self, properties: dict[str, str]) -> None:
        """Up to 2.3.5, Milvus writes to its disk what there was before a change (its issue 30144). So a second one,
        of nothing, makes the first survive the server."""
        for part in (properties, {KEPT: ""}):
            self.ask("alter_collection_properties", part)

    # one writer

    def become_writer(self) -> None:
        """Take the writer's place (Fischer's way: write your name, wait, and see whether it is still there)."""
        if _alive(holder := self._holder()):
            raise self._locked(holder)
        self._mine = {"token": uuid4().hex, "pid": os.getpid(), "machine": _machine()}
        self._beat()
        time.sleep(SETTLE)
        self._own()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """For one change at a time, and only while nobody has taken our place."""
        with self._mutex:
            if self._client is None or not self._mine:
                raise read_only(self.address.place)
            if time.time() - self._own()["beat"] > BEAT:
                self._beat()
            self._strong = -math.inf  # what is read now is written back
            yield

    def _beat(self) -> None:
        self.put({WRITER: json.dumps(self._mine | {"beat": time.time()})})

    def _holder(self) -> dict[str, Any]:
        return dict(json.loads(self.properties().get(WRITER, "{}")))

    def _own(self) -> dict[str, Any]:
        if (holder := self._holder()).get("token") != self._mine["token"]:
            raise self._locked(holder)
        return holder

    def _locked(self, holder: dict[str, Any]) -> StoreLockedError:
        who = f"process {holder['pid']} on {holder['machine'].split()[0]}" if holder else "it has just begun"
        expiry = f"; on another machine, its place is free {EXPIRY / 60:.0f} minutes after its last change"
        return locked(self.address.place, who, expiry)

    # errors

    def _patiently(self, call: Callable[[], _T]) -> _T:
        """A server that has just been started, or builds an index, cannot answer for a moment."""
        ends, pause = time.monotonic() + self.address.timeout, 0.1
        while True:
            try:
                return call()
            except (MilvusException, grpc.RpcError, OSError) as error:
                if _code(error) in {NOT_FOUND} | DENIED | REFUSED or time.monotonic() + pause > ends:
                    raise self._told(error) from error
            time.sleep(pause)
            pause = min(2 * pause, 3.0)

    def _told(self, error: BaseException) -> StoreError:
        """What pymilvus says, as an error of cooc that names the server and the repair, and no password."""
        code, text = _code(error), " ".join(str(error).split())
        for secret in filter(None, (self.address.token, self.address.token.partition(":")[2])):
            text = text.replace(secret, "***")
        if code == NOT_FOUND:
            return missing(self.address.place)
        if self.address.lite and isinstance(error, ConnectionConfigException):
            repair = "Another process may have the file open, which takes one only: close it there"
        elif code in DENIED:
            repair = "Put user:password@ before the host"
        elif code in REFUSED:
            repair = "See that address and server fit together"
        else:
            repair = "What was written is kept: see that the server runs and can be reached, then try again"
        return StoreError(f"The server of {self.address.shown} could not do it ({text[:300]}). {repair}.")


def _code(error: BaseException) -> object:
    """gRPC's where it is the cause: connecting fails with one code, whatever the reason."""
    cause = error.__cause__ if isinstance(error.__cause__, grpc.RpcError) else error
    return cause.code() if isinstance(cause, grpc.RpcError) else getattr(cause, "code", None)


def _machine() -> str:
    """Two processes with the same one can see each other."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    return socket.gethostname()


def _alive(holder: dict[str, Any]) -> bool:
    if not holder or time.time() - holder["beat"] > EXPIRY:
        return False
    with suppress(PermissionError):  # it is somebody else's
        try:
            if holder["machine"] == _machine() and os.name == "posix":
                os.kill(holder["pid"], 0)
        except ProcessLookupError:
            return False
    return True
