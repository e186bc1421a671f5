"""Blocking calls in threads, for calls that may hang and cannot be stopped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """Runs each call in a thread, at most one at a time for each key.

    A call may hang for longer than anyone waits for it, for instance in name resolution. It occupies its key
    until it returns, so hanging calls do not pile up. Such a thread does not keep the process alive.
    """

    def __init__(self) -> None:
        self._running: dict[str, Future[Any]] = {}

    async def call(self, key: str, call: Callable[[], T], within_s: float) -> T:
        """Return the result of a call, made after an earlier one with the same key has returned.

        Raises:
            TimeoutError: the call, or the earlier one, did not return in time.
        """
        async with asyncio.timeout(within_s):
            while (earlier := self._running.get(key)) is not None and not earlier.done():
                with suppress(Exception):  # the earlier caller gets it
                    await asyncio.shield(asyncio.wrap_future(earlier))
            result: Future[T] = Future()
            self._running[key] = result
            threading.Thread(target=_run, args=(result, call), name=f"kafka {key}", daemon=True).start()
            return await asyncio.wrap_future(result)

    def clear(self) -> None:
        """Forget calls that have returned."""
        self._running = {key: call for key, call in self._running.items() if not call.done()}


def _run(result: Future[T], call: Callable[[], T]) -> None:
    if not result.set_running_or_notify_cancel():
        return
    try:
        value = call()
    except BaseException as error:  # noqa: BLE001  the waiting caller gets it
        result.set_exception(error)
    else:
        result.set_result(value)
