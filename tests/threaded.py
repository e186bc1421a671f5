"""A server of ``socketserver`` that answers in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import BaseServer
from typing import Final, TypeVar

AnyServer = TypeVar("AnyServer", bound=BaseServer)

POLL_EVERY_S: Final = 0.01
"""The interval at which the thread checks whether to end."""


@contextmanager
def threaded(server: AnyServer) -> Iterator[AnyServer]:
    """Let a server answer until the end of the block, and close it then."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(POLL_EVERY_S,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
