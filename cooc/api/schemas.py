"""What goes in and out, as OpenAPI shows it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, Any, Literal

from fastapi import Path, Query
from pydantic import BaseModel, ConfigDict, Field

from cooc.explanation.shares import Explanation, Shares
from cooc.index.records import Filter, Record
from cooc.index.shortlist import Match, Results
from cooc.keeping import Choice
from cooc.pictures.boxes import Box
from cooc.verification.agreement import Agreement
from cooc.verification.probability import same_thing

PREFIX = "/api/v1"
Expansion = Literal["none", "average", "alpha"]
Reranking = Literal["none", "k-reciprocal", "diffusion", "superglobal"]
DEEPEST = 10_000  # results that can be scrolled to
POINTS = 200  # that an explanation shows

_ID = r"^[0-9a-f]{32}$"
_BOX = r"^(-?\d{1,6}(\.\d{1,6})?)(,-?\d{1,6}(\.\d{1,6})?){3}$"
_DATE = r"^\d{4}(-\d\d(-\d\d)?)?$"
IdText = Annotated[str, Field(pattern=_ID)]
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


class Portion(Where):
    k: int = Field(default=20, ge=1, le=200, description="Results in one answer.")
    offset: int = Field(
        default=0, ge=0, le=DEEPEST, description="Results before them: `next_offset` of the last answer."
    )
    min_score: float | None = Field(default=None, ge=-1, le=1, description="Leave out what is less similar.")


class Words(Portion):
    text: str = Field(min_length=1, max_length=1000, description="What the pictures show: a red car.")


class SearchOptions(Portion):
    expand: Expansion = Field(default="none", description="Search again with the query and its best results joined.")
    rerank: Reranking = Field(default="none", description="Re-rank the best 400 results.")
    augment: bool = Field(default=False, description="Compare with the neighbours of each result, too.")
    verify: bool | None = Field(
        default=None,
        description="Check the best results by geometry. By default that is done where the index has local features.",
    )
    thorough: bool = Field(
        default=False,
        description="Verify thrice as many, and then what agrees with the best of those: slower, and finds more views.",
    )


class Ids(BaseModel):
    ids: list[IdText] = Field(min_length=1, max_length=1000, description="Of pictures.")


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


class RegionOut(Out):
    region: list[tuple[float, float]] = Field(description="Corners of the region that agrees, in full-size pixels.")
    box: tuple[float, float, float, float] | None = Field(description="The box around it; null where nothing agrees.")
    size: tuple[int, int] = Field(description="Width and height of the picture.")


class AgreementOut(Out):
    engine: str = Field(description="What the local features are: sift, xfeat or activations.")
    inliers: int = Field(description="Points of both pictures that agree on one geometry.")
    transform: list[list[float]] = Field(description="3 x 3, from pixels of the query to pixels of the picture.")
    query: RegionOut
    picture: RegionOut

    @classmethod
    def of(cls, agreement: Agreement) -> AgreementOut:
        return cls(**agreement.as_dict())


class MatchOut(Picture):
    score: float = Field(description="Similarity, the inner product with the query: 1 is the same picture.")
    verified: bool = Field(description="False: merely similar, no geometry shows that it is the same thing.")
    probability: float | None = Field(
        description="Of a verified result: that it shows the same thing. Of another, where nothing was checked by "
        "geometry: how often one with such a score was right among the pictures that the index's calibration was "
        "fitted on, which need not be like these. Else null."
    )
    agreement: AgreementOut | None = Field(description="In what it agrees with the query, if it is verified.")
    query_picture: int = Field(description="With which of the query's pictures, from 0.")

    @classmethod
    def found(cls, match: Match) -> MatchOut:
        return cls(
            **_picture(match.record),
            score=match.score,
            verified=match.verified,
            probability=match.probability,
            agreement=AgreementOut.of(match.agreement) if match.agreement is not None else None,
            query_picture=match.query,
        )


class ResultsOut(Out):
    matches: list[MatchOut] = Field(
        description="What is verified, the most certain first; then the most similar first, or as re-ranking orders."
    )
    no_match: bool = Field(
        description="Nothing is verified; where nothing was checked: by its probability, even the best result is more "
        "likely another thing."
    )
    checked: bool = Field(description="Were the best results checked by geometry?")
    next_offset: int | None = Field(description="Where the next results begin; null if these were the last.")
    seconds: float
    uploads: list[str] = Field(default=[], description="The sha256 of each picture that was sent, to mark results by.")

    @classmethod
    def of(cls, results: Results, options: Portion, uploads: Sequence[str] = ()) -> ResultsOut:
        matches = [MatchOut.found(match) for match in results.matches]
        following = options.offset + options.k
        more = len(matches) == options.k and following <= DEEPEST
        return cls(
            matches=matches,
            no_match=results.no_match,
            checked=results.checked,
            next_offset=following if more else None,
            seconds=results.seconds,
            uploads=list(uploads),
        )


class PicturesOut(Out):
    pictures: list[Picture] = Field(description="In the order of their paths.")
    next_after: str | None = Field(description="`after` for the next ones; null if these were the last.")


class CopyOut(Picture):
    bytes: int = Field(description="Of the file.")


class GroupOut(Out):
    """Copies of one picture."""

    pictures: list[CopyOut] = Field(description="In the order of their paths.")
    keep: str = Field(description="The id of the one to keep.")
    why: str = Field(description="Why that one: the largest, the sharpest, ...")

    @classmethod
    def of(cls, choice: Choice) -> GroupOut:
        group = sorted((choice.keep, *choice.rest), key=lambda record: record.path)
        pictures = [CopyOut(**_picture(record), bytes=record.size) for record in group]
        return cls(pictures=pictures, keep=choice.keep.id, why=choice.why)


class GroupsOut(Out):
    groups: list[GroupOut]
    next_offset: int | None = Field(description="Where the next groups begin; null if these were the last.")
    compared: float = Field(
        description="The share of the pictures that was compared. Below 1 there are no groups yet: ask again."
    )


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
    agreement: AgreementOut | None = Field(description="What geometry says; null without local features of both.")
    probability: float | None = Field(description="By geometry, that both show the same thing.")
    points: list[tuple[float, float, float, float]] = Field(
        description=f"At most {POINTS} of the points that agree: x, y in the query and x, y in the picture."
    )

    @classmethod
    def of(cls, why: Explanation, agreement: Agreement | None) -> ExplanationOut:
        return cls(
            score=why.score,
            exact=why.exact,
            query=SharesOut.of(why.query),
            match=SharesOut.of(why.match),
            agreement=AgreementOut.of(agreement) if agreement is not None else None,
            probability=same_thing(agreement) if agreement is not None else None,
            points=agreement.pairs(POINTS) if agreement is not None else [],
        )


class StatusOut(Out):
    name: str = Field(description="Name of the collection's folder.")
    images: int
    bad: int = Field(description="Files that could not be read.")
    recipe: str
    dim: int
    calibrated: bool = Field(
        description="Have results that were not checked by geometry a probability, and can `no_match` be told of them?"
    )
    features: str = Field(description="Local features that results are verified by: sift, sift+xfeat; empty for none.")
    with_features: int = Field(description="Pictures that have them.")
    folders: list[str] = Field(description="Folders that requests may change: indexing, removal, tags, marks.")
    writable: bool = Field(description="May this client change them?")
    words: bool = Field(description="Can pictures be searched for by words?")
    urls: bool = Field(description="Are pictures fetched from the web, to search by them?")
    keep_seconds: float = Field(description="For how long a picture that was sent is kept; 0: not at all.")
    version: str


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
