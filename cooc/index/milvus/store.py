"""Milvus, for more pictures than one machine holds: an index is a collection, and a file of milvus-lite to try it out.

    key         the path's bytes in hex, "-" and the row's number: Milvus lists rows in this order, that of the paths
    row         a number that is never used twice; the committed state says which ones count (see `_milvus.py`)
    folder      the first folder of the path, in hex: the partition key, so that a filter by folder asks few partitions
    id, place   the image's id, and 63 bits of the path's digest: rows are found by these
    bad         is it a file that could not be described? Then `reason` says why
    ...         the fields of `Record`; vector

Searching is exact (FLAT) until `compact` finds the index large enough for HNSW, and for IVF_PQ beyond what memory
holds. Whatever finds candidates, they are scored again from their vectors: a score depends on the two vectors only.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pymilvus import DataType, MilvusClient
from pymilvus.exceptions import MilvusException

from cooc.errors import CoocError, InputError, StoreError
from cooc.index.copying import copy_to_folder
from cooc.index.milvus.collection import GRACE, META, Address, Server, State
from cooc.index.store import (
    FORMAT,
    BadFile,
    Filter,
    Record,
    SearchResult,
    StoreMeta,
    Vectors,
    check_tags,
    check_vectors,
    id_bytes,
    path_bytes,
    path_text,
)

DIMENSIONS = 32_768
HNSW_FROM, IVF_PQ_FROM = 200_000, 20_000_000  # images; reasoned, not measured: see docs/scaling.md
PARTITIONS = 16
LIMIT = 16_384  # results of one request that Milvus gives at most
SPARE, SLACK = 8, 2e-6  # candidates beyond k; more than float32 products of unit vectors are ever off by
HITS = 200_000  # results asked for at once
PAGE = 1000  # records read at once
VALUES = 1000  # in one condition
REQUEST = 16 << 20  # bytes of vectors in one request
PURGE_FROM = 64  # ranges of rows to delete for good, when a change comes by
PATH, TAG, TAGS, REASON = 4096, 1024, 1024, 8192  # bytes of a path, of a tag; tags of an image; bytes of a reason

FIELDS = ["key", "row", "size", "mtime_ns", "sha256", "width", "height", "taken", "tags"]
BAD_FIELDS = ["key", "size", "mtime_ns", "reason"]
_T = TypeVar("_T")


def open_store(address: str, *, write: bool = False) -> MilvusStore:
    return MilvusStore(Address.parse(address), write=write)


def create_store(address: str, meta: StoreMeta) -> MilvusStore:
    where = Address.parse(address)
    if meta.storage != "float32":
        raise InputError(f"An index on Milvus keeps float32 vectors, not {meta.storage}; index=ivf_pq searches codes.")
    prepare_collection(address, meta.dim)
    server = Server(where)
    try:
        with server.explained():
            server.put_new(json.dumps(asdict(meta)))
    finally:
        server.close()
    return MilvusStore(where, write=True)


def prepare_collection(address: str, dim: int) -> None:
    """An empty collection, loaded: all of an index but its `StoreMeta`. One that was left so half-made is used."""
    where = Address.parse(address)
    if dim > DIMENSIONS:
        raise InputError(f"Milvus holds up to {DIMENSIONS} dimensions, not {dim}: use another recipe or engine.")
    server = Server(where)
    try:
        with server.explained():
            if META in server.properties():
                raise StoreError(f"There is an index at {where.shown} already: open it, or drop the collection first.")
            if server.client.has_collection(where.name, timeout=where.timeout):
                fields = server.client.describe_collection(where.name, timeout=where.timeout)["fields"]
                if {"name": "vector", "dim": dim} not in [
                    {"name": field["name"], "dim": field["params"].get("dim")} for field in fields
                ]:
                    raise StoreError(f"There is another collection at {where.shown} already: choose another name.")
            else:
                options: dict[str, Any] = {} if where.lite else {"num_shards": where.shards}
                server.client.create_collection(
                    where.name, schema=_schema(dim), consistency_level="Strong", timeout=where.timeout, **options
                )
            _build(server, "FLAT", dim)
    finally:
        server.close()


def _schema(dim: int) -> Any:
    schema = MilvusClient.create_schema(partition_key_field="folder", num_partitions=PARTITIONS)
    schema.add_field("key", DataType.VARCHAR, is_primary=True, max_length=16_384)
    for name in ("row", "place", "size", "mtime_ns", "width", "height", "crc"):
        schema.add_field(name, DataType.INT64)
    for name, length in (("folder", 8192), ("id", 32), ("sha256", 64), ("taken", 19), ("reason", REASON)):
        schema.add_field(name, DataType.VARCHAR, max_length=length)
    schema.add_field("bad", DataType.BOOL)
    schema.add_field("tags", DataType.ARRAY, element_type=DataType.VARCHAR, max_capacity=TAGS, max_length=TAG)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
    return schema


def _build(server: Server, index: str, dim: int) -> None:
    """Build the search structure and load it. Where there was another one, searching has to wait meanwhile."""
    params = {
        "FLAT": {},
        "HNSW": {"M": 32, "efConstruction": 160},
        "IVF_PQ": {"nlist": 2048, "m": _divisor(dim), "nbits": 8},  # lists of a segment, 250,000 vectors of 512 numbers
        "DISKANN": {},
    }[index]
    client, name = server.client, server.address.name
    wanted = client.prepare_index_params()
    wanted.add_index("vector", index_type=index, metric_type="IP", index_name="vector", params=params)
    if not server.address.lite:
        for field, kind in (("id", "Trie"), ("sha256", "Trie"), ("place", "STL_SORT")):
            wanted.add_index(field, index_type=kind, index_name=field)
    client.create_index(name, wanted, sync=False)
    # Loaded before that is built, a collection was at times searched by something coarse (by its settings, the server's
    # interim index): 54 % of the nearest were found, whatever the effort.
    while not server.address.lite and (found := client.describe_index(name, "vector"))["state"] != "Finished":
        if found["state"] == "Failed":
            raise MilvusException(message=f"building {index} failed: {found}")
        time.sleep(0.1)
    client.load_collection(name, **({} if server.address.lite else {"replica_number": server.address.replicas}))


def _divisor(dim: int) -> int:
    """Sub-vectors of a product quantizer: as near to eight numbers each as divides the dimension."""
    return min((m for m in range(1, dim + 1) if dim % m == 0), key=lambda m: (abs(dim / 8 - m), m))


class MilvusStore:
    """`cooc.index.store.Store` in a collection of Milvus. Threads may share it."""

    def __init__(self, address: Address, *, write: bool = False) -> None:
        self.address = address
        self._server = Server(address)
        try:
            with self._server.explained():
                text = self._server.properties().get(META)
            if text is None:
                raise self._server.missing()
            values = json.loads(text)
            if values["format"] > FORMAT:
                found = f"The index at {address.shown} has format {values['format']}"
                raise StoreError(f"{found}, and this cooc reads up to {FORMAT}: upgrade cooc.")
            self.meta = StoreMeta(**values)
            if write:
                self._server.become_writer()
        except BaseException:
            self._server.close()
            raise
        self._block = max(1, min(PAGE, REQUEST // (4 * self.meta.dim)))  # vectors in one request

    def __len__(self) -> int:
        return self._server.read(lambda state: state.images)

    # changes

    def add(self, records: Sequence[Record], vectors: Vectors) -> None:
        vectors = check_vectors(np.asarray(vectors), self.meta.dim)
        if len(records) != len(vectors):
            raise InputError(f"{len(records)} records came with {len(vectors)} vectors: one for each is needed.")
        latest = {record.path: row for row, record in enumerate(records)}

        def work(state: State) -> tuple[list[Record], Vectors, list[dict[str, Any]], None]:
            old = self._at(state, latest, ["tags"])
            had = {_path(row): frozenset(row["tags"]) for row in old if not row["bad"]}
            new = [
                replace(records[row], tags=records[row].tags | had.get(path, frozenset()))
                for path, row in latest.items()
            ]
            return new, vectors[list(latest.values())], old, None

        self._change(work)

    def remove(self, paths: Iterable[str]) -> int:
        names = list(dict.fromkeys(paths))

        def work(state: State) -> tuple[list[Record], Vectors, list[dict[str, Any]], int]:
            old = [row for row in self._at(state, names) if not row["bad"]]
            return [], self._none, old, len(old)

        return self._change(work)

    def rename(self, moves: Mapping[str, str]) -> int:
        if len(set(moves.values())) < len(moves):
            raise InputError("Two images cannot be moved to one path.")
        wanted = {old: new for old, new in moves.items() if old != new}
        for new in wanted.values():
            path_bytes(new)

        def work(state: State) -> tuple[list[Record], Vectors, list[dict[str, Any]], int]:
            found = [row for row in self._at(state, wanted, [*FIELDS, "vector"]) if not row["bad"]]
            moved = [replace(_record(row), path=wanted[_path(row)]) for row in found]
            gone = {row["row"]: row for row in [*found, *self._at(state, [record.path for record in moved])]}
            return moved, self._matrix(found), [r for r in gone.values() if not r["bad"]], len(moved)

        return self._change(work)

    def touch(self, mtimes_ns: Mapping[str, int]) -> int:
        return self._rewrite(
            mtimes_ns,
            lambda state, paths, fields: self._at(state, paths, fields),
            lambda record: replace(record, mtime_ns=mtimes_ns[record.path]),
        )

    def tag(self, ids: Iterable[str], add: Iterable[str] = (), remove: Iterable[str] = ()) -> int:
        add, remove = frozenset(add), frozenset(remove)
        check_tags(add)
        return self._rewrite(
            ids,
            lambda state, names, fields: self._by_id(state, names, fields),
            lambda record: replace(record, tags=(record.tags - remove) | add),
        )

    def report_bad(self, files: Iterable[BadFile]) -> None:
        latest = {file.path: file for file in files}

        def work(state: State) -> tuple[list[BadFile], Vectors, list[dict[str, Any]], None]:
            return list(latest.values()), self._none, [r for r in self._at(state, latest) if r["bad"]], None

        self._change(work)

    def clear_bad(self, paths: Iterable[str]) -> int:
        names = list(dict.fromkeys(paths))

        def work(state: State) -> tuple[list[Record], Vectors, list[dict[str, Any]], int]:
            old = [row for row in self._at(state, names) if row["bad"]]
            return [], self._none, old, len(old)

        return self._change(work)

    def _rewrite(
        self,
        names: Iterable[str],
        find: Callable[[State, list[str], list[str]], list[dict[str, Any]]],
        change: Callable[[Record], Record],
    ) -> int:
        """Milvus has no change of one field. One commit for each block: memory stays flat, and each image is whole."""

        def work(state: State) -> tuple[list[Record], Vectors, list[dict[str, Any]], int]:
            old = [row for row in find(state, block, [*FIELDS, "vector"]) if not row["bad"]]
            return [change(_record(row)) for row in old], self._matrix(old), old, len(old)

        rest, count = iter(dict.fromkeys(names)), 0
        while block := list(islice(rest, self._block)):
            count += self._change(work)
        return count if count else self._change(lambda _: ([], self._none, [], 0))

    def _change(
        self,
        work: Callable[[State], tuple[Sequence[Record | BadFile], Vectors, list[dict[str, Any]], _T]],
    ) -> _T:
        """What `work` says: new rows, their vectors, the rows that they replace, and the answer."""
        with self._server.changing() as state:
            new, vectors, old, answer = self._server.patiently(partial(work, state))
            if not new and not old:
                return answer
            rows = [
                _row(item, state.next + i, vectors[i] if isinstance(item, Record) else None, self.meta.dim)
                for i, item in enumerate(new)
            ]
            state = self._purged(state)
            for start in range(0, len(rows), self._block):
                self._server.insert(rows[start : start + self._block])
            images = state.images + sum(not row["bad"] for row in rows) - sum(not row["bad"] for row in old)
            state = replace(state, next=state.next + len(rows), images=images)
            self._server.commit(state.without([row["row"] for row in old]))
            return answer

    def _purged(self, state: State, least: int = PURGE_FROM) -> State:
        """Without the rows that have not counted for so long that nobody reads them any more: deleted for good."""
        now = time.time()
        due = [entry for entry in state.dead if now - entry[2] > GRACE]
        if len(due) < least:
            return state
        late = replace(state, time=self._server.now())
        for start in range(0, len(due), VALUES):
            part = due[start : start + VALUES]
            singles = ",".join(str(first) for first, last, _ in part if last == first + 1)
            several = [f"(row >= {first} and row < {last})" for first, last, _ in part if last > first + 1]
            condition = " or ".join([f"row in [{singles}]", *several])
            while keys := [row["key"] for row in self._page(late, f"({condition})", ["key"], LIMIT // 2)]:
                self._server.client.delete(self.address.name, ids=keys, timeout=self.address.timeout)
                late = replace(late, time=self._server.now())
        gone = set(due)
        return replace(state, dead=tuple(entry for entry in state.dead if entry not in gone), purged=state.purged + 1)

    # questions

    def get(self, ids: Sequence[str]) -> list[Record | None]:
        found = {r.id: r for r in map(_record, self._server.read(lambda state: self._by_id(state, ids, FIELDS)))}
        return [found.get(name) for name in ids]

    def find(self, paths: Sequence[str]) -> list[Record | None]:
        rows = self._server.read(lambda state: self._at(state, paths, FIELDS))
        found = {_path(row): _record(row) for row in rows if not row["bad"]}
        return [found.get(path) for path in paths]

    def by_sha256(self, sha256: str) -> list[Record]:
        condition = f"sha256 == {json.dumps(bytes.fromhex(sha256).hex())}"
        return [
            _record(row)
            for row in self._server.read(
                lambda state: list(self._pages(state, f"{condition} and {_images(state)}", FIELDS))
            )
        ]

    def records(
        self, where: Filter | None = None, after: str | None = None, limit: int | None = None
    ) -> Iterator[Record]:
        last = "" if after is None else path_bytes(after).hex() + "."  # behind every version of that path
        while limit is None or limit > 0:
            size = PAGE if limit is None else min(PAGE, limit)
            rows = self._server.read(partial(self._listed, where, size, last))
            yield from map(_record, rows)
            if len(rows) < size:
                return
            last = rows[-1]["key"]
            limit = None if limit is None else limit - size

    def _listed(self, where: Filter | None, size: int, last: str, state: State) -> list[dict[str, Any]]:
        return self._page(state, _images(state, where), FIELDS, size, last)

    def _listed_bad(self, last: str, state: State) -> list[dict[str, Any]]:
        return self._page(state, _bad(state), BAD_FIELDS, PAGE, last)

    def bad_files(self) -> Iterator[BadFile]:
        last = ""
        while True:
            rows = self._server.read(partial(self._listed_bad, last))
            yield from map(_bad_file, rows)
            if len(rows) < PAGE:
                return
            last = rows[-1]["key"]

    def vectors(self, ids: Sequence[str]) -> Vectors:
        names = list(dict.fromkeys(ids))
        rows = self._server.read(lambda state: self._by_id(state, names, ["id", "vector"]))
        place, matrix = {row["id"]: i for i, row in enumerate(rows)}, self._matrix(rows)
        if missing := [name for name in names if name not in place]:
            raise InputError(f"There is no image {missing[0]} in the index at {self.address.shown}: search again.")
        return matrix[[place[name] for name in ids]]

    def search(
        self, queries: Vectors, k: int, *, where: Filter | None = None, exact: bool | None = None
    ) -> SearchResult:
        queries = check_vectors(np.asarray(queries), self.meta.dim)
        if k < 1:
            raise InputError(f"k must be at least 1, not {k}.")
        found = self._server.read(lambda state: self._search(state, queries, min(k, state.images), where, bool(exact)))
        width = len(found[0].ids) if found else 0
        scores = np.array([best.scores for best in found], np.float32).reshape(len(found), width)
        return SearchResult(scores, [best.ids for best in found])

    # how a search is done

    def _search(self, state: State, queries: Vectors, k: int, where: Filter | None, exact: bool) -> list[_Best]:
        best = [_Best(query, k) for query in queries]
        rest, condition, flat = list(range(len(best) if k else 0)), _images(state, where), state.index == "FLAT"
        fetch = k + SPARE if flat or state.index == "HNSW" else 4 * k + 100  # product quantizers order roughly
        while rest and fetch <= LIMIT and (flat or not exact):
            step = max(1, HITS // fetch)
            parts = [rest[start : start + step] for start in range(0, len(rest), step)]
            rest = [row for part in parts for row in self._candidates(state, best, part, fetch, condition)]
            if rest and not flat:  # a graph gave less than was asked for: what passes the filter is scanned
                break
            fetch = LIMIT if fetch < LIMIT < 4 * fetch else 4 * fetch
        if rest:
            self._scan(state, [best[row] for row in rest], condition)
        if where in (None, Filter()) and any(len(one.ids) < k for one in best):  # committed rows are not there
            raise MilvusException(message="the collection is not fully loaded: it gives fewer images than it has")
        return best

    def _candidates(self, state: State, best: list[_Best], which: list[int], fetch: int, condition: str) -> list[int]:
        """Put what the server finds into `best`; return those for which that may not be all."""
        hits = self._server.client.search(
            self.address.name,
            data=np.stack([best[row].query for row in which]),
            limit=fetch,
            filter=condition,
            search_params={"metric_type": "IP", "params": _effort(state.index, fetch)},
            timeout=self.address.timeout,
            **_until(state),
        )
        flat, undone, near = state.index == "FLAT", [], {}
        for row, found in zip(which, hits, strict=True):
            k, raw = best[row].k, np.array(found.distances)
            # In a flat search others like the last one may have been left out; a graph may just find too few.
            done = len(raw) < fetch or raw[-1] < raw[k - 1] - SLACK if flat else len(raw) >= k
            if not done:
                undone.append(row)
            else:
                tied = raw >= raw[k - 1] - SLACK if flat and len(raw) > k else np.ones(len(raw), bool)
                near[row] = [key for key, keep in zip(found.ids, tied, strict=True) if keep]
        rows = self._by_key(state, {key for keys in near.values() for key in keys}, ["id", "vector"])
        place, matrix = {row["key"]: i for i, row in enumerate(rows)}, self._matrix(rows)
        ids = np.array([row["id"] for row in rows], "U32")
        for row, keys in near.items():
            chosen = [place[key] for key in keys]
            best[row].take(ids[chosen], matrix[chosen])
        return undone

    def _scan(self, state: State, best: list[_Best], condition: str) -> None:
        """Everything that passes, read and scored here: slow and exact."""
        last = ""
        while rows := self._page(state, condition, ["id", "vector"], self._block, last):
            last, matrix = rows[-1]["key"], self._matrix(rows)
            ids = np.array([row["id"] for row in rows], "U32")
            rough = np.stack([one.query for one in best]) @ matrix.T
            for one, scores in zip(best, rough, strict=True):
                near = scores >= one.least - SLACK
                one.take(ids[near], matrix[near])

    # rows

    def _query(
        self, state: State, condition: str, fields: list[str], limit: int | None = LIMIT
    ) -> list[dict[str, Any]]:
        """With a limit, Milvus counts a row once that it was sent twice, over a connection that broke."""
        options = {} if limit is None else {"limit": limit}
        return list(
            self._server.client.query(
                self.address.name,
                filter=condition,
                output_fields=fields,
                timeout=self.address.timeout,
                **options,
                **_until(state),
            )
        )

    def _page(
        self, state: State, condition: str, fields: list[str], size: int, after: str = ""
    ) -> list[dict[str, Any]]:
        """The first rows behind a key, in order. milvus-lite keeps no order: there all keys are read for it."""
        condition = f'{condition} and key > "{after}"'
        if not self.address.lite:
            return self._query(state, condition, fields, size)
        keys = sorted(row["key"] for row in self._query(state, condition, ["key"], None))
        return sorted(self._by_key(state, keys[:size], fields), key=lambda row: str(row["key"]))

    def _pages(self, state: State, condition: str, fields: list[str]) -> Iterator[dict[str, Any]]:
        size, last = self._block if "vector" in fields else PAGE, ""
        while rows := self._page(state, condition, fields, size, last):
            yield from rows
            last = rows[-1]["key"]

    def _in(
        self, state: State, field: str, values: Iterable[str | int], fields: list[str], condition: str
    ) -> list[dict[str, Any]]:
        found, size = list[dict[str, Any]](), self._block if "vector" in fields else VALUES
        rest = iter(values)
        while part := list(islice(rest, size)):
            found += self._query(state, f"{field} in {json.dumps(part)} and {condition}", fields)
        return found

    def _by_key(self, state: State, keys: Iterable[str], fields: list[str]) -> list[dict[str, Any]]:
        return self._in(state, "key", keys, fields, "row >= 0")

    def _by_id(self, state: State, ids: Iterable[str], fields: list[str]) -> list[dict[str, Any]]:
        names = dict.fromkeys(id_bytes(name).hex() for name in ids)
        return self._in(state, "id", names, [*fields, "bad"], _images(state))

    def _at(self, state: State, paths: Iterable[str], fields: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Rows of images and of bad files at these paths."""
        wanted = {path: _place(path) for path in paths}
        rows = self._in(state, "place", set(wanted.values()), ["key", "row", "bad", *fields], state.condition)
        return [row for row in rows if _path(row) in wanted]

    def _matrix(self, rows: list[dict[str, Any]]) -> Vectors:
        return np.array([row["vector"] for row in rows], np.float32).reshape(len(rows), self.meta.dim)

    @property
    def _none(self) -> Vectors:
        return np.empty((0, self.meta.dim), np.float32)

    # upkeep

    def snapshot(self, dest: str) -> None:
        """An embedded index. What is written meanwhile does not get in its way unless it is much."""

        def blocks(state: State) -> Iterator[tuple[list[Record], Vectors]]:
            rows = self._pages(state, _images(state), [*FIELDS, "vector"])
            while block := list(islice(rows, self._block)):
                yield list(map(_record, block)), self._matrix(block)
            if self._server.state().purged != state.purged:
                raise StoreError(f"The index at {self.address.shown} changed too much meanwhile: try again later.")

        with self._server.explained():
            state = self._server.state()
            bad = map(_bad_file, self._pages(state, _bad(state), BAD_FIELDS))
            copy_to_folder(dest, self.meta, blocks(state), bad)

    def verify(self) -> list[str]:
        try:
            return self._server.read(lambda state: list(self._problems(state)))
        except CoocError as error:
            return [str(error)]

    def _problems(self, state: State) -> Iterator[str]:
        count, before = 0, ""
        for row in self._pages(state, _images(state), [*FIELDS, "id", "crc", "vector"]):
            path = _path(row)
            if zlib.crc32(np.array(row["vector"], "<f4").tobytes()) != row["crc"]:
                yield f"{path!r}: the vector is damaged; remove the image and index it again"
            elif _record(row).id != row["id"]:
                yield f"{path!r}: the id does not fit content and path; remove the image and index it again"
            if path == before:
                yield f"{path!r}: there are two images of that path; remove it and index it again"
            count, before = count + 1, path
        if count != state.images:
            yield f"{count} images are kept, {state.images} are expected"

    def compact(self) -> None:
        with self._server.changing() as state:
            purged = self._purged(state, least=1)
            if purged is not state:
                state = self._server.commit(purged)
            index = self._wanted(state)
            if index != state.index:
                client, name = self._server.client, self.address.name
                client.flush(name)
                client.release_collection(name)
                client.drop_index(name, "vector")
                _build(self._server, index, self.meta.dim)
                self._server.commit(replace(state, index=index))
            elif purged is not state and not self.address.lite:
                self._server.client.compact(self.address.name)

    def _wanted(self, state: State) -> str:
        """The search structure for that many images. It is not taken back when there are a few less."""
        if self.address.index != "auto":
            return self.address.index.upper()
        if self.address.lite or state.images < HNSW_FROM:
            return state.index
        return "IVF_PQ" if state.images >= IVF_PQ_FROM else "HNSW" if state.index == "FLAT" else state.index

    def disk_bytes(self) -> None:
        """The server does not tell."""

    def close(self) -> None:
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Best:
    """The k best of what was seen, for one query: scored in float64, so that copies of a picture really tie."""

    def __init__(self, query: Vectors, k: int) -> None:
        self.query, self.k = query, k
        self._scores, self._ids = np.empty(0, np.float32), np.empty(0, "U32")

    @property
    def least(self) -> float:
        """What a score has to reach to matter."""
        return float(self._scores[-1]) if len(self._scores) == self.k else -np.inf

    @property
    def scores(self) -> Vectors:
        return self._scores

    @property
    def ids(self) -> list[str]:
        return [str(name) for name in self._ids]

    def take(self, ids: NDArray[np.str_], vectors: Vectors) -> None:
        scores = np.einsum("nd,d->n", vectors, self.query, dtype=np.float64).astype(np.float32)
        scores, ids = np.concatenate([self._scores, scores]), np.concatenate([self._ids, ids])
        order = np.lexsort((ids, -scores))[: self.k]
        self._scores, self._ids = scores[order], ids[order]


