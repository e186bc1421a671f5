"""Long work on the event loop in slices of 2 ms, by fair turns, so that no request blocks the others.

Decoding and planning a large body takes up to tens of milliseconds. Such work is written as a generator that
yields between steps. An iteration of the loop spends at most 2 ms on work that waits, and 2 ms more on new
work of callers that have nothing waiting: short work is therefore done at once. A slice is exceeded only by
its last step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from time import perf_counter
from typing import Any, Final, NamedTuple, TypeVar

from app.admission.gathering.fair_turns import FairTurns

T = TypeVar("T")
Work = Generator[None, None, T]
"""Work that can be interrupted at each ``yield`` and resumed later; its return value is the result."""

SLICE_S: Final = 0.002
"""Time per iteration of the event loop for waiting work, and again for new work of callers without any."""

STRIDE: Final = 32
"""How many asks of a batch are read, planned or answered in one step."""

IDS_FOR_AN_ASK: Final = 2
"""How many producer ids take as long as an ask: each is hashed."""


class Stride:
    """Tells when a step of work on many asks has become long enough."""

    def __init__(self) -> None:
        self._weight = 0

    def is_full(self, ids: int = 0) -> bool:
        """Add an ask with so many producer ids; return whether the step ends with it, and the next begins."""
        self._weight += 1 + ids // IDS_FOR_AN_ASK
        if self._weight < STRIDE:
            return False
        self._weight = 0
        return True


def step(make: Callable[[], T]) -> Work[T]:
    """Make work of a single step, which cannot be interrupted."""
    yield from ()
    return make()


def completed(work: Work[T]) -> T:
    """Do work at once, without interruption."""
    try:
        while True:
            next(work)
    except StopIteration as done:
        result: T = done.value
    return result


class SlicedJob(NamedTuple):
    """Unfinished work, and the future for its result."""

    work: Work[Any]
    result: asyncio.Future[Any]


class Slices:
    """Runs work at once while the iteration of the loop has time left for it, and otherwise in slices.

    Args:
        slice_s: the length of a slice.
        clock: the time in seconds.
    """

    def __init__(self, slice_s: float = SLICE_S, clock: Callable[[], float] = perf_counter) -> None:
        self._slice_s = slice_s
        self._clock = clock
        self._turns: FairTurns[deque[SlicedJob]] = FairTurns(deque)
        self._used_s = 0.0
        self._is_scheduled = False

    @property
    def waiting(self) -> int:
        """How many callers have unfinished work."""
        return len(self._turns)

    async def run(self, turn: str, work: Work[T]) -> T:
        """Return the result of some work, or raise its exception.

        Args:
            turn: names the caller, for fair turns.
        """
        loop = asyncio.get_running_loop()
        if self._has_time(turn):
            self._schedule_slice(loop)
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
        future: asyncio.Future[T] = loop.create_future()
        self._schedule_slice(loop)
        self._turns.of(turn).append(SlicedJob(work, future))
        try:
            return await future
        finally:
            del future  # else an error, its frame and the future form a cycle, which keeps the body

    def _has_time(self, turn: str) -> bool:
        """Return whether this iteration of the loop has time left for new work of a caller."""
        most_s = 2 * self._slice_s if self._turns else self._slice_s
        return self._used_s < most_s and self._turns.waiting(turn) is None

    def _schedule_slice(self, loop: asyncio.AbstractEventLoop) -> None:
        """Schedule the next iteration of the loop, which starts with a fresh slice."""
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._next_slice, loop)

    def _next_slice(self, loop: asyncio.AbstractEventLoop) -> None:
        self._used_s, self._is_scheduled = 0.0, False
        if self._turns:
            self._schedule_slice(loop)
            began = self._clock()
            self._resume(began + self._slice_s)
            self._used_s = self._clock() - began

    def _resume(self, until: float) -> None:
        began = self._clock()
        while self._turns and began < until:
            _, jobs = self._turns.first()
            job = jobs[0]
            if job.result.done() or _has_ended(job, until, self._clock):
                jobs.popleft()
            ended = self._clock()
            self._turns.charge(ended - began, is_left=bool(jobs))
            began = ended


def _has_ended(job: SlicedJob, until: float, clock: Callable[[], float]) -> bool:
    """Resume a job until that time; return whether it is finished."""
    try:
        while True:
            next(job.work)
            if clock() >= until:
                return False
    except StopIteration as done:
        job.result.set_result(done.value)
    except Exception as error:  # noqa: BLE001  raised where the result is awaited
        inner = error.__traceback__.tb_next if error.__traceback__ else None
        job.result.set_exception(error.with_traceback(inner))  # without this frame, which refers to the job
    return True
