"""Writes batches that an older writer set aside because it could not read them."""

from __future__ import annotations

import secrets
from pathlib import PurePosixPath

from app.decision_log.batch import Batch
from app.decision_log.stream import StreamEntry
from workers.decision_log.flush import UNREADABLE, Flush, read
from workers.decision_log.folder import ASIDE, Folder


def take_up(folder: Folder) -> int:
    """Write the set-aside batches that can be read now, and remove them from there; return how many.

    Raises:
        OSError: the folder cannot be written; the next call continues.
    """
    taken = 0
    for file in folder.files(UNREADABLE):
        if file.base_name.startswith(ASIDE):
            continue  # it was cut short while it was set aside, so the stream still has it
        id_ = PurePosixPath(file.base_name).stem
        entry = StreamEntry(id_.encode(), folder.read(file.path), 0)
        if isinstance(read(entry), Batch):
            Flush([entry], f"{id_}-{secrets.token_hex(4)}").write(folder)
            folder.remove(file.path)
            taken += 1
    return taken
