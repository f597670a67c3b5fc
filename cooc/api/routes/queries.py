"""Queries that are no upload: words, a vector, an address in the web, a photo that is still kept; and many at once."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field, model_validator
from starlette.exceptions import HTTPException

from cooc.api.routes.searching import find, search_by_id
from cooc.api.schemas import PREFIX, IdText, Out, ResultsOut, SearchOptions, Words, problems
from cooc.api.security import told
from cooc.api.services import Services, Shared
from cooc.errors import InputError
from cooc.pictures.boxes import parse_box

MOST = 32  # queries in one request

router = APIRouter(prefix=PREFIX, responses=problems(400, 408, 413), tags=["search"])

Asked = Annotated[SearchOptions, Query()]
Vector = Annotated[list[float], Field(min_length=1, max_length=65536, description="Of this index's dimension.")]
Url = Annotated[
    str, Field(min_length=1, max_length=2000, description="http or https, where `cooc serve --allow-url` allows it.")
]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="Of a picture that was sent and is still kept.")]
BoxText = Annotated[str, Field(max_length=100, description="x0,y0,x1,y1: the part that is looked for.")]


class VectorQuery(BaseModel):
    vector: Vector


class UrlQuery(BaseModel):
    url: Url
    box: BoxText | None = None


class OneQuery(BaseModel):
    """One of id, vector, url and upload."""

    id: IdText | None = None
    vector: Vector | None = None
    url: Url | None = None
    upload: Sha256 | None = None
    box: BoxText | None = None

    @model_validator(mode="after")
    def _one(self) -> OneQuery:
        if [self.id, self.vector, self.url, self.upload].count(None) != 3:
            raise ValueError("a query is one of id, vector, url and upload")
        return self


class Batch(BaseModel):
    queries: list[OneQuery] = Field(min_length=1, max_length=MOST)


class Answer(Out):
    results: ResultsOut | None
    problem: str | None = Field(description="What was wrong with this query, if it has no results.")


class BatchOut(Out):
    answers: list[Answer] = Field(description="One for each query, in their order.")


@router.get("/search/words")
async def search_by_words(services: Shared, words: Annotated[Words, Query()]) -> ResultsOut:
    """The pictures that words describe best, where the index was made with a model for it (`cooc index --text`)."""
    options: dict[str, Any] = {"where": words.filter(), "min_score": words.min_score, "offset": words.offset}
    found = await services.describing.run(partial(services.search.search_text, words.text, words.k, **options))
    return ResultsOut.of(found, words)


@router.post("/search/vector")
async def search_by_vector(services: Shared, query: VectorQuery, options: Asked) -> ResultsOut:
    """The pictures nearest to a vector of this descriptor. Nothing is verified by geometry: there is no picture."""
    return await _answer(services, options, OneQuery(vector=query.vector))


@router.post("/search/url")
async def search_by_url(services: Shared, query: UrlQuery, options: Asked) -> ResultsOut:
    """The same as for an upload, for a picture in the web. Private addresses are not fetched, nor redirects to them."""
    return await _answer(services, options, OneQuery(url=query.url, box=query.box))


@router.post("/search/batch")
async def search_batch(services: Shared, batch: Batch, options: Asked) -> BatchOut:
    """Several queries, one after another. One that is wrong does not stop the others."""
    return BatchOut(answers=[await _one(services, options, query) for query in batch.queries])


async def _one(services: Services, options: SearchOptions, query: OneQuery) -> Answer:
    try:
        return Answer(results=await _answer(services, options, query), problem=None)
    except InputError as error:
        return Answer(results=None, problem=told(error, services.search))
    except HTTPException as error:
        if error.status_code >= 500:  # there is too much to do: so there is for the rest
            raise
        return Answer(results=None, problem=str(error.detail))


async def _answer(services: Services, options: SearchOptions, query: OneQuery) -> ResultsOut:
    if query.id:
        return await search_by_id(services, query.id, options, query.box)
    if query.vector:
        return await services.searching.run(partial(find, services, options, vector=query.vector))
    data = await services.fetch(query.url) if query.url else services.uploads.get(query.upload or "")
    box = parse_box(query.box) if query.box else None
    picture = await services.decode_sent(data, box)
    names = [services.uploads.keep(data)]
    return await services.describing.run(partial(find, services, options, image=picture, box=box, names=names))
