"""The worker `decision-log`: whoever leads writes the log and looks after its files; the others stand by."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from typing import Final, NamedTuple

import structlog
from redis.asyncio import Redis

from app.place import NoPlace
from app.run.errors import SettingsRefused
from app.run.own_name import own_name
from app.run.settings import PREFIX, Settings
from app.store import decision_log_standing
from app.store.lease import Lease
from app.store.port import StoreError
from app.store.redis import client_of
from workers.decision_log.compact import STAY_S, Compactor
from workers.decision_log.drain import LIMITS, Drain, Limits, wait
from workers.decision_log.folder import Folder, reason
from workers.decision_log.retention import bound, retain
from workers.decision_log.stream import Stream
from workers.decision_log.unreadable import take_up

LEASE: Final = "decision-log"
CALL_WITHIN_S: Final = 5.0
SEEN_EVERY_S: Final = 2.0
AFTER_SURPRISE_S: Final = 5.0

log = structlog.get_logger("quotagate.log")


class Times(NamedTuple):
    """How often what is done beside writing, in seconds.

    Attributes:
        lease: how long a leader that hangs keeps the others waiting.
        upkeep: between two looks at what can be merged or removed.
        bound: between two looks at how large the log is, where it has a bound.
        stay: how long files stay beside the merged one that holds them.
    """

    lease: float = 10.0
    upkeep: float = 600.0
    bound: float = 60.0
    stay: float = STAY_S


TIMES: Final = Times()


class Kept(NamedTuple):
    """How much of the log is kept: for how long, and how many bytes at most, or None for all."""

    retention: timedelta
    most: int | None


async def run(
    settings: Settings, stop: asyncio.Event, *, limits: Limits = LIMITS, times: Times = TIMES
) -> None:
    """Write the log until stopped; nothing at all where it is off.

    Raises:
        SettingsRefused: the log's URL is none.
    """
    if settings.log == "off":
        await stop.wait()
        return
    assert settings.redis_url is not None, "whoever starts the workers knows the store"
    try:
        folder = Folder(settings.log_url or settings.home / "log")
        await asyncio.to_thread(folder.check)
    except NoPlace as error:
        raise SettingsRefused(f"{PREFIX}LOG_URL: {error}") from error
    client = client_of(settings.redis_url, CALL_WITHIN_S)
    worker = Worker(client, folder, Kept(settings.log_retention, settings.log_max_bytes), limits, times)
    try:
        while not stop.is_set():
            try:
                await worker.turn(stop)
            except Exception:
                log.exception("the decision log stopped in a way that nobody foresaw, and begins anew")
                await wait(stop, AFTER_SURPRISE_S)
    finally:
        await client.aclose()


class Worker:
    """One contender for the lease of the log."""

    def __init__(self, client: Redis, folder: Folder, kept: Kept, limits: Limits, times: Times) -> None:
        self._client = client
        self._folder = folder
        self._kept_ms = round(kept.retention.total_seconds() * 1000)
        self._most = kept.most
        self._over_bound = False
        self._limits = limits
        self._times = times
        self._lease = Lease(client, LEASE, own_name(), times.lease)
        self._compactor = Compactor(folder, stay_s=times.stay)
        self._upkeep_failed = ""

    async def turn(self, stop: asyncio.Event) -> None:
        """Lead, if nobody else does, until stopped or the lease is lost; else stand by for a while."""
        try:
            leads = await self._lease.acquire() is not None
        except StoreError:
            leads = False  # the nodes tell of it loudly enough
        if not leads:
            await wait(stop, self._times.lease / 3)
            return
        log.info("the decision log is written by this worker", folder=self._folder.name)
        over = asyncio.Event()
        drain = Drain(Stream(self._client), self._folder, self._limits)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hold(stop, over))
            tasks.create_task(self._report(drain, over))
            tasks.create_task(self._look_after(drain, over))
            await drain.run(over)
        if stop.is_set():
            await drain.finish()
            with contextlib.suppress(StoreError):
                await self._lease.release()

    async def _hold(self, stop: asyncio.Event, over: asyncio.Event) -> None:
        """Renew the lease until it is lost or no longer wanted; then it is over."""
        clock = asyncio.get_running_loop().time
        ends_at = clock() + self._times.lease
        while not stop.is_set():
            await wait(stop, self._times.lease / 3)
            asked_at = clock()
            try:
                if await self._lease.acquire() is None:
                    break
                ends_at = asked_at + self._times.lease
            except StoreError:
                if clock() >= ends_at:
                    break
        if not stop.is_set():
            log.warning("the decision log is no longer written by this worker: its lease ended")
        over.set()

    async def _report(self, drain: Drain, over: asyncio.Event) -> None:
        """Leave in the store how the writing goes."""
        while not over.is_set():
            failures = drain.failures
            with contextlib.suppress(StoreError):
                await decision_log_standing.seen(
                    self._client, failures=failures, error=drain.error or self._upkeep_failed
                )
                drain.failures -= failures
            await wait(over, SEEN_EVERY_S)

    async def _look_after(self, drain: Drain, over: asyncio.Event) -> None:
        """Merge small files, remove old ones, take up what an older writer could not read.

        Whatever goes wrong with it is tried again at the next turn, and never ends the writing.
        """
        begins = True
        clock = asyncio.get_running_loop().time
        due = clock()
        pause_s = self._times.upkeep if self._most is None else min(self._times.upkeep, self._times.bound)
        while not over.is_set():
            try:
                if clock() >= due:
                    await asyncio.to_thread(self._keep_in_order, self._lease.now_ms, over, begins=begins)
                    due = clock() + self._times.upkeep
                    begins = False
                if self._most is not None:
                    await asyncio.to_thread(self._keep_small, self._lease.now_ms, self._most)
                if self._upkeep_failed:
                    log.info("the files of the decision log are looked after again")
                self._upkeep_failed = ""
            except Exception as error:  # noqa: BLE001
                drain.failures += 1
                said, self._upkeep_failed = self._upkeep_failed, reason(error)
                if said != self._upkeep_failed:
                    log.warning(
                        "the files of the decision log cannot be looked after",
                        folder=self._folder.name,
                        reason=self._upkeep_failed,
                        why=f"{type(error).__name__}: {self._folder.told(error)}",
                    )
            await wait(over, pause_s)

    def _keep_in_order(self, now_ms: int, over: asyncio.Event, *, begins: bool) -> None:
        taken = take_up(self._folder) if begins else 0
        removed = retain(self._folder, now_ms, self._kept_ms)
        merged = self._compactor.compact(now_ms, over.is_set)
        if taken or removed or merged:
            log.info(
                "looked after the decision log", batches_taken_up=taken, hours_removed=removed, merged=merged
            )

    def _keep_small(self, now_ms: int, most: int) -> None:
        found = bound(self._folder, now_ms, most)
        if found.removed:
            log.warning(
                "the decision log was beyond its bound, and its oldest hours were removed",
                hours_removed=found.hours,
                bytes_removed=found.removed,
                bytes_left=found.left,
                bound=most,
            )
        said, self._over_bound = self._over_bound, found.left > most
        if self._over_bound and not said:
            log.warning(
                "the decision log is beyond its bound, and the hour being written is kept",
                bytes=found.left,
                bound=most,
            )
