"""A program that holds a lease before it forks: gunicorn with `preload_app`, or `multiprocessing`."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from typing import Any, Final

from quotagate_client import Client
from tests.clients.forked import FIRST, KEY, URL, WORKERS


def frozen() -> float:
    """A clock that never moves: so no lease ends while a busy machine is slow."""
    return 0.0


CLIENT: Final = Client(URL, key=KEY, clock=frozen)
names: Any = {"principal": os.environ["QUOTAGATE_PRINCIPAL"], "usage": {"requests": 1}}
WORK: Final = CLIENT.leased(**names, lease_ms=10_000).__enter__()
assert WORK.decide(FIRST).source == "local"
take: Final = WORK.take  # as a hot loop keeps it
ready: Final = multiprocessing.get_context("fork").Barrier(WORKERS)


def spent() -> int:
    """Return how many units this process gets; check that it spends no inherited lease."""
    assert not take(), "a lease of the parent was spent"
    admitted = 0
    while WORK.decide().may_go_ahead:
        admitted += 1
    return admitted


def pooled(_: int) -> int:
    """The same, once in each worker of a pool."""
    ready.wait()
    return spent()


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """The same as a WSGI application, once in each worker."""
    ready.wait()
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(spent()).encode()]
