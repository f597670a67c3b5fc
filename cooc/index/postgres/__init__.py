"""An index in PostgreSQL with pgvector."""

from cooc.index.postgres.opening import create_store, open_store
from cooc.index.postgres.store import PostgresStore

__all__ = ["PostgresStore", "create_store", "open_store"]
