"""Batches that an older writer could not read and kept aside, taken up by one that can."""

from __future__ import annotations

import secrets
from pathlib import PurePosixPath

from app.store.decision_log import Batch
from workers.decision_log.flush import UNREADABLE, Flush, read
from workers.decision_log.folder import ASIDE, Folder
from workers.decision_log.stream import Entry


def take_up(folder: Folder) -> int:
    """Write the batches that can be read by now, and remove them from their place aside; how many.

    Raises:
        OSError: the folder does not take it; the next call goes on.
    """
    taken = 0
    for file in folder.files(UNREADABLE):
        if file.base_name.startswith(ASIDE):
            continue  # cut short as it was kept, so that the stream has it still
        id_ = PurePosixPath(file.base_name).stem
        entry = Entry(id_.encode(), folder.read(file.path), 0)
        if isinstance(read(entry), Batch):
            Flush([entry], f"{id_}-{secrets.token_hex(4)}").write(folder)
            folder.remove(file.path)
            taken += 1
    return taken
