"""Milvus, for more pictures than one machine holds: an index is a collection, and a file of milvus-lite to try it out.

**What a change guarantees.** Milvus has no transactions: a change comes about image by image. Each image is one row
(see `rows`), replaced by an upsert, so a reader sees it as it was or as it is, never a mixture. A call that is cut
short leaves some of its images changed and the others not; calling it again completes it. To this end `add` clears
reports of bad files first and kept tags last, `remove` keeps the tags before it deletes, and `rename` writes the new
paths before it deletes the old ones, a path that is both only after, or with, what was there. (Only where one image
takes another's place must who repeats a `rename` look which moves are left, as `cooc index` does.)
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cooc.index import effort
from cooc.index.checks import FEATURES_DAMAGED, VECTOR_DAMAGED, WRONG_ID, moving
from cooc.index.copying import copy_to_folder
from cooc.index.milvus import rows
from cooc.index.milvus.features import FeatureFiles, place
from cooc.index.milvus.rows import ALL, BAD, FORGOTTEN, IMAGE, PLAIN
from cooc.index.milvus.searching import EFFORT, KINDS, Structure, build, nearest
from cooc.index.milvus.server import Row, Server
from cooc.index.records import BadFile, Filter, Forgotten, Record, StoreMeta, given_back, long_ago, now, show
from cooc.index.store import PAGE, Block, Code, FeatureCount, SearchResult, Store, Vectors, blocks

NOTE = "cooc.note."  # properties of the collection
FEATURES = "cooc.features"  # another: engines of local features, and where these lie
REQUEST = 16 << 20  # bytes of vectors in one request
SAMPLE = 200  # images whose local features are measured to tell the size of all


class MilvusStore(Store):
    """`cooc.index.store.Store` in a collection of Milvus. Threads may share it."""

    _files: FeatureFiles  # where `meta.features` says that there are any

    def __init__(self, server: Server, meta: StoreMeta, features: Mapping[str, str]) -> None:
        self._server, self._meta, self.shown = server, meta, f"the index {server.place}"
        server.block = max(1, min(PAGE, REQUEST // (4 * meta.dim)))
        if features:
            self._with_features(features["engines"], features["at"])

    def _with_features(self, engines: str, at: str) -> None:
        self._files, self._meta = FeatureFiles(place(self._server.address, at)), replace(self._meta, features=engines)

    def __len__(self) -> int:
        return self._server.count(rows.images())

    # changes

    def add_all(self, blocks: Iterable[Block]) -> int:
        """All blocks are looked at before the first is written."""
        blocks = list(blocks) if iter(blocks) is blocks else blocks  # it is walked twice
        for block in blocks:
            self._rows(block)
        with self._server.writing():
            return sum(self._add(*self._rows(block)) for block in blocks)

    def _rows(self, block: Block) -> tuple[list[Row], dict[str, bytes]]:
        records, vectors, codes = self._checked(block)
        return [rows.of_record(*pair) for pair in zip(records, vectors, strict=True)], codes

    def _add(self, new: list[Row], codes: dict[str, bytes]) -> int:
        found = self._at(IMAGE + BAD, map(rows.path, new))
        had = {rows.path(row): frozenset(row["tags"]) for row in found if row["image"]}
        alike = list(self._alike({row["sha256"] for row in new}))
        kept = (rows.forgotten(row) for row in alike if not row["image"])
        tagged, used = given_back(map(rows.record, new), kept, had)
        if codes:
            self._files.write(codes)
        there = codes.keys() | {row["sha256"] for row in alike if row["text"] == rows.FEATURES}
        changed = [
            rows.of_record(one, row["vector"], row["crc"], rows.FEATURES * (one.sha256 in there))
            for one, row in zip(tagged, new, strict=True)
        ]
        self._server.delete(row["key"] for row in found if not row["image"])
        self._server.upsert(changed)
        self._server.delete(rows.key(FORGOTTEN, path, sha256) for sha256, path in used)
        return len(new)

    def remove(self, paths: Iterable[str]) -> int:
        with self._server.writing():
            gone = self._at(IMAGE, paths)
            self._remember(gone)
            return self._server.delete(row["key"] for row in gone)

    def rename(self, moves: Mapping[str, str]) -> int:
        wanted = moving(moves)
        with self._server.writing():
            found = {rows.path(row): row for row in self._at(IMAGE, wanted, ALL)}
            before = {new: old for old, new in wanted.items() if old in found}
            moved = {old: _changed(found[old], path=new) for new, old in before.items()}
            ends, ids = before.keys() - found.keys(), {row["id"] for row in moved.values()}
            self._remember(row for row in self._at(IMAGE, ends) if row["id"] not in ids)
            left, order = dict(before), list[Row]()
            for path in ends:  # a chain from its end: no path is written over before it was moved
                while path := left.pop(path, ""):
                    order.append(moved[path])
            self._server.upsert(order)
            self._server.upsert([moved[old] for old in left.values()], len(left))  # rings have no end: all at once
            self._server.delete(rows.key(IMAGE, old) for old in found.keys() - before.keys())
            return len(moved)

    def touch(self, mtimes_ns: Mapping[str, int]) -> int:
        keys = [rows.key(IMAGE, path) for path in mtimes_ns]
        return self._rewrite("key", keys, lambda row: _changed(row, mtime_ns=mtimes_ns[rows.path(row)]))

    def _tag(self, ids: list[bytes], add: frozenset[str], remove: frozenset[str]) -> int:
        names = (name.hex() for name in ids)
        return self._rewrite("id", names, lambda row: _changed(row, tags=frozenset(row["tags"]) - remove | add))

    def _rewrite(self, field: str, values: Iterable[str], change: Callable[[Row], Row]) -> int:
        """Milvus has no change of one field."""
        with self._server.writing():
            return self._server.upsert(map(change, self._server.find(field, values, ALL)))

    def report_bad(self, files: Iterable[BadFile]) -> None:
        latest = {file.path: file for file in files}
        with self._server.writing():
            known = {f.path: f.since for f in map(rows.bad_file, self._at(BAD, latest))}
            news = [replace(file, since=known.get(path) or file.since or now()) for path, file in latest.items()]
            self._server.upsert(rows.of_bad(file, self.meta.dim) for file in news)

    def clear_bad(self, paths: Iterable[str]) -> int:
        with self._server.writing():
            return self._server.delete(row["key"] for row in self._at(BAD, paths))

    def note(self, name: str, value: Any | None) -> None:
        with self._server.writing():
            self._server.put({NOTE + name: json.dumps(value)})

    def remember(self, tags: Iterable[Forgotten]) -> None:
        with self._server.writing():
            self._server.upsert(rows.of_forgotten(one, self.meta.dim) for one in tags)

    def _remember(self, gone: Iterable[Row]) -> None:
        removed = now()
        self.remember(Forgotten(r.sha256, r.path, r.tags, removed) for r in map(rows.record, gone) if r.tags)

    def _set_engines(self, engines: str) -> None:
        at = place(self._server.address)
        with self._server.writing():
            self._server.put({FEATURES: json.dumps({"engines": engines, "at": at})})
        self._with_features(engines, at)

    def _set_features(self, codes: Mapping[str, bytes]) -> None:
        with self._server.writing():
            if codes:
                self._files.write(codes)
            unmarked = [row["key"] for row in self._alike(codes) if row["image"] and row["text"] != rows.FEATURES]
            self._rewrite("key", unmarked, lambda row: row | {"text": rows.FEATURES})

    # questions

    def _at(self, kinds: str, paths: Iterable[str], fields: list[str] = PLAIN) -> list[Row]:
        return list(self._server.find("key", (rows.key(kind, path) for path in paths for kind in kinds), fields))

    def _alike(self, contents: Iterable[str]) -> Iterator[Row]:
        """Images of these contents, and tags kept of such: there may be any number of copies."""
        for part in blocks(contents, PAGE):
            yield from self._server.rows(f"sha256 in {json.dumps(part)}", PLAIN)

    def _images(self, field: str, values: list[bytes]) -> Iterable[Record]:
        name, kind = ("id", "") if field == "id" else ("key", IMAGE)
        return map(rows.record, self._server.find(name, (kind + value.hex() for value in values), PLAIN))

    def by_sha256(self, sha256: str) -> list[Record]:
        return [rows.record(row) for row in self._alike([bytes.fromhex(sha256).hex()]) if row["image"]]

    def records(
        self, where: Filter | None = None, after: str | None = None, limit: int | None = None
    ) -> Iterator[Record]:
        last = "" if after is None else rows.key(IMAGE, after)
        found = self._server.rows(rows.images(where), PLAIN, last, PAGE if limit is None else max(1, limit))
        return map(rows.record, itertools.islice(found, limit))

    def bad_files(self) -> Iterator[BadFile]:
        return map(rows.bad_file, self._server.rows(rows.of_kind(BAD), PLAIN))

    def forgotten(self) -> Iterator[Forgotten]:
        return map(rows.forgotten, self._server.rows(rows.of_kind(FORGOTTEN), PLAIN))

    def notes(self) -> dict[str, Any]:
        found = {name: json.loads(text) for name, text in self._server.properties().items() if name.startswith(NOTE)}
        return {name.removeprefix(NOTE): value for name, value in found.items() if value is not None}

    def damaged(self) -> Iterator[str]:
        return (rows.path(row) for row in self._server.rows(rows.images(), ALL) if rows.vector(row) is None)

    def _vectors(self, ids: set[bytes]) -> dict[str, tuple[str, Vectors | None]]:
        found = self._server.find("id", (name.hex() for name in ids), ALL)
        return {row["id"]: (rows.path(row), rows.vector(row)) for row in found}

    def _codes(self, ids: set[bytes]) -> Iterator[Code]:
        found = self._server.find("id", (name.hex() for name in ids), PLAIN)
        marked = [row for row in found if row["text"] == rows.FEATURES]
        codes = self._files.read(row["sha256"] for row in marked)
        return (Code(row["id"], rows.path(row), codes[row["sha256"]]) for row in marked)

    def without_features(self, *, check: bool = False) -> Iterator[Record]:
        yield from map(rows.record, self._server.rows(rows.with_features(False), PLAIN))
        if check:
            yield from self._features_damaged()

    def _features_damaged(self) -> Iterator[Record]:
        for block in blocks(map(rows.record, self._server.rows(rows.with_features(), PLAIN)), PAGE // 10):
            codes = self._files.read(one.sha256 for one in block)
            yield from (one for one in block if codes[one.sha256] is None)

    def _count_features(self) -> FeatureCount:
        """Of many images the bytes are estimated from some: the store does not tell them, and reading takes long."""
        images = self._server.count(rows.with_features())
        some = itertools.islice(self._server.rows(rows.with_features(), ["key", "sha256"], limit=SAMPLE), SAMPLE)
        sizes = [len(code or b"") for code in self._files.read(row["sha256"] for row in some).values()]
        return FeatureCount(images, sum(sizes) if images <= SAMPLE else round(sum(sizes) / len(sizes) * images))

    def _search(
        self, queries: Vectors, k: int, where: Filter | None, exact: bool | None, structure: Structure | None = None
    ) -> SearchResult:
        structure = structure or Structure.of(self._server)
        best, damaged = nearest(self._server, structure, rows.images(where), queries, k, bool(exact))
        self._left_out(damaged)
        width = min(map(len, best), default=0)
        scores = np.array([[-score for score, _ in hits[:width]] for hits in best], np.float32)
        return SearchResult(scores.reshape(len(best), width), [[name for _, name in hits[:width]] for hits in best])

    # upkeep

    def snapshot(self, dest: str) -> None:
        """An embedded index. Each image is whole; what is changed meanwhile may be in it or not."""
        copy_to_folder(dest, self)

    def _problems(self) -> Iterator[str]:
        yield from (f"{show(path)}: {VECTOR_DAMAGED}" for path in self.damaged())
        named = ((row["id"], rows.record(row)) for row in self._server.rows(rows.images(), PLAIN))
        yield from (f"{show(one.path)}: {WRONG_ID}" for name, one in named if name != one.id)
        yield from (f"{show(one.path)}: {FEATURES_DAMAGED}" for one in self._features_damaged())

    def compact(self) -> None:
        with self._server.writing():
            self._server.change("delete", filter=f'{rows.of_kind(FORGOTTEN)} and text < "{long_ago()}"')
            for block in blocks(self._files.contents(), PAGE) if self.meta.features else ():
                self._files.remove(set(block) - {row["sha256"] for row in self._alike(block) if row["image"]})
            now = Structure.of(self._server)
            if (kind := now.wanted(self._server, len(self))) != now.kind:
                self._change_structure(now, kind)
            elif not self._server.address.lite:
                self._server.ask("compact")

    def _change_structure(self, now: Structure, kind: str) -> None:
        """The new one is to find what the one before it finds. Searching has to wait meanwhile."""
        share = min(1.0, 2 * effort.SAMPLE / max(1, len(self)))  # ids are as good as random
        some = self._server.rows(f'{rows.images()} and id < "{int(share * 0xFFFFFFFF):08x}~"', ALL, limit=effort.SAMPLE)
        sound = [one for one in map(rows.vector, itertools.islice(some, effort.SAMPLE)) if one is not None]
        queries = effort.views(np.array(sound).reshape(-1, self.meta.dim))

        def search(structure: Structure) -> list[list[str]]:
            return self._search(queries, effort.NEIGHBOURS, None, False, structure).ids

        expected = search(now)
        self._server.ask("flush", timeout=None)
        self._server.ask("release_collection")
        self._server.ask("drop_index", "vector")
        build(self._server, kind, self.meta.dim)
        level = effort.least(KINDS[kind].efforts, expected, lambda level: search(Structure(kind, level)))
        self._server.put({EFFORT: str(level)})

    def disk_bytes(self) -> None:
        """The server does not tell."""

    def close(self) -> None:
        self._server.close()


def _changed(row: Row, **fields: Any) -> Row:
    """An image with another path, time or tags. The crc stays: a damaged vector is still known as one."""
    return rows.of_record(replace(rows.record(row), **fields), row["vector"], row["crc"], row["text"])
