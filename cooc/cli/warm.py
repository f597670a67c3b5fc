"""`cooc search` again without loading anything: a process that stays for some minutes, with the network in it.

    cooc index photos           in a terminal: starts it when all is done
    cooc search a.jpg           asks it; starts it where there is none
    COOC_WARM=0 cooc search     without it; COOC_WARM=30 keeps it for 30 minutes, and uses it outside terminals, too

Only its user can reach it: its socket lies in a folder that nobody else may enter. It gets the caller's own files,
folder and environment, runs the same command, and gives the exit code back (`cooc.asking` is the caller's side). It
ends by itself after minutes without a search, with a search that is interrupted, and where it would hold a GPU's
memory. A caller that finds it busy, or of another version of the code, searches without it. A first search need not
wait for torch (`cooc.query_network`), which is loaded once that is answered.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from cooc.asking import KEPT, TAKEN
from cooc.cli import only, renew_consoles, run
from cooc.cli.options import find_index

if TYPE_CHECKING:
    from cooc.descriptor import Descriptor
    from cooc.image_search import ImageSearch

_stays = False
_loaded: list[tuple[Descriptor, str]] = []  # of the last search, with its fingerprint
_last: list[ImageSearch] = []  # that has been answered, and whose network is not looked after yet


def stay(listening: str, minutes: str, place: str, device: str) -> None:
    """`device`: where the network of `COOC_INDEX` is loaded before anybody asks; "": a search waits already."""
    global _stays
    _stays = True
    gc.set_threshold(KEPT)
    from cooc.cli import showing  # noqa: F401 (what a search needs is loaded before it is asked for)

    _command()
    loading = threading.Thread(target=_load, args=(device,), daemon=True)
    loading.start()
    with socket.socket(fileno=int(listening)) as listener:
        listener.settimeout(60 * float(minutes))
        try:
            while all(network.device.type == "cpu" for network, _ in _loaded):
                with listener.accept()[0] as connection, contextlib.suppress(ConnectionError):
                    connection.settimeout(None)
                    _served(connection, Path(place), loading)
                loading = threading.Thread(target=_load_last, args=(loading,), daemon=True)
                loading.start()
        except TimeoutError:
            pass
        finally:  # first of all: nobody is to find a socket that nobody answers
            Path(place).unlink(missing_ok=True)


def _load(device: str) -> None:
    try:
        if device:
            with opened(os.environ["COOC_INDEX"], device) as search:
                if not search.config.given:
                    search.descriptor  # noqa: B018 (so that the first search does not wait for it)
    finally:
        os.chdir("/")


def _load_last(before: threading.Thread) -> None:
    """After an answer that needed no torch: by torch, the next ones take less of the processor.

    `before`: what is loading still, for a caller may have come and gone meanwhile."""
    from cooc.pictures.malloc import trim

    before.join()
    while _last:
        search = _last.pop()
        if search.query_network is not None:
            _loaded[:] = [(search.descriptor, search.meta.weights_hash)]
            trim()  # of what OpenCV needed
        search.keep_query_network()


def _served(connection: socket.socket, place: Path, loading: threading.Thread) -> None:
    connection.sendall(TAKEN)
    sent, files, _, _ = socket.recv_fds(connection, 1, 3)
    if not sent:  # the caller did not wait
        return
    with connection.makefile("rb") as stream:
        request = json.loads(stream.read(int.from_bytes(stream.read(8))))
    done = threading.Event()

    def watch() -> None:
        if not connection.recv(1) and not done.is_set():  # the caller was interrupted
            place.unlink(missing_ok=True)
            os._exit(130)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    loading.join()
    code = _run(request, files)
    done.set()
    connection.sendall(bytes([code & 0xFF]))
    watching.join()


def _run(request: dict[str, Any], files: list[int]) -> int:
    """The command as the caller would run it; afterwards this process has nothing of the caller's."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    own = dict(os.environ)
    mask = os.umask(request["umask"])
    try:
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.argv[:] = ["cooc", *request["words"]]
        renew_consoles()
        if not _loaded:
            begin(request["words"])
        run(_command())
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        os.close(null)
        os.chdir("/")
        os.umask(mask)
        os.environ.clear()
        os.environ.update(own)
    return 0


@functools.cache
def _command() -> Any:
    """With its options, which take a while to put together."""
    return typer.main.get_command(only("search"))


def begin(words: list[str]) -> None:
    """Read the network that a search will ask for, in a thread, while the rest of what it needs is imported.

    The words of the command are only looked through here: where they mean another one, this one was read in vain, and
    what is wrong with them is said later.
    """
    given = dict(itertools.pairwise(part for word in words for part in word.split("=", 1)))
    index, device = given.get("--index", ""), given.get("--device", "auto")
    from cooc.index import is_folder, open_store
    from cooc.pictures.malloc import share_memory
    from cooc.query_network.running import QueryNetwork, place_of, surely_cpu

    share_memory()
    with contextlib.suppress(Exception):
        if is_folder(index := find_index(index)) and surely_cpu(device):
            with contextlib.closing(open_store(index)) as store:
                meta = store.meta
            QueryNetwork.begin(place_of(meta.config, meta.weights_hash), meta.config["size"])


@contextlib.contextmanager
def opened(index: str, device: str) -> Iterator[ImageSearch]:
    """An index to search in; in a process that stays, with the network of the last search, if it is the right one."""
    from cooc.errors import StoreMismatchError
    from cooc.image_search import ImageSearch
    from cooc.pictures.malloc import keep_pyramids

    keep_pyramids()
    descriptor, fingerprint = _known(device)
    try:
        search = ImageSearch.open(index, device=device, descriptor=descriptor, fingerprint=fingerprint)
    except StoreMismatchError:
        descriptor, search = None, ImageSearch.open(index, device=device)
    with search:
        yield search
        if not _stays:
            search.keep_query_network()
        elif descriptor is None:  # else the network has been looked after
            _last[:] = [search]
            if search.query_network is None and not search.config.given:
                _loaded[:] = [(search.descriptor, search.meta.weights_hash)]


def _known(device: str) -> tuple[Descriptor, str] | tuple[None, None]:
    if not _loaded:
        return None, None
    from cooc.activations import resolve_device

    return _loaded[0] if _loaded[0][0].device == resolve_device(device) else (None, None)
