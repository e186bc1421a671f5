"""The writer's loop: reads batches from the stream, writes them to files, then acknowledges them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Callable
from typing import Final, NamedTuple

import pyarrow as pa
import structlog

from app.decision_log.stream import StreamEntry, StreamReader
from app.storage_location import InvalidLocationError
from app.store.port import StoreError
from workers.decision_log.admissions import size_as_rows
from workers.decision_log.flush import Flush
from workers.decision_log.folder import Folder, reason

PAUSES_S: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
"""How long to wait before each retry when the folder cannot be written; the last one repeats."""

STORE_PAUSES_S: Final = (0.05, 0.1, 0.5, 2.0)
"""The same, when the store does not answer."""

WAIT_MS: Final = 500
"""How long one call waits for new batches, and so how long a stop may take."""

FIRST_AT_ONCE: Final = 16
MOST_AT_ONCE: Final = 200
"""Batches in one call, before their size is known, and after."""

log = structlog.get_logger("quotagate.log")


class Limits(NamedTuple):
    """The collected batches are written as soon as one of these is reached.

    Attributes:
        packed: bytes, by ``size_as_rows``; while batches are written, they take about ten times as much
            memory.
    """

    rows: int = 50_000
    packed: int = 16 * 1024 * 1024
    age_s: float = 5.0


LIMITS: Final = Limits()


class Drain:
    """Moves batches from the stream to files, for the worker that leads.

    At most two lots are in memory: one is collected while the other is written. If nothing can be written,
    nothing more is read, and the stream fills up to its own bound.

    Attributes:
        error: why the folder cannot be written, in one word; empty if it can.
        failures: how often it could not be written since the last report.
    """

    def __init__(
        self,
        stream: StreamReader,
        folder: Folder,
        limits: Limits = LIMITS,
        clock: Callable[[], float] = time.monotonic,
        pauses_s: tuple[float, ...] = PAUSES_S,
    ) -> None:
        self.error = ""
        self.failures = 0
        self._stream = stream
        self._folder = folder
        self._limits = limits
        self._clock = clock
        self._pauses_s = pauses_s
        self._taken: list[StreamEntry] = []
        self._rows = self._packed = 0
        self._largest = 0
        """The largest entry so far; an estimate for how many more fit."""
        self._since = 0.0
        self._flush: Flush | None = None
        self._failed = 0
        self._again_at = 0.0
        self._done: list[tuple[bytes, int, int]] = []
        """Entries that are in files and not acknowledged yet."""

    async def run(self, over: asyncio.Event) -> None:
        """Run until ``over`` is set."""
        failed = 0
        while not over.is_set():
            try:
                await self._acknowledge()
                if not self._full:
                    await self._take()
            except StoreError as error:
                if not failed:
                    log.warning(
                        "the store is away; the decision log waits", reason=error.reason, why=str(error)
                    )
                pause_s = STORE_PAUSES_S[min(failed, len(STORE_PAUSES_S) - 1)]
                failed += 1
                await wait(over, pause_s)
            else:
                if failed:
                    log.info("the store is back; the decision log goes on")
                failed = 0
            if self._flush is None and (self._full or self._due_in_s <= 0):
                self._begin()
            if self._flush is not None and self._clock() >= self._again_at:
                await self._write(self._flush)
            elif self._full:
                await wait(over, self._again_at - self._clock())

    async def finish(self) -> None:
        """Write the collected batches. If that fails, they stay in the stream for the next leader."""
        for _ in range(2):  # the lot being written, and the one collected behind it
            if self.error:  # an object store that is away takes a dozen seconds to fail
                break
            if self._flush is None and self._taken:
                self._begin()
            if self._flush is not None:
                await self._write(self._flush)
        with contextlib.suppress(StoreError):
            await self._acknowledge()

    @property
    def _full(self) -> bool:
        return self._rows >= self._limits.rows or self._packed >= self._limits.packed

    @property
    def _due_in_s(self) -> float:
        return self._since + self._limits.age_s - self._clock() if self._taken else math.inf

    async def _take(self) -> None:
        fit = (self._limits.packed - self._packed) // self._largest if self._largest else FIRST_AT_ONCE
        count = max(1, min(fit, MOST_AT_ONCE))
        due_ms = WAIT_MS if self._flush else self._due_in_s * 1000
        found = await self._stream.read(count, round(max(min(due_ms, WAIT_MS), 1)))
        if found and not self._taken:
            self._since = self._clock()
        for entry in found:
            self._taken.append(entry)
            self._rows += max(entry.rows, 1)
            size = size_as_rows(entry.packed)
            self._packed += size
            self._largest = max(self._largest, size)

    def _begin(self) -> None:
        self._flush = Flush(self._taken, f"{self._taken[0].id.decode()}-{secrets.token_hex(4)}")
        self._taken = []
        self._rows = self._packed = 0

    async def _write(self, flush: Flush) -> None:
        try:
            await asyncio.to_thread(flush.write, self._folder)
        except (OSError, pa.ArrowException, InvalidLocationError) as error:
            self._cannot(error)
            return
        if self.error:
            log.info("the decision log is written again", folder=self._folder.name)
        self.error, self._failed = "", 0
        self._flush = None
        self._done += flush.done

    def _cannot(self, error: Exception) -> None:
        """Set when to retry, as the folder cannot be written; log the reason when it changes."""
        self.failures += 1
        self._again_at = self._clock() + self._pauses_s[min(self._failed, len(self._pauses_s) - 1)]
        self._failed += 1
        said, self.error = self.error, reason(error)
        if said != self.error:
            log.warning(
                "the decision log cannot be written; its batches wait in the store",
                folder=self._folder.name,
                reason=self.error,
                why=self._folder.redact(error),
            )

    async def _acknowledge(self) -> None:
        """Acknowledge the entries that are in files: only then do they leave the stream."""
        if self._done:
            await self._stream.done(self._done)
            self._done = []


async def wait(over: asyncio.Event, seconds: float) -> None:
    """Wait this long, or until ``over`` is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(seconds, 0.0)):
            await over.wait()
