"""Removing whole hours of the decision log once they are too old, and what was kept aside of their time."""

from __future__ import annotations

from workers.decision_log.flush import UNREADABLE
from workers.decision_log.folder import Folder
from workers.decision_log.schema import HOUR_MS, partition


def retain(folder: Folder, now_ms: int, kept_ms: int) -> int:
    """Remove the hours that ended, and were last written to, longer ago than that; how many.

    Both, so that neither a replay of old traffic nor a store whose clock is wrong loses what is new.

    Raises:
        OSError: the folder does not take it; the next call goes on.
    """
    before_ms = now_ms - kept_ms
    removed = 0
    for hour, files in sorted(folder.hours().items()):
        written_ms = max((file.mtime.timestamp() * 1000 for file in files if file.mtime), default=0.0)
        if hour + HOUR_MS <= before_ms and written_ms <= before_ms:
            for file in files:
                folder.remove(file.path)
            folder.leave(partition(hour))
            removed += 1
    for file in folder.files(UNREADABLE):
        if file.mtime and file.mtime.timestamp() * 1000 <= before_ms:
            folder.remove(file.path)
    return removed
