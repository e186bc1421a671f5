"""Work on the event loop in slices: no body holds the loop for long, and callers take turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from time import perf_counter
from typing import Any, Final, TypeVar

from app.admission.turns import Turns

T = TypeVar("T")
Work = Generator[None, None, T]
"""Work that can be left at each ``yield`` and gone on with later; its return value is the result."""

SLICE_S: Final = 0.002
"""What the work that waits may take of one turn of the event loop, and as much again what has just come from
callers that have nothing waiting; more only by the last step of it."""


def step(make: Callable[[], T]) -> Work[T]:
    """Work of one step, which cannot be left in the middle."""
    yield from ()
    return make()


class Job:
    """Work that is under way, and who waits for its result."""

    __slots__ = ("result", "work")

    def __init__(self, work: Work[Any], result: asyncio.Future[Any]) -> None:
        self.work = work
        self.result = result


class Slices:
    """Does work at once while little is done in a turn of the loop, and otherwise in slices, by fair turns.

    Args:
        clock: seconds, of which a slice takes so many.
    """

    def __init__(self, slice_s: float = SLICE_S, clock: Callable[[], float] = perf_counter) -> None:
        self._slice_s = slice_s
        self._clock = clock
        self._turns: Turns[deque[Job]] = Turns(deque)
        self._used_s = 0.0
        self._is_counting = False

    def __len__(self) -> int:
        """How many callers have work waiting."""
        return len(self._turns)

    async def run(self, turn: str, work: Work[T]) -> T:
        """The result of some work; what it raises is raised here.

        Args:
            turn: whose work it is, for fair turns.
        """
        loop = asyncio.get_running_loop()
        if (
            self._used_s < (2 * self._slice_s if self._turns else self._slice_s)
            and self._turns.waiting(turn) is None
        ):
            self._count(loop)
            began = self._clock()
            until = began + self._slice_s
            try:
                while True:
                    next(work)
                    if self._clock() >= until:
                        break
            except StopIteration as done:
                result: T = done.value
                return result
            finally:
                self._used_s += self._clock() - began
        job = Job(work, loop.create_future())
        self._count(loop)
        self._turns.of(turn).append(job)
        waited_for: T = await job.result
        return waited_for

    def _count(self, loop: asyncio.AbstractEventLoop) -> None:
        """See to it that the next turn of the loop has a slice of its own."""
        if not self._is_counting:
            self._is_counting = True
            loop.call_soon(self._next_turn, loop)

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._used_s, self._is_counting = 0.0, False
        if self._turns:
            self._count(loop)
            began = self._clock()
            self._go_on(began + self._slice_s)
            self._used_s = self._clock() - began

    def _go_on(self, until: float) -> None:
        began = self._clock()
        while self._turns and began < until:
            _, jobs = self._turns.first()
            job = jobs[0]
            if job.result.done() or _has_ended(job, until, self._clock):
                jobs.popleft()
            ended = self._clock()
            self._turns.took(ended - began, is_left=bool(jobs))
            began = ended


def _has_ended(job: Job, until: float, clock: Callable[[], float]) -> bool:
    """Go on with a job until then; whether it came to its end."""
    try:
        while True:
            next(job.work)
            if clock() >= until:
                return False
    except StopIteration as done:
        job.result.set_result(done.value)
    except Exception as error:  # noqa: BLE001  it is raised where the result is awaited
        job.result.set_exception(error)
    return True
