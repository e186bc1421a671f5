"""Programs that fork with the lease of `tests.clients.preloaded` in hand, which only the parent may spend."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tests.clients.forked import WORKERS, Child, main, waiting
from tests.clients.preloaded import CLIENT, WORK, pooled, spent, take


def _summed(parts: list[int]) -> dict[str, int]:
    mine = 0
    while take():
        mine += 1
    WORK.close()
    return {"mine": mine, "children": sum(parts)}


def fork() -> object:
    """The parent spends while its children live."""
    with waiting(spent) as children:
        mine = sum(take() for _ in range(60))
    parts = [child.said() for child in children]
    found = _summed(parts)
    return {**found, "mine": mine + found["mine"]}


def twice() -> object:
    """A child forks again; in the middle it has a lease of its own."""

    def middle() -> object:
        mine = int(WORK.decide().may_go_ahead)
        return mine + Child(spent).said()

    return _summed([Child(middle).said()])


def thread() -> object:
    """A thread forks."""
    parts: list[int] = []

    def run() -> None:
        with contextlib.suppress(SystemExit):
            parts.append(Child(spent).said())
            return
        os._exit(0)

    forking = threading.Thread(target=run)
    forking.start()
    forking.join()
    return _summed(parts)


def leaving() -> object:
    """A child leaves the parent's `with`, and ends, without a decision of its own."""

    def leave() -> int:
        WORK.__exit__(None, None, None)
        CLIENT.close()
        return 0

    return _summed([Child(leave).said()])


def pool() -> object:
    """`multiprocessing` with the method fork."""
    with multiprocessing.get_context("fork").Pool(WORKERS) as workers:
        parts = workers.map(pooled, range(WORKERS), chunksize=1)
    return _summed(parts)


def executor() -> object:
    """`concurrent.futures` with the method fork."""
    with ProcessPoolExecutor(WORKERS, multiprocessing.get_context("fork")) as workers:
        parts = list(workers.map(pooled, range(WORKERS)))
    return _summed(parts)


def forkserver() -> object:
    """The fork server imports the module, so it holds a lease of half the rest; only its child spends."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.clients.preloaded"])
    queue = context.Queue()
    child = context.Process(target=_put_spent, args=(queue,))
    child.start()
    found = queue.get()
    child.join()
    return {"mine": 0, "children": found}


def _put_spent(queue: Any) -> None:
    queue.put(spent())


def untold() -> object:
    """A server in C forks, and tells Python nothing: no hook of `os.register_at_fork` runs (uWSGI).

    It forks while no other thread wants to run: the child's interpreter would wait for that one for ever.
    """
    reading, writing = os.pipe()
    time.sleep(0.01)  # a thread that was woken has its turn
    while not _is_alone():
        time.sleep(0.01)
    pid = ctypes.PyDLL(None).fork()
    if not pid:
        os.write(writing, str(spent()).encode())
        os._exit(0)
    os.close(writing)
    found = int(os.read(reading, 20))
    os.waitpid(pid, 0)
    os.close(reading)
    return _summed([found])


def _is_alone() -> bool:
    """Whether all other threads wait for something to happen, and not for their turn."""
    frames = [frame for of, frame in sys._current_frames().items() if of != threading.get_ident()]
    return all(frame.f_code is threading.Condition.wait.__code__ for frame in frames)


if __name__ == "__main__":
    main(globals())
