"""The worker `decision-log`: the leader writes the log and maintains its files; the others wait."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final, NamedTuple

import structlog
from redis.asyncio import Redis

from app.decision_log.status import heartbeat
from app.decision_log.stream import StreamReader
from app.node.errors import SettingsError
from app.node.own_name import own_name
from app.node.settings import PREFIX, Settings
from app.storage_location import InvalidLocationError
from app.store.client import client_of
from app.store.leader_election import Contender
from app.store.port import StoreError
from workers.decision_log.compact import STAY_S, Compactor
from workers.decision_log.drain import LIMITS, Drain, Limits, wait
from workers.decision_log.flush import take_up
from workers.decision_log.folder import Folder, reason
from workers.decision_log.retention import bound, retain

LEASE: Final = "decision-log"
CALL_WITHIN_S: Final = 5.0
SEEN_EVERY_S: Final = 2.0
AFTER_SURPRISE_S: Final = 5.0

log = structlog.get_logger("quotagate.log")


class Times(NamedTuple):
    """How often the leader does its work besides writing, in seconds.

    Attributes:
        lease: how long a lease lasts, and so how long a leader that hangs keeps the others waiting.
        upkeep: the time between two checks for files to merge or remove.
        bound: the time between two checks of the log's size, if it has a limit.
        stay: how long files are kept after they were merged.
    """

    lease: float = 10.0
    upkeep: float = 600.0
    bound: float = 60.0
    stay: float = STAY_S


TIMES: Final = Times()


async def run(
    settings: Settings, stop: asyncio.Event, *, limits: Limits = LIMITS, times: Times = TIMES
) -> None:
    """Write the log until stopped; do nothing if it is off.

    Raises:
        SettingsError: the log's URL is invalid.
    """
    if settings.log == "off":
        await stop.wait()
        return
    assert settings.redis_url is not None, "whoever starts the workers knows the store"
    try:
        folder = Folder(settings.log_url or settings.home / "log")
        await asyncio.to_thread(folder.check)
    except InvalidLocationError as error:
        raise SettingsError(f"{PREFIX}LOG_URL: {error}") from error
    client = client_of(settings.redis_url, CALL_WITHIN_S)
    worker = Worker(client, folder, settings, limits, times)
    try:
        while not stop.is_set():
            try:
                await worker.contend(stop)
            except Exception:
                log.exception("decision log writer failed unexpectedly and restarts")
                await wait(stop, AFTER_SURPRISE_S)
    finally:
        await client.aclose()


class Worker:
    """One contender for the lease of the log."""

    def __init__(
        self, client: Redis, folder: Folder, settings: Settings, limits: Limits, times: Times
    ) -> None:
        self._client = client
        self._folder = folder
        self._kept_ms = round(settings.log_retention.total_seconds() * 1000)
        self._most = settings.log_max_bytes
        self._over_bound = False
        self._limits = limits
        self._times = times
        self._lease = Contender(client, LEASE, own_name(), times.lease)
        self._compactor = Compactor(folder, stay_s=times.stay)
        self._upkeep_failed = ""

    async def contend(self, stop: asyncio.Event) -> None:
        """Lead until stopped or the lease is lost, if nobody else leads; otherwise wait for a while."""
        try:
            leads = await self._lease.acquire() is not None
        except StoreError:
            leads = False  # the nodes report it
        if not leads:
            await wait(stop, self._times.lease / 3)
            return
        log.info("decision log writer leads", folder=self._folder.name)
        over = asyncio.Event()
        drain = Drain(StreamReader(self._client), self._folder, self._limits)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_lease(stop, over))
            tasks.create_task(self._report(drain, over))
            tasks.create_task(self._maintain(drain, over))
            await drain.run(over)
        if stop.is_set():
            await drain.finish()
            with contextlib.suppress(StoreError):
                await self._lease.release()

    async def _keep_lease(self, stop: asyncio.Event, over: asyncio.Event) -> None:
        """Keep the lease until it is lost or the worker stops; then set ``over``."""
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
        """Report to the store that the writer is alive, and its failures."""
        while not over.is_set():
            failures = drain.failures
            with contextlib.suppress(StoreError):
                await heartbeat(self._client, failures=failures, error=drain.error or self._upkeep_failed)
                drain.failures -= failures
            await wait(over, SEEN_EVERY_S)

    async def _maintain(self, drain: Drain, over: asyncio.Event) -> None:
        """Merge small files, remove old ones, and write batches that an older writer could not read.

        Any failure is retried after a pause, and never stops the writing.
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
                        why=f"{type(error).__name__}: {self._folder.redact(error)}",
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
