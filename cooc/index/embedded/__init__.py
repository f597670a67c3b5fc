"""An index in a folder: SQLite is the truth, faiss searches a cache of its vectors."""

from cooc.index.embedded.store import EmbeddedStore, create_store, open_store

__all__ = ["EmbeddedStore", "create_store", "open_store"]
