"""A PostgreSQL server as an index needs it: its address, connections that come back, one writer, and what errors mean.

Reads that lose their connection are tried again on a new one. So are changes, and none is made twice or by halves: each
is one transaction whose number is known, and a server that is back says whether that number was committed.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import unquote

import numpy as np
import psycopg
from psycopg import IsolationLevel, errors, sql
from psycopg.adapt import Dumper
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Format

from cooc.errors import InputError, StoreDamagedError, StoreError, StoreLockedError
from cooc.index import without_password
from cooc.index.checks import closed, locked, missing, read_only
from cooc.index.store import kept_open

Connection = psycopg.Connection[tuple[Any, ...]]
_T = TypeVar("_T")

PAUSES = (0.1, 0.3, 1.0, 3.0)  # seconds before a lost connection is tried again
LOCK_SECONDS = 1.5  # a server takes a moment to notice that a writer was killed
LOCK = 0x636F6F63  # "cooc": the class of our advisory locks; the object is the schema's number
KEPT = 16  # connections kept open for the next read
DEFAULTS = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
NAME = re.compile(r"[a-z0-9_][a-z0-9_-]{0,47}")


@dataclass(frozen=True)
class Address:
    """postgresql://user@host/db?index=photos: the index is the schema cooc_photos of that database (else cooc)."""

    options: dict[str, Any]  # libpq's, the password among them
    schema: str
    shown: str

    @property
    def place(self) -> str:
        return f"at {self.shown}"

    @classmethod
    def parse(cls, address: str) -> Address:
        base, _, query = address.partition("?")
        words = [word for word in query.split("&") if word]
        named = [unquote(word[6:]) for word in words if word.startswith("index=")]
        rest = "&".join(word for word in words if not word.startswith("index="))
        shown = without_password(address)
        if len(named) > 1 or not all(NAME.fullmatch(name) for name in named):
            raise InputError(f"{shown}: the name of an index is up to 48 of a-z, 0-9, _ and -, as in ?index=photos.")
        try:
            options = conninfo_to_dict(f"{base}?{rest}" if rest else base)
        except psycopg.Error:  # whose text may hold the password
            message = f"{shown} is no address of a database: write postgresql://user@host:5432/database?index=photos"
            raise InputError(message) from None
        return cls(DEFAULTS | options, f"cooc_{named[0]}" if named else "cooc", shown)


class VectorDumper(Dumper):
    """A vector (D,) as a parameter of a statement, which has to say `::vector`, in pgvector's binary format:
    dimensions, zero, then the values."""

    format = Format.BINARY

    def dump(self, obj: Any) -> bytes:
        return len(obj).to_bytes(2, "big") + b"\0\0" + bytes(obj.astype(">f4"))


