"""Where pictures lie, seen as named files: a folder, an object store, the tars of a WebDataset.

    photos                      a folder of this machine
    s3://bucket/photos          what fsspec reads; S3 by the extra `cloud`, its keys and endpoint as for AWS's own tools
    tar+shards, tar+s3://b/p    each .tar below is a folder of pictures: shard-000.tar/000017.jpg

A collection lists files with a size and a time, which change when the file does, and gives a file's content. Nothing is
copied to disk: a picture is read when it is described or shown. In an index the time of an object is that of the store
to the second, with its ETag in the nanoseconds; that of a tar's member is the tar's, with the member's 512-byte block
in the nanoseconds: one request reads it from the middle of a tar, and no table of offsets is kept anywhere.
"""

from __future__ import annotations

import os
from pathlib import Path

from cooc.pictures.collection import Collection, Entry, Fetched, is_url
from cooc.pictures.folder import Folder
from cooc.pictures.objects import Objects
from cooc.pictures.tars import Tars

__all__ = ["Collection", "Entry", "Fetched", "Folder", "Objects", "Tars", "is_url", "open_collection"]


def open_collection(root: str | os.PathLike[str]) -> Collection:
    text = os.fsdecode(root)
    if not is_url(text):
        return Folder(Path(text))
    if text.startswith("tar+"):
        return Tars(text)
    return Folder(Path(text.removeprefix("file://"))) if text.startswith("file://") else Objects(text)
