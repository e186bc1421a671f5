"""Owners of connections and leases: only one process, or one event loop in it, may use each."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Final, TypeVar

from quotagate_client.errors import QuotagateError

T = TypeVar("T")
Owner = tuple[object, asyncio.AbstractEventLoop | None]

_owners: Final[dict[int, Owner]] = {}
_kept: Final[list[object]] = []


def here() -> Owner:
    """Return this process, which is never equal to its parent.

    The process number reveals a fork without Python's hooks, such as a fork by a server in C (uWSGI).
    """
    pid = os.getpid()
    return _owners.get(pid) or _owners.setdefault(pid, (object(), None))


def loop_here() -> Owner:
    """Return the running event loop of this process.

    Raises:
        RuntimeError: no event loop is running.
    """
    return here()[0], asyncio.get_running_loop()


if hasattr(os, "register_at_fork"):  # in a PID namespace of its own a child may have its parent's number
    os.register_at_fork(after_in_child=_owners.clear)


class Owned(dict[Owner, T]):
    """A value for each owner, made when the owner first looks it up.

    A value of a process that forked, or of a closed event loop, is dropped without closing it: the parent
    still uses its sockets and its leases, and its locks may be held for ever by threads of the parent.

    Args:
        make: makes a value; it must have no side effects: of two threads that call it, one loses its value.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        super().__init__()
        self._make = make

    def made(self) -> list[T]:
        """Return the values of this process, the newest first."""
        process = here()[0]
        return [value for owner, value in reversed(list(self.items())) if owner[0] is process]

    def __missing__(self, owner: Owner) -> T:
        value = self.setdefault(owner, self._make())
        for other in list(self):
            process, loop = other
            is_inherited = process is not owner[0]
            if is_inherited or (loop is not None and loop.is_closed()):
                dropped = self.pop(other, None)
                if is_inherited and loop is not None:
                    _kept.append(dropped)  # freeing it would write to the event loop that the parent runs
        return value


def lent(http: T) -> Callable[[], T]:
    """Return a function that gives the caller's own HTTP client to the process that first sends with it."""
    users: list[Owner] = []

    def give() -> T:
        users.append(here())
        if users[0] is not users[-1]:
            raise QuotagateError(
                "http was used before the fork, so its connections belong to the parent process; "
                "pass a function that makes it, and each process calls it"
            )
        return http

    return give
