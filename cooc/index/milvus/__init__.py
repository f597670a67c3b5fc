"""An index in Milvus."""

from cooc.index.milvus.store import MilvusStore, create_store, open_store

__all__ = ["MilvusStore", "create_store", "open_store"]
