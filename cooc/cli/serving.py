"""Commands that show and serve: explain, serve."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cooc.cli import app, err, out
from cooc.cli.describing import DEFAULT, DeviceOption, JsonOption, RecipeOption, _check_output, _replacing
from cooc.cli.indexing import IndexOption, find_index
from cooc.errors import InputError


@app.command()
def explain(
    query: Annotated[Path, typer.Argument(metavar="QUERY", help="A picture.")],
    match: Annotated[Path, typer.Argument(metavar="MATCH", help="A picture that it was found to match.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.png", help="Where the drawing goes.")],
    recipe: RecipeOption = DEFAULT,
    box: Annotated[str, typer.Option(metavar="X0,Y0,X1,Y1", help="The part of QUERY that is looked for.")] = "",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Draw why two pictures match: the score as a sum over the positions of both.

    The frame in each picture holds most of it: "it is here".
    """
    from PIL import Image

    from cooc.descriptor import Descriptor
    from cooc.explanation import draw
    from cooc.explanation import explain as take_apart
    from cooc.images import parse_box
    from cooc.recipes import find_recipe

    part = parse_box(box) if box else None
    Image.init()
    _check_output(output, *(end for end, form in Image.EXTENSION.items() if form in Image.SAVE))
    descriptor = Descriptor(find_recipe(recipe).config, device=device)
    why = take_apart(descriptor, query, match, query_box=part)
    page = draw(descriptor, query, match, why, query_box=part, names=(query.name, match.name))
    with _replacing(output) as stream:
        page.save(stream, Image.EXTENSION[output.suffix.lower()])
    if as_json:
        sides = {
            name: {"map": side.map.tolist(), "region": side.region, "box": side.box}
            for name, side in (("query", why.query), ("match", why.match))
        }
        typer.echo(json.dumps({"score": why.score, "exact": why.exact, **sides}))
        return
    out.print(f"{output}: score {why.score:.3f}{'' if why.exact else ', shares by the derivative'}", markup=False)
    if why.match.box:
        corners = ",".join(f"{n:.0f}" for n in why.match.box)
        out.print(f"It is here: {corners} in {match}", markup=False)


@app.command()
def serve(
    index: IndexOption = "",
    host: Annotated[
        str, typer.Option(help="Where to listen. Anything but this machine demands a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8765,
    token: Annotated[
        str | None, typer.Option(envvar="COOC_TOKEN", show_envvar=True, help="What a client has to know.")
    ] = None,
    allow: Annotated[
        list[Path] | None, typer.Option(help="A folder below the index's root that may be indexed by request.")
    ] = None,
    rate: Annotated[float, typer.Option(min=0, help="Requests of one client in a second; 0 does not limit.")] = 50,
    device: DeviceOption = "auto",
) -> None:
    """Serve the page and the REST API of an index.

    Only this machine can reach it, unless --host says otherwise. /docs shows the API.
    """
    from cooc.api.settings import Settings, check_host

    check_host(host, token)
    settings = Settings(token=token, folders=tuple(allow or ()), rate=rate)
    try:
        import uvicorn

        from cooc.api import create_app, impatient
    except ImportError as error:
        raise InputError(f"Serving needs {error.name}: pip install 'cooc[serve]'.") from error
    from cooc.image_search import ImageSearch

    with ImageSearch.open(find_index(index), device=device) as search:
        err.print("Loading the network ...")
        search.descriptor  # noqa: B018 (so that the first request does not wait for it)
        config = uvicorn.Config(
            create_app(search, settings),
            http=impatient(settings.head_seconds),
            host=host,
            port=port,
            access_log=False,  # ours holds no queries
            log_level="warning",
            server_header=False,
            proxy_headers=False,  # a client's address is what the rate limit goes by
            limit_concurrency=1000,
            timeout_graceful_shutdown=5,
        )
        server = uvicorn.Server(config)
        socket = config.bind_socket()
        socket.listen(config.backlog)  # who reads the address below may use it
        address = f"http://{f'[{host}]' if ':' in host else host}:{socket.getsockname()[1]}"
        out.print(f"{len(search.store)} pictures at {address}  (Ctrl-C ends it)", markup=False)
        with suppress(KeyboardInterrupt):  # Ctrl-C is how it ends, when all is well
            server.run([socket])


def bench_serve(
    images: Annotated[int, typer.Option(min=100, help="Made-up vectors in the index.")] = 100_000,
    index: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Instead: an index, as `cooc bench search --keep` makes one.")
    ] = None,
    clients: Annotated[int, typer.Option(min=1, help="That ask at the same time.")] = 50,
    seconds: Annotated[float, typer.Option(min=1, help="Of the mixture.")] = 60,
    uploads: Annotated[float, typer.Option(min=0, max=1, help="The part of requests that are uploads.")] = 0.1,
    recipe: RecipeOption = "paper-linear+size=256",
    device: DeviceOption = "auto",
    results: Annotated[Path, typer.Option(metavar="FOLDER", help="Where serving-SIZE.json goes.")] = Path("results"),
    as_json: JsonOption = False,
) -> None:
    """Measure a server on this machine: the engine alone, search by id over HTTP, and a mixture with uploads."""
    from cooc.benchmark.serving import Options, run_serving, write_serving

    with err.status("Measuring ...") as shown:
        options = Options(
            images=images,
            index=index,
            recipe=recipe,
            clients=clients,
            seconds=seconds,
            uploads=uploads,
            device=device,
            progress=lambda what: shown.update(f"Measuring {what} ..."),
        )
        result = run_serving(options)
    path = write_serving(result, results)
    if as_json:
        typer.echo(json.dumps(result))
        return
    table = Table("", "per second", "p50 ms", "p99 ms", "answers", box=None, pad_edge=False)
    table.add_row("engine alone", f"{result['engine']['searches/s']:.0f}", "", "", "")
    for name, one in result["routes"].items():
        answers = ", ".join(f"{count} x {code}" for code, count in one["codes"].items())
        table.add_row(name, "", f"{one['p50 ms']:.1f}", f"{one['p99 ms']:.1f}", answers)
    for name in ("by id", "mixed"):
        load = result[name]
        kinds = [load[kind] for kind in ("id", "upload") if kind in load]
        cells = [" / ".join(f"{kind[q]:.0f}" for kind in kinds) for q in ("p50 ms", "p99 ms")]
        codes = ", ".join(f"{count} x {code}" for code, count in load["codes"].items())
        table.add_row(name, f"{load['requests/s']:.0f}", *cells, codes)
    out.print(table)
    memory = [megabytes for megabytes in result["server MB during the mixture"] if megabytes]
    held = f" The server held {memory[0]:.0f} MB at first, {memory[-1]:.0f} MB in the end." if memory else ""
    out.print(f"By id, {result['by id over engine']:.0%} of the engine's rate.{held}", markup=False)
    err.print(f"Written: {path}")
