"""One function for each route: it calls the search object, in a bounded pool, and shapes the answer."""

from cooc.api.routes import browsing, downloads, indexing, keeping, pictures, queries, searching, server

__all__ = ["ROUTERS"]

ROUTERS = tuple(room.router for room in (server, searching, queries, browsing, pictures, downloads, keeping, indexing))