def _until(state: State) -> dict[str, Any]:
    """Consistency: an answer contains all that was written before the state was committed, and need not wait longer."""
    if not state.time:
        return {"consistency_level": "Strong"}
    return {"consistency_level": "Customized", "guarantee_timestamp": state.time}


def _effort(index: str, fetch: int) -> dict[str, int]:
    """How far to look. Of 5000 random vectors of 64 numbers, HNSW found 0.74 of the 10 nearest with ef 18, 0.95 with 50
    and all with 200. The others are not measured."""
    return {
        "FLAT": {},
        "HNSW": {"ef": min(32_768, max(200, 2 * fetch))},
        "IVF_PQ": {"nprobe": 128},
        "DISKANN": {"search_list": min(65_535, max(200, 2 * fetch))},
    }[index]


def _images(state: State, where: Filter | None = None) -> str:
    return f"{_matching(where)}bad == false and {state.condition}"


def _bad(state: State) -> str:
    return f"bad == true and {state.condition}"


def _matching(where: Filter | None) -> str:
    """`Filter.matches` as a condition. A tilde is after everything that a date holds."""
    clauses: list[str] = []
    if where is not None and where.folder:
        first, last = where.folder.hex(), (where.folder[:-1] + b"0").hex()  # "0" comes right after "/"
        clauses.append(f'folder == "{_folder(where.folder)}" and key >= "{first}" and key < "{last}"')
    if where is not None and where.taken_from is not None:
        clauses.append(f'taken >= "{where.taken_from}"')
    if where is not None and where.taken_to is not None:
        clauses.append(f'taken != "" and taken < "{where.taken_to}~"')
    for tag in sorted(where.tags) if where is not None else ():
        clauses.append(f"array_contains(tags, {json.dumps(tag, ensure_ascii=False)})")
    return "".join(f"{clause} and " for clause in clauses)


