"""Shortages of this process (descriptors, threads, memory, disk), and how errors show them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError
from typing import Final, Literal

Resource = Literal["descriptors", "threads", "memory", "disk"]

START_WITHIN_S: Final = 10.0
"""How long the threads of a pool may take to start."""

_BY_ERRNO: Final[dict[int, Resource]] = {
    errno.EMFILE: "descriptors",
    errno.ENFILE: "descriptors",
    errno.ENOMEM: "memory",
    errno.ENOBUFS: "memory",
    errno.ENOSPC: "disk",
    errno.EDQUOT: "disk",
}
_NO_THREAD: Final = "can't start new thread"


def shortage_of(error: BaseException) -> Resource | None:
    """Return the resource whose shortage caused an error; None for any other cause."""
    for cause in causes(error):
        if isinstance(cause, MemoryError):
            return "memory"
        if isinstance(cause, RuntimeError) and _NO_THREAD in str(cause):
            return "threads"
        if isinstance(cause, OSError) and (found := _BY_ERRNO.get(cause.errno or 0)):
            return found
    return None


def is_out_of_descriptors() -> bool:
    """Return whether this process can open no file now.

    Some libraries hide the reason of a failure: ``getaddrinfo`` calls a name unknown if it cannot open
    ``/etc/hosts``.
    """
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return shortage_of(error) == "descriptors"
    return False


def started_threads(threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads all run already, so that it needs no new one later.

    Raises:
        RuntimeError: a thread cannot be started.
    """
    pool = ThreadPoolExecutor(threads, name)
    all_run = Barrier(threads)
    for _ in range(threads):
        pool.submit(_wait, all_run)
    return pool


def _wait(all_run: Barrier) -> None:
    """Keep one thread of a pool busy until each has work, since an idle one would be given the next work."""
    with suppress(BrokenBarrierError):
        all_run.wait(START_WITHIN_S)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that led to it."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        cause = waiting.pop()
        if cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            waiting += [cause.__context__, cause.__cause__]
