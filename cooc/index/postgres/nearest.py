"""Nearest neighbours in PostgreSQL: exact, one scan of `vectors`, until there are enough for an HNSW graph.

The graph is built on half-precision copies of the vectors (pgvector holds no more than 4000 dimensions of them, and
none of float32 beyond 2000), gives a few more candidates than asked for, and these are scored exactly. With a filter,
it is walked on until enough of what it gives passes; where few pass, or it gives too few, they are scanned instead.

Results are checked, which costs as much as they are many: if the vector of one is not what was written, the search is
made again without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import psycopg
from psycopg import sql

from cooc.index import effort
from cooc.index.postgres.connections import Connection
from cooc.index.postgres.tables import WHOLE, decoded, matching, read_state
from cooc.index.records import Filter
from cooc.index.store import Vectors

APPROXIMATE_FROM = 20_000  # images
MATCHING, MATCHING_SHARE = 20_000, 0.2  # images that pass a filter, and their share, up to which they are scanned
REBUILD_FROM = 0.2  # share of the graph's images that were removed
GRAPH_DIMENSIONS = 4000
M, EF_CONSTRUCTION = 16, 100
EFFORTS = (40, 60, 100, 150, 200, 300, 400, 600, 1000)  # hnsw.ef_search; 1000 is the most that there is
GRAPH_MEMORY = 2 << 30  # bytes at most for building: a graph that does not fit takes many times longer
USUAL = (  # what a walk of the graph has set for its transaction, as the server has it
    "SELECT set_config(name, reset_val, true) FROM pg_settings"
    " WHERE name IN ('enable_seqscan', 'enable_hashjoin', 'enable_mergejoin')"
)

Hit = tuple[bytes, float, bool]  # id, distance, is its vector what was written?
Searched = tuple[str, list[object]]  # FROM ... WHERE ... of the rows that count, and the values in it


class Nearest:
    """Of one index."""

    def __init__(self, dim: int, checked: bool) -> None:
        self.dim = dim
        self._whole = WHOLE if checked else "TRUE"  # an index of an older cooc has no checksums
        self._half = sql.SQL("halfvec({})").format(sql.Literal(dim))

    def search(
        self, connection: Connection, queries: Vectors, k: int, where: Filter | None, exact: bool
    ) -> tuple[list[list[Hit]], int]:
        """For each query the best k, or all that there are, inside the transaction of the caller; how many others were
        left out, for their vectors are damaged."""
        without: list[bytes] = []  # known for this search only: the next `cooc index` may mend them
        while True:
            found = self._search(connection, queries, k, where, exact, without)
            damaged = {name for hits in found for name, _, whole in hits if not whole}
            if not damaged:
                return found, len(without)
            without += damaged

    def _search(
        self, connection: Connection, queries: Vectors, k: int, where: Filter | None, exact: bool, without: list[bytes]
    ) -> list[list[Hit]]:
        far = 0 if exact else self._effort(connection, where)
        searched = _searched(where, without)
        found = self._approximate(connection, queries, k, searched, far) if far else [[] for _ in queries]
        short = [row for row, hits in enumerate(found) if len(hits) < k]
        if far and short:
            connection.execute(USUAL)
        for row, hits in zip(short, self._exact(connection, queries[short], k, searched), strict=True):
            found[row] = hits
        return found

    def _effort(self, connection: Connection, where: Filter | None) -> int:
        """0 where there is no graph, or so few images pass the filter that they are better scanned."""
        state = read_state(connection)
        condition, values = matching(where)
        if state.effort and values:
            few = min(MATCHING, int(MATCHING_SHARE * state.images))
            count = f"SELECT count(*) FROM (SELECT FROM images WHERE {condition} LIMIT %s) passing"
            if connection.execute(count, (*values, few)).fetchone() != (few,):
                return 0
        return state.effort

    def _exact(self, connection: Connection, queries: Vectors, k: int, searched: Searched) -> Iterator[list[Hit]]:
        rows, values = searched
        statement = sql.SQL(
            f"SELECT id, distance, {self._whole} FROM (SELECT id, vector <#> %s::vector AS distance {rows}"
            " ORDER BY distance, id LIMIT %s) best JOIN vectors USING (id) ORDER BY distance, id"
        )
        return _each(connection, statement, ((query, *values, k) for query in queries))

    def _approximate(
        self, connection: Connection, queries: Vectors, k: int, searched: Searched, far: int
    ) -> list[list[Hit]]:
        rows, values = searched
        candidates = k + k // 4 + 8  # the order of half-precision distances is not quite that of the true ones
        connection.execute(
            "SELECT set_config('hnsw.ef_search', %s, true), set_config('hnsw.iterative_scan', 'relaxed_order', true),"
            " set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true),"
            " set_config('enable_mergejoin', 'off', true)",
            (str(min(EFFORTS[-1], effort.scaled(far, k))),),
        )
        checksum = ", checksum" if self._whole == WHOLE else ""
        statement = sql.SQL(
            f"WITH near AS MATERIALIZED (SELECT id, vector{checksum} {rows}"
            " ORDER BY vector::{half} <#> %s::vector::{half} LIMIT %s)"
            f" SELECT id, vector <#> %s::vector AS distance, {self._whole} FROM near ORDER BY distance, id LIMIT %s"
        ).format(half=self._half)
        return list(_each(connection, statement, ((*values, query, candidates, query, k) for query in queries)))

    # the graph

    def renew_graph(self, connection: Connection) -> None:
        """Build the graph when the index is large enough, again when much was removed; find out what it takes."""
        state = read_state(connection)
        if state.images < APPROXIMATE_FROM or self.dim > GRAPH_DIMENSIONS:
            return
        worn = state.removed >= REBUILD_FROM * state.indexed
        if state.effort and not worn and state.images < 2 * state.indexed:
            return
        if not state.effort or worn:
            self._build_graph(connection, state.images)
        far = self._calibrated(connection)
        connection.execute("UPDATE state SET effort = %s, indexed = images, removed = 0", (far,))

    def _build_graph(self, connection: Connection, count: int) -> None:
        """Readers go on meanwhile. Memory for it all, if that may be: 16-bit values, and neighbours on every level."""
        memory = min(GRAPH_MEMORY, count * (2 * self.dim + 1024) + (64 << 20))
        connection.execute(
            "SELECT set_config(name, greatest(setting::int8, %s)::text, true) FROM pg_settings WHERE name = %s",
            (memory >> 10, "maintenance_work_mem"),
        )
        build = sql.SQL(
            "CREATE INDEX ON vectors USING hnsw ((vector::{half}) halfvec_ip_ops)"
            " WITH (m = {m}, ef_construction = {ef})"
        ).format(half=self._half, m=sql.Literal(M), ef=sql.Literal(EF_CONSTRUCTION))
        try:
            with connection.transaction():
                connection.execute(build)
        except psycopg.errors.DiskFull:  # of shared memory, which a container may have little of: with one process
            connection.execute("SELECT set_config('max_parallel_maintenance_workers', '0', true)")
            connection.execute(build)

    def _calibrated(self, connection: Connection) -> int:
        """The effort for these vectors: see `cooc.index.effort`."""
        everything = _searched(None, [])
        rows = connection.execute(  # ids are as good as random
            "SELECT vector FROM vectors WHERE id >= %s ORDER BY id LIMIT %s", (b"\x40", effort.SAMPLE), binary=True
        ).fetchall()
        queries = effort.views(decoded([row[0] for row in rows], self.dim))
        expected = self._exact(connection, queries, effort.NEIGHBOURS, everything)

        def search(far: int) -> list[list[bytes]]:
            return _names(self._approximate(connection, queries, effort.NEIGHBOURS, everything, far))

        return effort.least(EFFORTS, _names(expected), search)


def _names(found: Iterable[list[Hit]]) -> list[list[bytes]]:
    return [[name for name, *_ in hits] for hits in found]


def _searched(where: Filter | None, without: list[bytes]) -> Searched:
    condition, values = matching(where)
    joined = " JOIN images USING (id)" if values else ""
    if without:
        condition, values = f"{condition} AND id <> ALL(%s)", [*values, without]
    return f"FROM vectors{joined} WHERE {condition}", values


def drop_old_graphs(connection: Connection) -> None:
    """All but the newest. This waits for searches that use them, for a moment."""
    graphs = connection.execute(
        "SELECT i.relname FROM pg_index JOIN pg_class i ON i.oid = indexrelid JOIN pg_am a ON a.oid = i.relam"
        " WHERE indrelid = 'vectors'::regclass AND amname = 'hnsw' ORDER BY i.oid"
    ).fetchall()
    for (name,) in graphs[:-1]:
        connection.execute(sql.SQL("DROP INDEX {}").format(sql.Identifier(name)))


def _each(
    connection: Connection, statement: sql.SQL | sql.Composed, values: Iterable[Sequence[object]]
) -> Iterator[list[Hit]]:
    """The rows of one statement for each tuple of values; all are on their way before the first has come back."""
    asked = list(values)
    if not asked:
        return
    with connection.cursor(binary=True) as cursor:
        cursor.executemany(statement, asked, returning=True)
        yield cursor.fetchall()
        while cursor.nextset():
            yield cursor.fetchall()
