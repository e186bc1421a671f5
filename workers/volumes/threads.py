"""Blocking calls in threads, of which some may hang where nothing can end them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """A thread for each call, and never more than one under way to a place.

    A call may hang for longer than anyone waits for it, in the resolver of names for instance. It keeps its
    place until it comes back, so that such calls do not pile up, and does not keep the program from ending.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, Future[Any]] = {}

    async def call(self, place: str, call: Callable[[], T], within_s: float) -> T:
        """What a call gives back, after an earlier one to the same place.

        Raises:
            TimeoutError: it, or the earlier one, did not come back in time.
        """
        async with asyncio.timeout(within_s):
            while (earlier := self._under_way.get(place)) is not None and not earlier.done():
                with suppress(Exception):  # that was for whoever made that call
                    await asyncio.shield(asyncio.wrap_future(earlier))
            result: Future[T] = Future()
            self._under_way[place] = result
            threading.Thread(target=_into, args=(result, call), name=f"kafka {place}", daemon=True).start()
            return await asyncio.wrap_future(result)

    def clear(self) -> None:
        """Forget the places of calls that have come back."""
        self._under_way = {place: call for place, call in self._under_way.items() if not call.done()}


def _into(result: Future[T], call: Callable[[], T]) -> None:
    if not result.set_running_or_notify_cancel():
        return
    try:
        value = call()
    except BaseException as error:  # noqa: BLE001  it is raised again for whoever waits
        result.set_exception(error)
    else:
        result.set_result(value)