class Server:
    """Connections to one index. Any number of threads may read; changes come one after another."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._idle: deque[Connection] = deque()
        self._writer: Connection | None = None
        self._writes = False
        self._closed = False
        self._mutex = threading.RLock()
        self._frozen = threading.local()  # the connection that a thread reads one state on

    # opening and closing

    def become_writer(self) -> None:
        with self.explained():
            self._writer = self._locked()
        self._writes = True

    def close(self) -> None:
        self._closed = True
        with self._mutex:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
        while self._idle:
            self._idle.pop().close()

    def connect(self) -> Connection:
        here = f"cooc process {os.getpid()} on {socket.gethostname()}"[:63]
        options = {"application_name": here, **self.address.options, "client_encoding": "utf8"}
        # Each statement is planned for its own values: a plan for any vector and any filter is a plan for none.
        connection = psycopg.connect(**options, autocommit=True, prepare_threshold=None)
        with kept_open(connection):
            connection.isolation_level = IsolationLevel.REPEATABLE_READ
            connection.adapters.register_dumper(np.ndarray, VectorDumper)
            connection.execute(
                "SELECT set_config('search_path', concat_ws(', ', quote_ident(%s), quote_ident(nspname)), false),"
                " set_config('jit', 'off', false) FROM (SELECT) one LEFT JOIN"
                " (pg_extension JOIN pg_namespace n ON n.oid = extnamespace) ON extname = 'vector'",
                (self.address.schema,),
            )
        return connection

    def _locked(self) -> Connection:
        """A connection that holds the writer's lock for as long as it lives."""
        connection = self.connect()
        with kept_open(connection):
            for name, value in (  # so that a client which is no more does not hold the lock for hours
                ("client_connection_check_interval", "5s"),
                ("tcp_keepalives_idle", "30"),
                ("tcp_keepalives_interval", "10"),
                ("tcp_keepalives_count", "3"),
            ):
                with suppress(psycopg.Error):
                    connection.execute("SELECT set_config(%s, %s, false)", (name, value))
            ends = time.monotonic() + LOCK_SECONDS
            lock = "SELECT pg_try_advisory_lock(%s, oid::int8::bit(32)::int) FROM pg_namespace WHERE nspname = %s"
            while (row := connection.execute(lock, (LOCK, self.address.schema)).fetchone()) != (True,):
                if row is None:
                    raise missing(self.address.place)
                if time.monotonic() > ends:
                    raise self._held(connection)
                time.sleep(0.05)
        return connection

    def _held(self, connection: Connection) -> StoreLockedError:
        row = connection.execute(
            "SELECT application_name FROM pg_locks JOIN pg_stat_activity USING (pid), pg_namespace n WHERE granted AND"
            " locktype = 'advisory' AND classid = %s AND objid = n.oid AND objsubid = 2 AND nspname = %s",
            (LOCK, self.address.schema),
        ).fetchone()
        return locked(self.address.place, (row and row[0]) or "it does not say")

    # using them

    def read(self, work: Callable[[Connection], _T]) -> _T:
        """What `work` returns, on a connection that nobody else uses meanwhile; tried again if that is lost."""

        def attempt() -> _T:
            with self._borrowed() as connection:
                return work(connection)

        with self.explained():
            held: Connection | None = getattr(self._frozen, "connection", None)
            return _patiently(attempt) if held is None else work(held)

    @contextmanager
    def one_state(self) -> Iterator[None]:
        """All that this thread reads meanwhile is of one committed state."""
        with self.explained(), self.connect() as connection, connection.transaction():
            self._frozen.connection = connection
            try:
                yield
            finally:
                del self._frozen.connection

    def change(self, work: Callable[[Connection], _T]) -> _T:
        """The same in one transaction of the writer: there as a whole, once, or not at all."""
        done: tuple[str, _T] | None = None  # the transaction that was being committed, and its result

        def attempt() -> _T:
            nonlocal done
            connection = self.writer()
            if done and self._committed(connection, done[0]):
                return done[1]
            done = None
            with connection.transaction():
                result = work(connection)
                row = connection.execute("SELECT pg_current_xact_id_if_assigned()::text").fetchone()
                done = (row[0], result) if row and row[0] else None
            return result

        with self._mutex, self.explained("Nothing of the last change was kept, unless it was just being committed. "):
            return _patiently(attempt)

    def writer(self) -> Connection:
        """The connection that holds the lock; a new one if the last was lost, unless another has it by now."""
        self._check_open()
        if not self._writes:
            raise read_only(self.address.place)
        if self._writer is None or self._writer.closed:
            self._writer = self._locked()
        return self._writer

    def _committed(self, connection: Connection, number: str) -> bool:
        while True:
            row = connection.execute("SELECT pg_xact_status(%s::xid8)", (number,)).fetchone()
            if row != ("in progress",):
                return row == ("committed",)
            time.sleep(0.1)  # the server has not noticed yet that we were gone

    def vacuum(self, tables: list[str]) -> None:
        with self._mutex, self.explained():
            names = sql.SQL(", ").join(map(sql.Identifier, tables))
            self.writer().execute(sql.SQL("VACUUM (ANALYZE) {}").format(names))

    @contextmanager
    def _borrowed(self) -> Iterator[Connection]:
        self._check_open()
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self.connect()
        try:
            yield connection
        except psycopg.OperationalError:
            connection.close()
            while self._idle:  # they were lost with it
                self._idle.pop().close()
            raise
        finally:
            if self._closed or len(self._idle) >= KEPT:  # closed by another thread, meanwhile
                connection.close()
            elif not connection.closed:
                self._idle.append(connection)

    def _check_open(self) -> None:
        if self._closed:
            raise closed(self.address.place)

    # what goes wrong

    @contextmanager
    def explained(self, state: str = "") -> Iterator[None]:
        """What the server and its client say, as errors of cooc that name the index and the repair."""
        try:
            yield
        except psycopg.Error as error:
            text, shown = " ".join(str(error).split()), self.address.shown
            kind = StoreError
            match error:
                case errors.UndefinedTable() | errors.InvalidSchemaName():
                    raise missing(self.address.place) from error
                case errors.DiskFull():
                    message = f"The server's disk is full ({text}). What was committed is kept: free some space."
                case errors.DataCorrupted() | errors.IndexCorrupted():
                    kind, message = StoreDamagedError, f"The index is damaged ({text}). Restore the database, or drop "
                    message += f"the schema and put a snapshot in its place: cooc restore SNAPSHOT '{shown}'."
                case errors.InsufficientPrivilege():
                    message = f"The user may not do this ({text}). GRANT it, or use another one."
                case psycopg.OperationalError():
                    message = f"The server cannot be reached, or went away ({text}). {state}Check the address, and that"
                    message += " the server runs; then try again."
                case _:
                    message = f"The index could not be used ({text}). What was committed is kept."
            raise kind(f"{shown}: {message}") from error


def _patiently(attempt: Callable[[], _T]) -> _T:
    for pause in PAUSES:
        try:
            return attempt()
        except psycopg.OperationalError as error:
            if not _lost(error):
                raise
            time.sleep(pause)
    return attempt()


def _lost(error: psycopg.OperationalError) -> bool:
    """Was the connection lost, or not to be had? (Else the server has answered, and would answer the same again.)"""
    return error.sqlstate is None or error.sqlstate.startswith(("08", "57P"))
