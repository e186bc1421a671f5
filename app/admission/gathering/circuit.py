"""The circuit breaker in front of the store: while it is open, no ask waits for the store.

A failed call opens the circuit. One task then examines the store, first at once and then after pauses of 50,
100 and always 250 ms, and closes the circuit when an examination succeeds. A store that stays away therefore
sees at most four connections a second from each process, and its return is noticed within 250 ms. While the
circuit is closed, the store is examined every 5 s.

A shortage of this process (``ShortageError``) is no failure of the store. It closes the circuit, as nothing
is known against the store; the examination is retried as after a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import sleep
from collections.abc import Awaitable, Mapping, Sequence
from time import monotonic
from typing import Final, TypeVar

import structlog

from app.admission.metrics.metrics import Metrics
from app.node.tasks import end
from app.store.port import (
    NONE_KNOWN,
    Answer,
    AnswersCallback,
    Fault,
    LiveLayer,
    Plan,
    ShortageError,
    Store,
    StoreError,
    as_shortage,
)

T = TypeVar("T")

EXAMINE_EVERY_S: Final = 5.0
"""How often a working store is examined, to find a fault before an ask does."""

SETTLED_S: Final = 1.0
"""The time of work after which the store counts as recovered: the next failure is examined at once."""

PAUSES_S: Final = (0.05, 0.1, 0.25)
"""The pauses before the examinations that follow a failed one; the last pause is repeated."""

log = structlog.get_logger("quotagate.store")


class Circuit:
    """Passes calls to a store while the circuit is closed.

    It does not limit how long a call takes: the gatherer gives up a call that lasts too long.

    Attributes:
        error: why the circuit is open; None while it is closed.
        faults: the misconfigurations that the last examination found.
    """

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self.error: StoreError | None = None
        self.faults: tuple[Fault, ...] = ()
        self._store = store
        self._metrics = metrics
        self._failed = asyncio.Event()
        self._replied = 0
        self._working_since = 0.0
        self._reconnects = False
        self._is_short = False
        """Whether this process was short of something when it last wanted to examine the store."""
        store.lost = self._handle_loss
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Examine the store once, and then regularly until ``stop``."""
        await self._examine()
        self._watching = asyncio.create_task(self._watch(), name="watch the store")

    async def stop(self) -> None:
        """Stop examining the store."""
        await end(self._watching)

    def ask(self, plans: Sequence[Plan], done: AnswersCallback) -> None:
        """Decide plans in one call; the store may answer only the first ones.

        Args:
            done: called once and never before this returns, with the answers or the ``StoreError`` of the
                call. An open circuit is such an error.
        """
        loop = asyncio.get_running_loop()
        if self.error is not None:
            loop.call_soon(done, self.error)
            return
        began = monotonic()  # the loop's clock shows when its iteration began

        def came(answers: list[Answer] | Exception) -> None:
            seconds = monotonic() - began
            if isinstance(answers, Exception):
                done(self._failed_call(answers))
            else:
                self._replied += 1
                done(answers)
            loop.call_soon(self._metrics.observe_call, len(plans), seconds)  # behind the answers

        try:
            self._store.ask(plans, came)
        except Exception as error:  # noqa: BLE001  a fault of this program is one of the call
            loop.call_soon(came, error)

    def silent_since(self) -> float | None:
        """Return since when the store has owed a reply, by the loop's clock; None if it owes none."""
        return self._store.silent_since()

    def give_up(self, error: StoreError) -> None:
        """Fail the calls under way with this error."""
        self._store.give_up(error)

    async def forget(self, keys: Sequence[bytes], known_ms: Mapping[bytes, int] = NONE_KNOWN) -> int | None:
        """Remove these buckets, all or none; return the position in the order of the decision log.

        Raises:
            StoreError: the call failed, or the circuit is open.
        """
        if self.error is not None:
            raise self.error
        return await self._reply_to(self._store.forget(keys, known_ms))

    async def live_layers(self, key: bytes, now_ms: int, ttl_ms: int) -> list[LiveLayer]:
        """Read the live layers of a bucket; see ``StoreCalls``. A failure does not open the circuit.

        Raises:
            StoreError: the call failed, or the circuit is open.
        """
        if self.error is not None:
            raise self.error
        return await self._store.live_layers(key, now_ms, ttl_ms)

    async def _reply_to(self, call: Awaitable[T]) -> T:
        """Return the reply to a call; any failure opens the circuit."""
        try:
            reply = await call
        except Exception as error:
            raise self._failed_call(error) from error
        self._replied += 1
        return reply

    def _failed_call(self, error: Exception) -> StoreError:
        failed = _as_store_error(error)
        if isinstance(failed, ShortageError):
            if not self._is_short:  # else the examination has counted it
                self._metrics.count_shortage(failed.resource, failed)
        elif not self._reconnects:
            self._open(failed)
        return failed

    def _handle_loss(self, error: StoreError) -> None:
        """Handle a lost connection: reconnect by an examination; open the circuit if it is lost again.

        A store that drops one connection still works. The current call has failed, but other asks only have
        to wait for the new connection.
        """
        if isinstance(error, ShortageError):
            self._metrics.count_shortage(error.resource, error)
            self._reconnects = self.error is None
            self._failed.set()
        elif self.error is None and self._is_settled() and not self._reconnects:
            self._reconnects = True
            self._metrics.count_failure(error.reason)
            self._failed.set()
        else:
            self._open(error)

    def _is_settled(self) -> bool:
        return asyncio.get_running_loop().time() - self._working_since >= SETTLED_S

    async def _watch(self) -> None:
        row = 0
        while True:
            failed = True
            if self.error is None and not self._is_short:
                failed = await self._pause(EXAMINE_EVERY_S)
                # A store that passes examinations but fails calls must not be examined without a pause.
                row = row + 1 if failed and not self._is_settled() else 0
            else:
                row += 1
            if row:
                await sleep(PAUSES_S[min(row, len(PAUSES_S)) - 1])
            if await self._examine() and failed:
                self._working_since = asyncio.get_running_loop().time()

    async def _pause(self, seconds: float) -> bool:
        """Wait so long, or until a call fails; return whether one did."""
        self._failed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._failed.wait()
        return self._failed.is_set()

    async def _examine(self) -> bool:
        replied = self._replied
        try:
            faults = await self._store.examine()
        except Exception as error:  # noqa: BLE001  the next examination comes anyway
            failed = _as_store_error(error)
            self._is_short = isinstance(failed, ShortageError)
            if isinstance(failed, ShortageError):
                self._metrics.count_shortage(failed.resource, failed)
                if self.error is not None:
                    self.error = None
                    self._show_state()
                return False
            answered = self._replied > replied and not self._reconnects
            if self.error is None and failed.reason == "timeout" and answered:
                return True  # calls were answered meanwhile, so only the examination was slow
            self._open(failed)
            return False
        self._is_short = False
        self._close(faults)
        return True

    def _open(self, error: StoreError) -> None:
        if self.error is None or (error.reason == "permission" and str(error) != str(self.error)):
            log.warning(
                "the store is not available; quotas follow on_store_failure",
                reason=error.reason,
                why=str(error),
            )
            self._failed.set()
        self.error = error
        self._metrics.count_failure(error.reason)
        self._show_state()
        if self._reconnects:
            self._reconnects = False
            self._store.give_up(error)

    def _close(self, faults: tuple[Fault, ...]) -> None:
        if self.error is not None:
            log.info("the store is available again")
        for fault in faults:
            if fault not in self.faults:
                log.warning("the store is misconfigured", fault=fault.name, why=fault.detail)
        self.error, self.faults, self._reconnects = None, faults, False
        self._show_state()

    def _show_state(self) -> None:
        self._metrics.set_store_state(
            away=self.error is not None, faults=[fault.name for fault in self.faults]
        )


def _as_store_error(error: Exception) -> StoreError:
    """Return an error as a ``StoreError``; an unexpected one is logged with its traceback."""
    if isinstance(error, StoreError):
        return error
    if (short := as_shortage(error)) is not None:
        return short
    log.error("unexpected error in a store call", exc_info=error)
    return StoreError("unexpected", repr(error))
