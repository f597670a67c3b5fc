"""Commands that show and serve: explain, serve."""

from __future__ import annotations

import errno
import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from cooc.cli import app, err, options, out
from cooc.cli.writing import check_drawing, save_picture
from cooc.errors import InputError, counted


@app.command()
def explain(
    query: Annotated[Path, typer.Argument(metavar="QUERY", help="A picture.")],
    match: Annotated[Path, typer.Argument(metavar="MATCH", help="A picture that was found.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.png", help="Where the drawing goes.")],
    recipe: options.Recipe = options.DEFAULT,
    box: Annotated[str, typer.Option(metavar="X0,Y0,X1,Y1", help="The part of QUERY that is looked for.")] = "",
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Draw why two pictures are similar: the score as a sum over the positions of both.

    The frame in each picture holds most of it: "it is here".
    """
    from cooc.descriptor import Descriptor
    from cooc.explanation import draw
    from cooc.explanation import explain as take_apart
    from cooc.pictures.boxes import parse_box
    from cooc.recipes import find_recipe

    part = parse_box(box) if box else None
    check_drawing(output)
    descriptor = Descriptor(find_recipe(recipe).config, device=device)
    why = take_apart(descriptor, query, match, query_box=part)
    page = draw(descriptor, query, match, why, query_box=part, names=(query.name, match.name))
    save_picture(page, output)
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
        out.print(f"Most of it comes from {corners} in {match}", markup=False)


@app.command()
def serve(
    index: options.Index = "",
    host: Annotated[
        str, typer.Option(help="Where to listen. Anything but this machine demands a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8765,
    token: Annotated[
        str | None, typer.Option(envvar="COOC_TOKEN", show_envvar=True, help="The token that a client must send.")
    ] = None,
    allow: Annotated[
        list[Path] | None,
        typer.Option(help="A folder below the index's root where pictures may be added, removed, tagged and marked."),
    ] = None,
    allow_url: Annotated[
        bool, typer.Option("--allow-url", help="Let clients search by a picture in the web, at no private address.")
    ] = False,
    cors: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="A page of another site that may use the API: https://photos.example"),
    ] = None,
    keep: Annotated[
        float, typer.Option(min=0, metavar="MINUTES", help="Keep queries in memory: links to them survive a reload.")
    ] = 0,
    rate: Annotated[float, typer.Option(min=0, help="Requests of one client in a second; 0 does not limit.")] = 50,
    device: options.Device = "auto",
) -> None:
    """Serve the page and the REST API of an index.

    Only this machine can reach it, unless --host says otherwise. /docs shows the API. Nothing is changed by it unless
    --allow says where.
    """
    from cooc.api.settings import Settings, check_host

    check_host(host, token)
    settings = Settings(
        token=token,
        folders=tuple(allow or ()),
        cors=frozenset(cors or ()),
        allow_url=allow_url,
        keep_seconds=60 * keep,
        rate=rate,
    )
    try:
        import uvicorn

        from cooc.api import create_app, impatient
        from cooc.api.connections import BACKLOG
        from cooc.api.open_files import raise_limit
    except ImportError as error:
        raise InputError(f"Serving needs {error.name}: pip install 'cooc[serve]'.") from error
    from cooc.pictures.malloc import keep_pyramids

    raise_limit()
    keep_pyramids()
    with _bound(host, port) as listener, options.opened(index, device=device) as search:
        err.print("Loading the network ...")
        search.descriptor  # noqa: B018 (so that the first request does not wait for it)
        application = create_app(search, settings)
        config = uvicorn.Config(
            application,
            http=impatient(settings),
            ws="none",
            host=host,
            port=port,
            access_log=False,  # ours holds no queries
            log_level="error",  # a line for each request that is none would be a way to fill the disk
            server_header=False,
            proxy_headers=False,  # a client's address is what limits go by
            backlog=BACKLOG,
            timeout_graceful_shutdown=settings.grace_seconds,
        )
        server = uvicorn.Server(config)
        listener.listen(config.backlog)  # who reads the address below may use it
        address = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        out.print(f"{counted(len(search.store), 'picture')} at {address}  (Ctrl-C ends it)", markup=False)
        with suppress(KeyboardInterrupt):  # Ctrl-C is how it ends, when all is well
            server.run([listener])
    if not application.state.services.ended:
        os._exit(0)  # Python would wait for a thread that describes; nothing of it has to be kept


def _bound(host: str, port: int) -> socket.socket:
    """uvicorn's own way ends the process with words for its developers."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        why = {
            errno.EADDRINUSE: f"Port {port} is taken, perhaps by another `cooc serve`: --port 0 finds a free one.",
            errno.EACCES: f"Port {port} is for the system's own services: choose one from 1024 on.",
        }
        plain = f"{host!r} is no address of this machine ({error}). --host 0.0.0.0 listens on all that it has."
        raise InputError(why.get(error.errno or 0, plain)) from error
    return listener
