"""cooc watch: an index that follows its folder.

The system tells what has changed; the folders that it names are brought up to date as `cooc index` does it, so that
renames, copies and bad files are settled by the same rules. The index is open for writing only meanwhile: between
changes others may tag, add or index.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cooc.cli import app, err, options, out
from cooc.cli.indexing import follow_with_text, index
from cooc.cli.runs import running, say
from cooc.errors import PARTIAL, InputError, StoreLockedError

if TYPE_CHECKING:
    from cooc.descriptor import Descriptor

QUIET, LONGEST = 1000, 3000  # milliseconds without a change, after which a burst is over; a longer one is cut there


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Pictures, with all folders below.")],
    index_: Annotated[str, typer.Option("--index", metavar="INDEX", help="[default: FOLDER/.cooc]")] = "",
    poll: Annotated[
        bool, typer.Option("--poll", help="Look again and again, where the system tells nothing: network drives.")
    ] = False,
    prune: options.Prune = False,
    device: options.Device = "auto",
    quiet: options.Quiet = False,
    as_json: options.Events = False,
) -> None:
    """Index a folder, and keep the index up to date as pictures come and go, until Ctrl-C.

    A burst of changes is settled at once, a second after its last one. A file that is still being written is left out
    until it is whole. Settings of a new index are those of `cooc index`; make it first to choose others.
    """
    if not folder.is_dir():
        raise InputError(f"{str(folder)!r} is not a folder.")
    follower = _Follower(folder, index_, device, prune, quiet, as_json)
    waiting = set[Path]()
    first = True
    try:
        for changed in _changes(folder, poll):
            waiting |= changed
            if first:  # not before changes are seen, or those that happen meanwhile would be missed
                follower.begin()
                first = False
            elif waiting and follower.bring_up_to_date(waiting):
                waiting.clear()
    except KeyboardInterrupt:
        pass


def _changes(folder: Path, poll: bool) -> Iterator[set[Path]]:
    """Folders in which something has changed; a first time at once, then every second or so, also when nothing has."""
    try:
        import watchfiles
    except ImportError as error:
        raise InputError("Watching needs watchfiles: pip install 'cooc[watch]'.") from error
    from cooc.pictures.decode import EXTENSIONS

    root = folder.absolute()

    def matters(path: str) -> bool:
        file = Path(path)
        hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
        return not hidden and (file.suffix.lower() in EXTENSIONS or not file.is_file())

    def place(path: str) -> Path:
        file = Path(path)
        return file if file.is_dir() else next(above for above in file.parents if above.is_dir() or above == root)

    try:
        for changes in watchfiles.watch(
            root,
            watch_filter=None,  # or there would be no end of waiting while the index, which lies in it, is being read
            step=QUIET,
            debounce=LONGEST,
            rust_timeout=QUIET,
            yield_on_timeout=True,
            force_polling=poll,
            ignore_permission_denied=True,
        ):
            yield {place(path) for _, path in changes if matters(path)}
    except OSError as error:
        raise InputError(
            f"{str(folder)!r} cannot be watched ({error}). Where the system limits what may be watched, raise that "
            "(fs.inotify.max_user_watches) or use --poll."
        ) from error


class _Follower:
    def __init__(self, folder: Path, index: str, device: str, prune: bool, quiet: bool, as_json: bool) -> None:
        self.folder, self.index = folder, index or str(folder / options.NAME)
        self.device, self.prune, self.quiet, self.as_json = device, prune, quiet, as_json
        self.network: Descriptor | None = None  # kept from run to run
        self.told = False  # that another process writes

    def begin(self) -> None:
        """As `cooc index` does it, which makes the index if there is none."""
        folders = [str(self.folder)]
        try:
            index(folders, self.index, device=self.device, prune=self.prune, quiet=self.quiet, as_json=self.as_json)
        except typer.Exit as end:
            if end.exit_code != PARTIAL:
                raise
        if not self.quiet and not self.as_json:
            out.print(f"Watching {self.folder} (Ctrl-C ends it)", markup=False)

    def bring_up_to_date(self, folders: set[Path]) -> bool:
        """False if another process is writing: it is tried again."""
        from cooc.image_search import ImageSearch

        try:
            search = ImageSearch.open(self.index, write=True, device=self.device, descriptor=self.network)
        except StoreLockedError as error:
            if not self.told:
                err.print(f"{error} Waiting for it.", style="yellow", markup=False)
            self.told = True
            return False
        self.told = False
        with search:
            with running(search, self.quiet, self.as_json) as progress:
                report = search.index(sorted(folders), workers=0, prune=self.prune, progress=progress)
            if report.described:
                self.network = search.descriptor
            follow_with_text(search, "", self.device, self.quiet, self.as_json)
            if report.described + report.copied + report.moved + report.removed + report.bad + report.failed:
                say(search, report, self.quiet, self.as_json, "done")
        if report.interrupted:
            raise KeyboardInterrupt
        return True
