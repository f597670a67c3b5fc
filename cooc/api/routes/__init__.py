"""One function for each route: it calls the search object, in a bounded pool, and shapes the answer."""

from cooc.api.routes import indexing, pictures, searching, server

__all__ = ["ROUTERS"]

ROUTERS = (server.router, searching.router, pictures.router, indexing.router)
