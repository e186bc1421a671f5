"""Waits for sockets with any file descriptor; `select.select` refuses 1,024 and above."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Sequence


def ready(
    reading: Sequence[socket.socket], writing: Sequence[socket.socket] = (), timeout: float | None = None
) -> tuple[list[socket.socket], list[socket.socket]]:
    """Wait until a socket can be read or written.

    Args:
        reading: sockets to read from.
        writing: sockets to write to.
        timeout: in seconds; None waits without end.

    Returns:
        The sockets that can be read, and those that can be written; both are empty after the timeout.
    """
    with selectors.PollSelector() as selector:
        for one in reading:
            selector.register(one, selectors.EVENT_READ)
        for one in writing:
            selector.register(one, selectors.EVENT_WRITE)
        found = [key.fileobj for key, _ in selector.select(timeout)]
    return [one for one in reading if one in found], [one for one in writing if one in found]
