"""cooc duplicates: which pictures are copies, which one of them to keep, and what to do with the rest.

Nothing is ever deleted, and nothing is done that loses a picture: `--move` takes no name that is there already,
`--link` replaces only what has the same bytes as the one that is kept, and both look at the files again first.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cooc.cli import app, err, options, out
from cooc.cli.writing import check_output, writing
from cooc.errors import PARTIAL, InputError, MachineError, counted
from cooc.files import file_hash

if TYPE_CHECKING:
    from cooc.image_search import ImageSearch
    from cooc.index.records import Record
    from cooc.keeping import Choice


@app.command()
def duplicates(
    index: options.Index = "",
    threshold: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Least similarity of two. [default: 0.8; 0.15 where geometry decides]"),
    ] = None,
    verify: options.Verify = None,
    folder: options.Folder = "",
    html: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a page that shows the groups.")] = None,
    rest: Annotated[
        bool, typer.Option("--list", help="Print only the files that need not be kept, a line each.")
    ] = False,
    move: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Move what need not be kept there, out of the indexed folder.")
    ] = None,
    link: Annotated[
        Literal["hard", "symbolic"] | None,
        typer.Option(help="Make what has the same bytes as the one that is kept a link to it."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """List groups of copies: re-saved ones, smaller ones, crops, turned and mirrored ones; and which one to keep.

    Where the index has local features they decide, so that other views of one thing are no copies. Without features,
    similarity alone decides: other qualities and slight crops are found, smaller and turned copies often missed.

    The one to keep is the largest, if its pixels show more; else the sharpest; else the one that knows when it was
    taken, that has tags, or that is least compressed. Nothing is deleted, and nothing is changed unless --move or
    --link says so. A copy that was cropped or changed on purpose is a copy, too: look before you move.
    """
    from cooc.index.records import Filter
    from cooc.keeping import choose

    if sum([rest, bool(move), bool(link), as_json]) > 1:
        raise InputError("Choose one of --list, --move, --link and --json.")
    if html is not None:
        check_output(html, ".html", ".htm")
    groups = pictures = 0
    shown: list[Choice] = []
    with options.opened(index, write=move is not None) as found:
        act = _Act(found, move, link) if move or link else None
        for group in found.duplicates(threshold, where=Filter(folder) if folder else None, verify=verify):
            groups, pictures = groups + 1, pictures + len(group)
            choice = choose(group, found.collection)
            shown += [choice] if html else []
            if as_json:
                typer.echo(json.dumps([_as_dict(record, choice) for record in group]))
            elif rest:
                for record in choice.rest:
                    typer.echo(found.collection.address(record.path))
            else:
                _print(choice)
            if act is not None:
                act.on(choice)
        if html is not None:
            with writing(html) as stream:
                stream.write(_page(shown, found).encode())
            err.print(f"Written: {html}", markup=False)
    if act is not None:
        out.print(f"{counted(act.done, 'file')} {'moved' if move else 'linked'}, {act.left} left as they are.")
        if act.refused:
            raise typer.Exit(PARTIAL)
    elif not as_json and not rest:
        out.print(f"{counted(groups, 'group')}, {counted(pictures, 'picture')}.")


def _as_dict(record: Record, choice: Choice) -> dict[str, object]:
    keep = record is choice.keep
    return {"id": record.id, "path": record.path, "sha256": record.sha256, "keep": keep, "why": choice.why * keep}


def _print(choice: Choice) -> None:
    from cooc.cli.showing import shown

    group = (choice.keep, *choice.rest)
    same = ", same content" * (len({record.sha256 for record in group}) == 1)
    out.print(counted(len(group), "picture") + same, style="bold")
    for record in group:
        said = f"keep ({choice.why})" if record is choice.keep else "cannot be read" * (record.path in choice.unread)
        about = f"{record.width}x{record.height}  {record.size:,} bytes"
        out.print(f"  {shown(record.path)}  {about}" + f"  {said}" * bool(said), markup=False)


def _page(choices: list[Choice], found: ImageSearch) -> str:
    """HTML with everything inside: a row of pictures for each group, the one to keep first."""
    from cooc.cli import showing

    parts = [showing.head("cooc duplicates", f"Copies in {found.index_name}")]
    parts.append(f"<p>{counted(len(choices), 'group')}. In each, the picture to keep comes first.</p>")
    for choice in choices:
        parts.append(f"<section><h2>{counted(1 + len(choice.rest), 'picture')}</h2><div class=grid>")
        for record in (choice.keep, *choice.rest):
            kept = record is choice.keep
            picture = showing.img(showing.thumbnail(found.collection.picture(record.entry), showing.TILE), record.path)
            about = f"{record.width} x {record.height}, {record.size:,} bytes"
            said = f"<b>keep: {choice.why}</b><br>" * kept
            name = showing.link(record.path, found.collection)
            parts.append(
                f"<figure{' class=agrees' * kept}>{picture}<figcaption>{said}{name}<br>{about}</figcaption></figure>"
            )
        parts.append("</div></section>")
    return "\n".join(parts) + "\n"


class _Act:
    """Moves or links what need not be kept. What must not be touched stays, and is said."""

    def __init__(self, search: ImageSearch, folder: Path | None, link: str | None) -> None:
        self.search, self.root, self.link, self.folder = search, search.root, link, folder
        self.done = self.left = 0
        self.refused = False
        if folder is not None and folder.resolve().is_relative_to(self.root.resolve()):
            raise InputError(f"{str(folder)!r} lies in the indexed folder, which would index it again: choose another.")

    def on(self, choice: Choice) -> None:
        kept = self.root / choice.keep.path
        sure = _is_still(kept, choice.keep)
        if not sure:
            self._refuse(choice.keep, "it was to be kept, but has changed since it was indexed. Its copies stay, too")
        for record in choice.rest:
            file, done = self.root / record.path, False
            if sure and not _is_still(file, record):
                self._refuse(record, "it has changed since it was indexed, is a link, or cannot be read")
            elif sure and self.folder is not None:
                done = self._move(record, file, self.folder / record.path)
            elif sure and record.sha256 == choice.keep.sha256 and not file.samefile(kept):
                done = self._join(record, file, kept)
            self.done, self.left = self.done + done, self.left + (not done)

    def _move(self, record: Record, file: Path, target: Path) -> bool:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            _carry(file, target, record.sha256)
        except FileExistsError:
            return self._refuse(record, f"{target} is there already")
        file.unlink()
        self.search.store.remove([record.path])
        return True

    def _join(self, record: Record, file: Path, kept: Path) -> bool:
        temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
        try:
            if self.link == "hard":
                os.link(kept, temporary)
            else:
                temporary.symlink_to(os.path.relpath(kept.resolve(), file.parent.resolve()))
            temporary.replace(file)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            return self._refuse(record, f"no link can be made here ({error.strerror})")
        return True

    def _refuse(self, record: Record, why: str) -> bool:
        from cooc.cli.showing import shown

        self.refused = True
        err.print(f"left: {shown(record.path)}: {why}.", style="yellow", markup=False)
        return False


def _is_still(file: Path, record: Record) -> bool:
    """A file of its own, with the bytes that were indexed."""
    try:
        return not file.is_symlink() and file_hash(file) == record.sha256
    except OSError:
        return False


def _carry(file: Path, target: Path, sha256: str) -> None:
    """A second name for a file, or a copy on another disk: never in the place of something."""
    try:
        os.link(file, target)
        return
    except FileExistsError:
        raise
    except OSError:  # another disk, or one that knows no links
        pass
    with file.open("rb") as old, target.open("xb") as new:
        try:
            shutil.copyfileobj(old, new)
            new.flush()
            os.fsync(new.fileno())
            shutil.copystat(file, target)
            if file_hash(target) != sha256:
                raise MachineError(f"{target} is not what was written there: is its disk well? {file} stays.")
        except BaseException:
            target.unlink()
            raise
