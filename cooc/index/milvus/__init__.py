"""An index in Milvus."""

from cooc.index.milvus.opening import create_store, open_store
from cooc.index.milvus.store import MilvusStore

__all__ = ["MilvusStore", "create_store", "open_store"]