def _folder(path: bytes) -> str:
    return (path.partition(b"/")[0] if b"/" in path else b"").hex()


def _place(path: str) -> int:
    return int.from_bytes(hashlib.sha256(path_bytes(path)).digest()[:8], "big") >> 1


def _path(row: dict[str, Any]) -> str:
    return path_text(bytes.fromhex(row["key"].partition("-")[0]))


def _record(row: dict[str, Any]) -> Record:
    return Record(
        _path(row),
        size=row["size"],
        mtime_ns=row["mtime_ns"],
        sha256=row["sha256"],
        width=row["width"],
        height=row["height"],
        taken=row["taken"] or None,
        tags=frozenset(row["tags"]),
    )


def _bad_file(row: dict[str, Any]) -> BadFile:
    return BadFile(_path(row), row["size"], row["mtime_ns"], row["reason"])


def _row(item: Record | BadFile, number: int, vector: Vectors | None, dim: int) -> dict[str, Any]:
    path = path_bytes(item.path)
    if vector is None:
        vector = np.eye(1, dim, dtype=np.float32)[0]  # Milvus wants one in every row
    row = {
        "key": f"{path.hex()}-{number:016x}",
        "row": number,
        "folder": _folder(path),
        "place": _place(item.path),
        "size": item.size,
        "mtime_ns": item.mtime_ns,
        "crc": zlib.crc32(vector.astype("<f4").tobytes()),
        "vector": vector,
    }
    if isinstance(item, BadFile):
        reason = item.reason.encode("utf-8", "backslashreplace")[:REASON].decode("utf-8", "ignore")
        empty = {"id": "", "sha256": "", "taken": "", "width": 0, "height": 0, "tags": []}
        return row | empty | {"bad": True, "reason": reason}
    if len(path) > PATH or len(item.tags) > TAGS or any(len(tag.encode()) > TAG for tag in item.tags):
        raise InputError(
            f"{item.path!r} has a path or tags too long for Milvus: {PATH} bytes, {TAGS} tags of {TAG} bytes."
        )
    return row | {
        "id": item.id,
        "sha256": item.sha256,
        "taken": item.taken or "",
        "width": item.width,
        "height": item.height,
        "tags": sorted(item.tags),
        "bad": False,
        "reason": "",
    }
