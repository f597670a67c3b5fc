"""Milvus, for more pictures than one machine holds: an index is a collection, and a file of milvus-lite to try it out.

**What a change guarantees.** Milvus has no transactions: a change comes about image by image. Each image is one row
(see `rows`), replaced by an upsert, so a reader sees it as it was or as it is, never a mixture. A call that is cut
short leaves some of its images changed and the others not; calling it again completes it. To this end `add` clears
reports of bad files first and kept tags last, `remove` keeps the tags before it deletes, and `rename` writes the new
paths before it deletes the old ones, a path that is both only after, or with, what was there. (Only where one image
takes another's place must who repeats a `rename` look which moves are left, as `cooc index` does.)

Searching is exact until `compact` finds the index large enough for another structure (see `structures`). Whatever finds
candidates, they are scored again from their vectors: a score depends on the two vectors only.
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
from cooc.index.milvus import rows, structures
from cooc.index.milvus.features import FeatureFiles, nowhere, place
from cooc.index.milvus.rows import ALL, BAD, FORGOTTEN, IMAGE, PLAIN
from cooc.index.milvus.searching import Search
from cooc.index.milvus.server import LIMIT, Row, Server
from cooc.index.milvus.structures import Structure
from cooc.index.records import BadFile, Filter, Forgotten, Record, StoreMeta, given_back, long_ago, now, show
from cooc.index.store import PAGE, Block, Code, FeatureCount, SearchResult, Store, Vectors, blocks

NOTE = "cooc.note."  # properties of the collection
REQUEST = 16 << 20  # bytes of vectors in one request
SAMPLE = 200  # images whose local features are measured to tell the size of all
FEATURES = "cooc.features"  # property of the collection: engines of local features, and where these lie


class MilvusStore(Store):
    """`cooc.index.store.Store` in a collection of Milvus. Threads may share it."""

    _files: FeatureFiles  # where `meta.features` says that there are any

    def __init__(self, server: Server, meta: StoreMeta, features: Mapping[str, str]) -> None:
        self._server, self.shown = server, f"the index {server.address.place}"
        self._block = max(1, min(PAGE, REQUEST // (4 * meta.dim)))  # vectors in one request
        self._meta = meta
        if features:
            self._with_features(features["engines"], features["at"])

    def _with_features(self, engines: str, at: str) -> None:
        self._files = FeatureFiles(place(self._server.address, at))
        self._meta = replace(self._meta, features=engines)

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

    def _rows(self, block: Block) -> tuple[dict[str, Row], dict[str, bytes]]:
        records, vectors, codes = self._checked(block)
        return {r.path: rows.image_row(r, vector) for r, vector in zip(records, vectors, strict=True)}, codes

    def _add(self, new: dict[str, Row], codes: dict[str, bytes]) -> int:
        contents, before = {row["sha256"] for row in new.values()}, self._at(IMAGE, new)
        had = {rows.path(row): frozenset(row["tags"]) for row in before}
        kept = self._in("sha256", contents, rows.of_kind(FORGOTTEN))
        tagged, used = given_back(map(rows.record, new.values()), map(rows.forgotten, kept), had)
        changed = [rows.fitting(row | {"tags": sorted(r.tags)}) for row, r in zip(new.values(), tagged, strict=True)]
        if self.meta.features:
            self._files.write({sha256: code for sha256, code in codes.items() if sha256 in contents})
            there = codes.keys() | {row["sha256"] for row in self._in("sha256", contents, rows.with_features())}
            changed = [row | {"text": rows.FEATURES * (row["sha256"] in there)} for row in changed]
        self._delete(row["key"] for row in self._at(BAD, new))
        self._upsert(changed)
        self._delete(rows.key(FORGOTTEN, path, sha256) for sha256, path in used)
        self._drop_unused(row["sha256"] for row in before)
        return len(new)

    def _drop_unused(self, contents: Iterable[str]) -> None:
        """Their features, if no image has that content."""
        if self.meta.features and (wanted := set(contents)):
            self._files.remove(wanted - {row["sha256"] for row in self._in("sha256", wanted, rows.images())})

    def remove(self, paths: Iterable[str]) -> int:
        with self._server.writing():
            gone = self._at(IMAGE, paths)
            self._remember(gone)
            count = self._delete(row["key"] for row in gone)
            self._drop_unused(row["sha256"] for row in gone)
            return count

    def rename(self, moves: Mapping[str, str]) -> int:
        wanted = moving(moves)
        with self._server.writing():
            found = {rows.path(row): row for row in self._at(IMAGE, wanted, ALL)}
            moves = {old: new for old, new in wanted.items() if old in found}
            moved = {old: rows.moved(found[old], new) for old, new in moves.items()}
            news, ids = set(moves.values()), {row["id"] for row in moved.values()}
            gone = [row for row in self._at(IMAGE, news - set(moves)) if row["id"] not in ids]
            self._remember(gone)
            for part in _in_turn(moves):
                self._upsert(moved[old] for old in part)
            self._delete(rows.key(IMAGE, old) for old in set(moves) - news)
            self._drop_unused(row["sha256"] for row in gone)
            return len(moves)

    def touch(self, mtimes_ns: Mapping[str, int]) -> int:
        keys = [rows.key(IMAGE, path) for path in mtimes_ns]
        return self._rewrite("key", keys, lambda row: {"mtime_ns": mtimes_ns[rows.path(row)]})

    def _tag(self, ids: list[bytes], add: frozenset[str], remove: frozenset[str]) -> int:
        return self._rewrite(
            "id", (name.hex() for name in ids), lambda row: {"tags": sorted(set(row["tags"]) - remove | add)}
        )

    def _rewrite(self, field: str, values: Iterable[str], change: Callable[[Row], Row], condition: str = "") -> int:
        """Milvus has no change of one field. The crc stays: a damaged vector is still known as one."""
        count = 0
        with self._server.writing():
            for block in blocks(dict.fromkeys(values), self._block):
                changed = [rows.fitting(row | change(row)) for row in self._in(field, block, condition, ALL)]
                self._upsert(changed)
                count += len(changed)
        return count

    def report_bad(self, files: Iterable[BadFile]) -> None:
        latest = {file.path: file for file in files}
        with self._server.writing():
            known = {f.path: f.since for f in map(rows.bad_file, self._at(BAD, latest))}
            news = [replace(file, since=known.get(path) or file.since or now()) for path, file in latest.items()]
            self._upsert(rows.bad_row(file, self.meta.dim) for file in news)

    def clear_bad(self, paths: Iterable[str]) -> int:
        with self._server.writing():
            return self._delete(row["key"] for row in self._at(BAD, paths))

    def note(self, name: str, value: Any | None) -> None:
        with self._server.writing():
            self._server.put({NOTE + name: json.dumps(value)})

    def remember(self, tags: Iterable[Forgotten]) -> None:
        with self._server.writing():
            self._upsert(rows.forgotten_row(one, self.meta.dim) for one in tags)

    def _remember(self, gone: Iterable[Row]) -> None:
        removed, records = now(), map(rows.record, gone)
        self.remember(Forgotten(r.sha256, r.path, r.tags, removed) for r in records if r.tags)

    def _set_engines(self, engines: str) -> None:
        at = place(self._server.address)
        if not at:
            raise nowhere(self._server.address)
        with self._server.writing():
            self._server.put({FEATURES: json.dumps({"engines": engines, "at": at})})
        self._with_features(engines, at)

    def _set_features(self, codes: Mapping[str, bytes]) -> None:
        with self._server.writing():
            if codes:
                self._files.write(codes)
                self._rewrite("sha256", codes, lambda _: {"text": rows.FEATURES}, rows.with_features(False))

    def _upsert(self, changed: Iterable[Row]) -> None:
        for block in blocks(changed, self._block):
            self._server.change("upsert", data=block)

    def _delete(self, keys: Iterable[str]) -> int:
        keys = list(keys)
        for block in blocks(keys, PAGE):
            self._server.change("delete", ids=block)
        return len(keys)

    # questions

    def _images(self, field: str, values: list[bytes]) -> Iterable[Record]:
        names = [value.hex() if field == "id" else IMAGE + value.hex() for value in values]
        return map(rows.record, self._in("id" if field == "id" else "key", names, rows.images()))

    def by_sha256(self, sha256: str) -> list[Record]:
        condition = f"sha256 == {json.dumps(bytes.fromhex(sha256).hex())} and {rows.images()}"
        return list(map(rows.record, self._server.pages(condition, PLAIN, PAGE)))

    def records(
        self, where: Filter | None = None, after: str | None = None, limit: int | None = None
    ) -> Iterator[Record]:
        last = "" if after is None else rows.key(IMAGE, after)
        size = PAGE if limit is None else max(1, min(PAGE, limit))
        return map(rows.record, itertools.islice(self._server.pages(rows.images(where), PLAIN, size, last), limit))

    def bad_files(self) -> Iterator[BadFile]:
        return map(rows.bad_file, self._server.pages(rows.of_kind(BAD), PLAIN, PAGE))

    def notes(self) -> dict[str, Any]:
        found = {name: json.loads(text) for name, text in self._server.properties().items() if name.startswith(NOTE)}
        return {name.removeprefix(NOTE): value for name, value in found.items() if value is not None}

    def forgotten(self) -> Iterator[Forgotten]:
        return map(rows.forgotten, self._server.pages(rows.of_kind(FORGOTTEN), PLAIN, PAGE))

    def damaged(self) -> Iterator[str]:
        found = self._server.pages(rows.images(), ALL, self._block)
        return (rows.path(row) for row in found if rows.vector(row) is None)

    def _vectors(self, ids: set[bytes]) -> dict[str, tuple[str, Vectors | None]]:
        found = self._in("id", (name.hex() for name in ids), rows.images(), ALL)
        return {row["id"]: (rows.path(row), rows.vector(row)) for row in found}

    def _codes(self, ids: set[bytes]) -> Iterator[Code]:
        marked = self._in("id", (name.hex() for name in ids), rows.with_features())
        codes = self._files.read(row["sha256"] for row in marked)
        return (Code(row["id"], rows.path(row), codes[row["sha256"]]) for row in marked)

    def without_features(self, *, check: bool = False) -> Iterator[Record]:
        yield from map(rows.record, self._server.pages(rows.with_features(False), PLAIN, PAGE))
        if check:
            for block in blocks(self._server.pages(rows.with_features(), PLAIN, PAGE), PAGE // 10):
                yield from map(rows.record, self._features_damaged(block))

    def _features_damaged(self, block: list[Row]) -> Iterator[Row]:
        marked = [row for row in block if row["text"] == rows.FEATURES]
        codes = self._files.read(row["sha256"] for row in marked) if marked else {}
        return (row for row in marked if codes[row["sha256"]] is None)

    def _count_features(self) -> FeatureCount:
        """Of many images the bytes are estimated from some: the store does not tell them, and reading takes long."""
        images = self._server.count(rows.with_features())
        some = self._server.query(rows.with_features(), ["sha256"], limit=SAMPLE)
        sizes = [len(code or b"") for code in self._files.read(row["sha256"] for row in some).values()]
        return FeatureCount(images, sum(sizes) if images <= SAMPLE else round(sum(sizes) / len(sizes) * images))

    def _in(self, field: str, values: Iterable[str], condition: str = "", fields: list[str] = PLAIN) -> list[Row]:
        parts = blocks(dict.fromkeys(values), self._block if fields is ALL else PAGE)
        asked = (f"{field} in {json.dumps(part)}" + (f" and {condition}" if condition else "") for part in parts)
        return [row for one in asked for row in self._server.query(one, fields, limit=LIMIT)]

    def _at(self, kind: str, paths: Iterable[str], fields: list[str] = PLAIN) -> list[Row]:
        return self._in("key", (rows.key(kind, path) for path in paths), fields=fields)

    def _search(
        self, queries: Vectors, k: int, where: Filter | None, exact: bool | None, structure: Structure | None = None
    ) -> SearchResult:
        structure = structure or structures.current(self._server)
        search = Search(self._server, structure, rows.images(where), self._block)
        best = search.nearest(queries, k, bool(exact))
        self._left_out(len(search.damaged))
        width = min((len(ids) for _, ids in best), default=0)
        scores = np.array([scores[:width] for scores, _ in best], np.float32).reshape(len(best), width)
        return SearchResult(scores, [ids[:width].tolist() for _, ids in best])

    # upkeep

    def snapshot(self, dest: str) -> None:
        """An embedded index. Each image is whole; what is changed meanwhile may be in it or not."""
        copy_to_folder(dest, self)

    def _problems(self) -> Iterator[str]:
        for block in blocks(self._server.pages(rows.images(), ALL, self._block), self._block):
            for row in block:
                if rows.vector(row) is None:
                    yield f"{show(rows.path(row))}: {VECTOR_DAMAGED}"
                elif rows.record(row).id != row["id"]:
                    yield f"{show(rows.path(row))}: {WRONG_ID}"
            yield from (f"{show(rows.path(row))}: {FEATURES_DAMAGED}" for row in self._features_damaged(block))

    def compact(self) -> None:
        server = self._server
        with server.writing():
            server.change("delete", filter=f'{rows.of_kind(FORGOTTEN)} and text < "{long_ago()}"')
            for block in blocks(self._files.contents(), PAGE) if self.meta.features else ():
                self._drop_unused(block)
            now = structures.current(server)
            if (kind := structures.wanted(server, len(self), now.kind)) != now.kind:
                self._change_structure(now, kind)
            elif not server.address.lite:
                server.ask("compact")

    def _change_structure(self, now: Structure, kind: str) -> None:
        """The new one is to find what the one before it finds."""
        share = min(1.0, 2 * effort.SAMPLE / max(1, len(self)))  # ids are as good as random
        condition = f'{rows.images()} and id < "{int(share * 0xFFFFFFFF):08x}~"'
        sound = map(rows.vector, self._server.query(condition, ALL, limit=effort.SAMPLE))
        queries = effort.views(np.array([one for one in sound if one is not None]).reshape(-1, self.meta.dim))
        expected = self._search(queries, effort.NEIGHBOURS, None, False, now).ids
        structures.replace(self._server, kind, self.meta.dim)
        level = effort.least(
            structures.KINDS[kind].efforts,
            expected,
            lambda level: self._search(queries, effort.NEIGHBOURS, None, False, Structure(kind, level)).ids,
        )
        self._server.put({structures.EFFORT: str(level)})

    def disk_bytes(self) -> None:
        """The server does not tell."""

    def close(self) -> None:
        self._server.close()


def _in_turn(moves: Mapping[str, str]) -> list[list[str]]:
    """Old paths to be moved one after another, so that none is written over before it was moved; rings go at once."""
    before, parts, seen = {new: old for old, new in moves.items()}, [list[str]()], set[str]()
    for old in sorted(moves, key=lambda old: moves[old] in moves):  # first those that end a chain
        if old not in seen and moves[old] in moves:
            parts.append([])
        while old in moves and old not in seen:
            seen.add(old)
            parts[-1].append(old)
            old = before.get(old, "")
    return parts
