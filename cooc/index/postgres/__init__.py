"""An index in PostgreSQL with pgvector."""

from cooc.index.postgres.store import PostgresStore, create_store, open_store

__all__ = ["PostgresStore", "create_store", "open_store"]
