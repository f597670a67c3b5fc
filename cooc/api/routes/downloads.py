"""Several pictures at once: their files as a ZIP, a list of them, and vectors for other programs."""

from __future__ import annotations

import csv
import io
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException

from cooc.api.archive import archive, check_size
from cooc.api.pictures import StoredFile
from cooc.api.schemas import PREFIX, Ids, Picture, WhereQuery, problems
from cooc.api.services import Services, Shared
from cooc.index.export import export_index

COLUMNS = ("id", "path", "width", "height", "taken", "tags")

router = APIRouter(prefix=PREFIX, responses=problems(), tags=["downloads"])


@router.post(
    "/images/zip",
    response_class=StreamingResponse,
    responses=problems(404, 413) | {200: {"content": {"application/zip": {}}}},
)
async def download_zip(services: Shared, chosen: Ids) -> StreamingResponse:
    """The files of these pictures as one ZIP, under their paths. Those that are gone are named in `missing.txt`."""
    files, missing = await services.searching.run(_files, services, chosen.ids)
    check_size(files, services.settings.zip_bytes)
    blocks = services.stream(archive(services.pictures, files, missing))
    return StreamingResponse(blocks, media_type="application/zip", headers=_named("pictures.zip"))


def _files(services: Services, ids: list[str]) -> tuple[list[StoredFile], list[str]]:
    files, missing = list[StoredFile](), list[str]()
    for id in dict.fromkeys(ids):
        try:
            files.append(services.pictures.find(id))
        except HTTPException:
            missing.append(id)
    if not files:
        raise HTTPException(404, "None of these files is there: index their folders again.")
    return files, missing


@router.post(
    "/images/list",
    response_class=Response,
    responses=problems(404) | {200: {"content": {"text/csv": {}, "application/json": {}}}},
)
async def download_list(
    services: Shared, chosen: Ids, format: Annotated[Literal["csv", "json"], Query()] = "csv"
) -> Response:
    """What the index knows of these pictures, as a table (CSV) or as a list (JSON), in the order given."""
    found = await services.searching.run(services.search.store.get, list(dict.fromkeys(chosen.ids)))
    pictures = [Picture.of(record).model_dump() for record in found if record is not None]
    if format == "json":
        return JSONResponse(pictures, headers=_named("pictures.json"))
    stream = io.StringIO(newline="")
    table = csv.writer(stream)
    table.writerow(COLUMNS)
    table.writerows([*(one[name] for name in COLUMNS[:-1]), " ".join(one["tags"])] for one in pictures)
    return Response(stream.getvalue(), headers=_named("pictures.csv"), media_type="text/csv; charset=utf-8")


@router.get(
    "/export",
    response_class=FileResponse,
    responses={200: {"content": {"application/zip": {}, "application/vnd.apache.parquet": {}}}},
)
async def export(
    services: Shared, where: WhereQuery, format: Annotated[Literal["npy", "parquet"], Query()] = "npy"
) -> FileResponse:
    """Vectors and records, as `cooc export` writes them: a ZIP of `vectors.npy` and `vectors.jsonl`, or Parquet."""
    chosen = where.filter()

    def work() -> tuple[Path, Path]:
        folder = Path(tempfile.mkdtemp(prefix="cooc-export-"))
        try:
            file = folder / f"vectors.{format}"
            export_index(services.search.store, file, chosen)
            if format == "npy":
                packed = folder / "vectors.zip"
                with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED, allowZip64=True) as target:
                    for one in (file, file.with_suffix(".jsonl")):
                        target.write(one, one.name)
                        one.unlink()
                file = packed
            return folder, file
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    folder, file = await services.exporting.run(work)
    done = BackgroundTask(shutil.rmtree, folder, ignore_errors=True)
    kind = "application/zip" if format == "npy" else "application/vnd.apache.parquet"
    return FileResponse(file, filename=file.name, media_type=kind, background=done)


def _named(name: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
