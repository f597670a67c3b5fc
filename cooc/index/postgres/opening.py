"""Making and opening an index in PostgreSQL."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import psycopg
from psycopg import sql

from cooc.errors import InputError, StoreError
from cooc.index.postgres import features, tables
from cooc.index.postgres.connections import Address, Connection, Server
from cooc.index.postgres.store import PostgresStore
from cooc.index.records import FORMAT, StoreMeta

DIMENSIONS = 16_000  # that pgvector holds
PGVECTOR = (0, 8)  # has iterative scans


def open_store(address: str, *, write: bool = False) -> PostgresStore:
    return PostgresStore(Address.parse(address), write=write)


def create_store(address: str, meta: StoreMeta) -> PostgresStore:
    where = Address.parse(address)
    if meta.dim > DIMENSIONS:
        raise InputError(f"pgvector holds up to {DIMENSIONS} dimensions, not {meta.dim}: use another recipe or engine.")
    meta = replace(meta, storage="float32", format=FORMAT)  # whatever it comes from
    schema = sql.Identifier(where.schema)
    with closing(Server(where)) as server:
        server.read(_require_pgvector)
        with server.explained(), server.connect() as connection, connection.transaction():
            try:
                connection.execute(sql.SQL("CREATE SCHEMA {}").format(schema))
            except (psycopg.errors.DuplicateSchema, psycopg.errors.UniqueViolation) as error:
                text = f"There is an index at {where.shown} already: open it, or first DROP SCHEMA"
                raise StoreError(f"{text} {where.schema} CASCADE.") from error
            tables.make(connection, meta.dim, meta.as_json())
            if meta.features:
                features.set_engines(connection, meta.features)
    return PostgresStore(where, write=True)


def _require_pgvector(connection: Connection) -> None:
    version = "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
    if (row := connection.execute(version).fetchone()) is None:
        try:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector SCHEMA public")
        except psycopg.DatabaseError as error:
            raise StoreError(
                f"The server has no pgvector, or this user may not enable it ({error}). Install it (Debian: "
                "postgresql-NN-pgvector), and as the owner of the database: CREATE EXTENSION vector"
            ) from error
        row = connection.execute(version).fetchone()
    if row is None or tuple(map(int, row[0].split(".")[:2])) < PGVECTOR:
        raise StoreError(
            f"pgvector {row and row[0]} is too old: 0.8 is needed. Install it, then ALTER EXTENSION vector UPDATE."
        )
