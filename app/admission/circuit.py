"""The circuit before the store: opens when a call fails, closes when an examination finds the store well."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import sleep
from collections.abc import Awaitable, Sequence
from typing import Final, Protocol, TypeVar

import structlog

from app.admission.ending import end
from app.store.port import Answer, Fault, Plan, Store, StoreError

T = TypeVar("T")

EXAMINE_EVERY_S: Final = 5.0
"""How often a store that is well is examined, so that what is wrong is known before an ask meets it."""

SETTLED_S: Final = 1.0
"""A store that was well for so long is well: the next failure is a new one, and looked at at once."""

PAUSES_S: Final = (0.05, 0.1, 0.25)
"""How long to wait before each examination that follows a failed one; the last pause is repeated.

The first examination comes at once, so that one cut connection costs hardly an ask. A store that stays away
sees at most four connections a second of each process, and its return is noticed within the last pause.
"""

log = structlog.get_logger("quotagate.store")


class Counted(Protocol):
    """Who counts what the circuit sees; ``app.admission.metrics`` does."""

    def called(self, asks: int, seconds: float) -> None:
        """Count a call, however it ended."""

    def failed(self, reason: str) -> None:
        """Count a call or an examination that failed."""

    def store_is(self, *, away: bool, faults: Sequence[str]) -> None:
        """Take down how the store is now."""


class Circuit:
    """A store behind a circuit: while it is open no ask waits for the store, and one task looks after it.

    How long the store may be silent is not this class's affair, but ``app.admission.gather``'s, which gives
    a call up in the end.

    Attributes:
        error: why the circuit is open; None while it is closed.
        faults: what was wrong with the store's set-up when it was examined last.
    """

    def __init__(self, store: Store, counted: Counted) -> None:
        self.error: StoreError | None = None
        self.faults: tuple[Fault, ...] = ()
        self._store = store
        self._counted = counted
        self._failed = asyncio.Event()
        self._replied = 0
        store.lost = self._lost
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Examine the store once, and from then on until stopped."""
        await self._examine()
        self._watching = asyncio.create_task(self._watch(), name="watch the store")

    async def stop(self) -> None:
        """Look after the store no more."""
        if self._watching is not None:
            await end(self._watching)

    async def decide(self, plans: Sequence[Plan]) -> list[Answer]:
        """Decide plans in one call to the store: all of them, or the first ones, as it answers.

        Raises:
            StoreError: the call failed, or none was made as the circuit is open.
        """
        if self.error is not None:
            raise self.error
        began = asyncio.get_running_loop().time()
        try:
            return await self._called(self._store.decide(plans))
        finally:
            self._counted.called(len(plans), asyncio.get_running_loop().time() - began)

    def silent_since(self) -> float | None:
        """Since when the store owes a reply and says nothing, by the loop's clock; None while it does not."""
        return self._store.silent_since()

    def give_up(self) -> None:
        """Fail the calls under way: the store has been silent for too long."""
        self._store.give_up(StoreError("timeout", "it does not reply"))

    async def forget(self, keys: Sequence[bytes]) -> int | None:
        """Remove the buckets of these keys, all of them or none; the place of that in the order of the log.

        Raises:
            StoreError: the call failed, or none was made as the circuit is open.
        """
        if self.error is not None:
            raise self.error
        return await self._called(self._store.forget(keys))

    async def _called(self, call: Awaitable[T]) -> T:
        """The answer to a call, whose failure, of whatever kind, opens the circuit."""
        try:
            reply = await call
        except Exception as error:
            failed = _failure(error)
            self._opens(failed)
            raise failed from error
        self._replied += 1
        return reply

    def _lost(self, error: StoreError) -> None:
        """Take note that the connection for calls is lost: an examination makes a new one."""
        self._opens(error)

    async def _watch(self) -> None:
        clock, row, closed_at = asyncio.get_running_loop().time, 0, 0.0
        while True:
            if self.error is None:
                failed = await self._pause(EXAMINE_EVERY_S)
                # A store that passes examinations and fails calls is not examined without a pause.
                row = row + 1 if failed and clock() - closed_at < SETTLED_S else 0
            else:
                row += 1
            if row:
                await sleep(PAUSES_S[min(row, len(PAUSES_S)) - 1])
            if await self._examine():
                closed_at = clock()

    async def _pause(self, seconds: float) -> bool:
        """Wait so long, or until a call fails: whether one did."""
        self._failed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._failed.wait()
        return self._failed.is_set()

    async def _examine(self) -> bool:
        replied = self._replied
        try:
            faults = await self._store.examine()
        except Exception as error:  # noqa: BLE001  whatever it is, the next examination comes
            failed = _failure(error)
            if self.error is None and failed.reason == "timeout" and self._replied > replied:
                return True  # calls were answered meanwhile: it is the examination that was held up
            self._opens(failed)
            return False
        self._closes(faults)
        return True

    def _opens(self, error: StoreError) -> None:
        if self.error is None:
            log.warning(
                "the store is away; quotas answer by on_store_failure", reason=error.reason, why=str(error)
            )
            self._failed.set()
        self.error = error
        self._counted.failed(error.reason)
        self._counted.store_is(away=True, faults=[fault.name for fault in self.faults])

    def _closes(self, faults: tuple[Fault, ...]) -> None:
        if self.error is not None:
            log.info("the store is back")
        for fault in faults:
            if fault not in self.faults:
                log.warning("the store is not as it should be", fault=fault.name, why=fault.detail)
        self.error, self.faults = None, faults
        self._counted.store_is(away=False, faults=[fault.name for fault in faults])


def _failure(error: Exception) -> StoreError:
    """What went wrong, as a failure of the store; what nobody foresaw is logged whole."""
    if isinstance(error, StoreError):
        return error
    log.error("the store failed in a way that nobody foresaw", exc_info=error)
    return StoreError("unexpected", repr(error))
