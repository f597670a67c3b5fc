"""What goes in and out, as OpenAPI shows it."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any, Literal

from fastapi import Path, Query
from pydantic import BaseModel, ConfigDict, Field

from cooc.explanation.shares import Explanation, Shares
from cooc.index.shortlist import Match, Results
from cooc.index.store import Filter, Record
from cooc.index.sync import Report
from cooc.pictures.boxes import Box

__all__ = [
    "DEEPEST",
    "PREFIX",
    "BoxQuery",
    "Expansion",
    "ImageId",
    "Limit",
    "Reranking",
    "SearchOptions",
    "Where",
    "WhereQuery",
    "problems",
]

PREFIX = "/api/v1"
Expansion = Literal["none", "average", "alpha"]
Reranking = Literal["none", "k-reciprocal", "diffusion", "superglobal"]
DEEPEST = 10_000  # results that can be scrolled to

_ID = r"^[0-9a-f]{32}$"
_BOX = r"^(-?\d{1,6}(\.\d{1,6})?)(,-?\d{1,6}(\.\d{1,6})?){3}$"
_DATE = r"^\d{4}(-\d\d(-\d\d)?)?$"
ImageId = Annotated[str, Path(pattern=_ID, description="The id of a picture, as in results.")]
BoxQuery = Annotated[
    str | None, Query(pattern=_BOX, description="x0,y0,x1,y1 in pixels of the upright, full-size picture.")
]


class Side(IntEnum):
    """Sizes of thumbnails: a few, so that they can be kept."""

    SMALL, MEDIUM, LARGE, SCREEN = 160, 320, 640, 1280


class Where(BaseModel):
    """Which pictures count."""

    folder: str | None = Field(
        default=None, max_length=1000, description="This folder of the collection, and all below it."
    )
    taken_from: str | None = Field(
        default=None, pattern=_DATE, description="Taken then or later: 2023, 2023-07, 2023-07-14."
    )
    taken_to: str | None = Field(
        default=None, pattern=_DATE, description="Taken then or before, the named time included."
    )
    tag: list[str] = Field(default=[], max_length=20, description="With all of these tags.")

    def filter(self) -> Filter | None:
        where = Filter(self.folder, self.taken_from, self.taken_to, frozenset(self.tag))
        return None if where == Filter() else where


class SearchOptions(Where):
    k: int = Field(default=20, ge=1, le=200, description="Results in one answer.")
    offset: int = Field(
        default=0, ge=0, le=DEEPEST, description="Results before them: `next_offset` of the last answer."
    )
    expand: Expansion = Field(default="none", description="Search again with the query and its best results joined.")
    rerank: Reranking = Field(default="none", description="Re-rank the best 400 results.")
    augment: bool = Field(default=False, description="Compare with the neighbours of each result, too.")
    min_score: float | None = Field(default=None, ge=-1, le=1, description="Leave out what is less similar.")


class Out(BaseModel):
    model_config = ConfigDict(json_schema_serialization_defaults_required=True)


class Picture(Out):
    id: str
    path: str = Field(description="Relative to the root of the collection; to be shown, not to ask with.")
    width: int
    height: int
    taken: str | None = Field(description="Date or date and time, from the camera.")
    tags: list[str]

    @classmethod
    def of(cls, record: Record) -> Picture:
        return cls(**_picture(record))


def _picture(record: Record) -> dict[str, Any]:
    size = {"width": record.width, "height": record.height}
    return {"id": record.id, "path": shown(record.path), "taken": record.taken, "tags": sorted(record.tags), **size}


class MatchOut(Picture):
    score: float = Field(description="Similarity, the inner product with the query: 1 is the same picture.")
    verified: bool = Field(description="False: merely similar, nothing but the vectors was compared.")
    probability: float | None = Field(
        description="Of an unverified result: how often one with such a score was right among the pictures that the "
        "index's calibration was fitted on, which need not be like these. null without a calibration."
    )

    @classmethod
    def found(cls, match: Match) -> MatchOut:
        return cls(**_picture(match.record), score=match.score, verified=match.verified, probability=match.probability)


class ResultsOut(Out):
    matches: list[MatchOut] = Field(description="Most similar first, or as re-ranking orders them.")
    no_match: bool = Field(description="By its probability, even the best result is more likely another thing.")
    next_offset: int | None = Field(description="Where the next results begin; null if these were the last.")
    seconds: float

    @classmethod
    def of(cls, results: Results, options: SearchOptions) -> ResultsOut:
        matches = [MatchOut.found(match) for match in results.matches]
        following = options.offset + options.k
        more = len(matches) == options.k and following <= DEEPEST
        return cls(
            matches=matches,
            no_match=results.no_match,
            next_offset=following if more else None,
            seconds=results.seconds,
        )


class PicturesOut(Out):
    pictures: list[Picture] = Field(description="In the order of their paths.")
    next_after: str | None = Field(description="`after` for the next ones; null if these were the last.")


class FoldersOut(Out):
    folders: list[str] = Field(description="Directly below the one asked for.")
    complete: bool = Field(description="False: there are more.")


class GroupsOut(Out):
    groups: list[list[Picture]]
    complete: bool = Field(description="False: there are more.")


class SharesOut(Out):
    map: list[list[float]] = Field(description="Rows of cells. Their sum is the score.")
    region: tuple[float, float, float, float] = Field(description="The box that the map covers, in equal cells.")
    box: tuple[float, float, float, float] | None = Field(description="Where most of the score comes from.")

    @classmethod
    def of(cls, shares: Shares) -> SharesOut:
        return cls(map=shares.map.tolist(), region=_box(shares.region), box=shares.box and _box(shares.box))


def _box(box: Box) -> Box:
    x0, y0, x1, y1 = (round(n, 2) for n in box)
    return x0, y0, x1, y1


class ExplanationOut(Out):
    score: float
    exact: bool = Field(description="False: shares by the derivative, since the pooling is no sum over positions.")
    query: SharesOut
    match: SharesOut

    @classmethod
    def of(cls, why: Explanation) -> ExplanationOut:
        return cls(score=why.score, exact=why.exact, query=SharesOut.of(why.query), match=SharesOut.of(why.match))


class StatusOut(Out):
    name: str = Field(description="Name of the collection's folder.")
    images: int
    bad: int = Field(description="Files that could not be read.")
    recipe: str
    dim: int
    calibrated: bool = Field(description="Do results have a probability, and can `no_match` be told?")
    folders: list[str] = Field(description="Folders that may be indexed by request.")
    version: str


class Folder(BaseModel):
    folder: str = Field(
        default="", max_length=1000, description="Relative to the root of the collection; empty is all of it."
    )


class IndexingOut(Out):
    state: Literal["idle", "running", "stopping", "done", "stopped", "failed"]
    folder: str | None = None
    total: int | None = Field(default=None, description="Pictures there are; null until they have been counted.")
    done: int = 0
    described: int = 0
    unchanged: int = 0
    moved: int = 0
    removed: int = 0
    bad: int = 0
    seconds: float = 0.0
    message: str | None = Field(default=None, description="What went wrong, or what was not done.")

    def progressed(self, report: Report) -> IndexingOut:
        names = ("total", "done", "described", "unchanged", "moved", "removed", "bad", "seconds")
        notes = "\n".join(report.notes) or None
        return self.model_copy(update={**{name: getattr(report, name) for name in names}, "message": notes})


class Login(BaseModel):
    token: str = Field(max_length=1000)


class Health(Out):
    status: Literal["ok"] = "ok"


class Problem(BaseModel):
    detail: str = Field(description="What was wrong, and how to repair it.")


def shown(path: str) -> str:
    """A path that JSON can hold: names that are not UTF-8 lose what cannot be shown."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def problems(*codes: int) -> dict[int | str, dict[str, Any]]:
    """401, 403, 421, 422, 429 and 503 may come from anywhere; what a route adds is named there."""
    return {code: {"model": Problem} for code in sorted({401, 403, 421, 422, 429, 503, *codes})}


WhereQuery = Annotated[Where, Query()]
Limit = Annotated[int, Query(ge=1, le=200)]
