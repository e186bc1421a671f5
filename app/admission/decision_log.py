"""The node's side of the decision log: records decisions and sends them to the store in batches.

Nothing here delays a decision. The queue of rows is bounded in bytes. Rows that find no room there or in the
store are dropped and counted, and a row of the log reports them.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import sleep
from collections import Counter, deque
from collections.abc import Callable, Sequence
from heapq import nlargest
from operator import attrgetter
from typing import Final, Literal, NamedTuple, Protocol

import structlog

from app.admission.ending import end
from app.admission.log_rows import ChangeEntry, DecisionEntry, IdsEntry, LogEntry, Packing, size_of
from app.admission.logs import Logs
from app.admission.plan import Match
from app.decision_log.batch import Sibling
from app.decision_log.status import LogStatus
from app.domain.ask import Ask
from app.domain.decision import Decision, Verdict
from app.store.port import Answer, StoreError

Which = Literal["all", "denied", "off"]

SEND_EVERY_S: Final = 0.1
LOOK_EVERY_S: Final = 1.0
"""How often the node reads the status of the log, for its metrics."""

ROWS_IN_BATCH: Final = 250
"""The most rows in a batch: packing this many takes some milliseconds, in which no ask is answered."""

BATCH_BYTES: Final = 64 * 1024
"""A batch of this size is full, so that the log's share of the store is bounded in bytes too."""

MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
"""The most bytes that may wait to be sent, by estimate: one or two seconds of a fully loaded node."""

MOST_SIBLINGS: Final = 256
"""The most other nodes that a batch names, most recently seen first; each takes some 60 bytes."""

CLOSE_WITHIN_S: Final = 2.0

log: Final = structlog.get_logger("quotagate.log")


class Stream(Protocol):
    """Where batches go; ``app.decision_log.stream.LogStream`` is one."""

    async def append(self, batch: bytes, rows: int, node: str, number: int) -> bool:
        """Append a batch under its number; return False if the stream is full, and raise ``StoreError``."""

    async def status(self) -> LogStatus:
        """The status of the log, with what its writer reported; raises ``StoreError``."""


class PendingBatch(NamedTuple):
    """A batch that is being sent: its number, its rows, and the dropped rows that it reports, by reason."""

    batch: bytes
    number: int
    rows: int
    reported: Counter[str]


class DecisionLog(Logs):
    """Records decisions and sends them to the store.

    Args:
        which: every decision; those that are not plain admissions, and the outcomes of ids; or none.
        node: the name of this process, and of no other.
        secret: returns the deployment's hash secret.
        now_ms: the store's time, as this node knows it.
        plain_ids: keep ids as they were asked for, in addition to their digests.
        away: whether the store is known to be away, so that nothing is sent meanwhile.

    Attributes:
        dropped: rows that could not be logged, for lack of room or another reason.
        log_status: the status of the log at the last look; None before the first.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        which: Which,
        node: str,
        secret: Callable[[], bytes],
        now_ms: Callable[[], int],
        plain_ids: bool = False,
        away: Callable[[], bool] = lambda: False,
    ) -> None:
        self.dropped = 0
        self._away = away
        self.log_status: LogStatus | None = None
        self._stream = stream
        self._all, self._off = which == "all", which == "off"
        self.takes_admissions = self._all
        self._node = node
        self._secret = secret
        self._now_ms = now_ms
        self._plain_ids = plain_ids
        self._waiting: deque[LogEntry] = deque()
        self._bytes = 0
        self._number = 0
        self._pending: PendingBatch | None = None
        self._unreported: Counter[str] = Counter()
        """Dropped rows, by reason, that no row of the log reports yet."""
        self._sending: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._troubles: set[str] = set()

    async def open(self) -> None:
        """Begin to send batches."""
        if not self._off:
            self._sending = asyncio.create_task(self._send_on(), name="send the decision log")
            self._looking = asyncio.create_task(self._look_on(), name="look at the decision log")

    async def close(self) -> None:
        """Send what waits, within a time limit, and stop."""
        if self._sending is None:
            return
        await end(self._looking)
        await end(self._sending)
        try:
            async with asyncio.timeout(CLOSE_WITHIN_S):
                await self._send()
        except TimeoutError:
            self._drop(len(self._waiting) + (self._pending.rows if self._pending else 0), "the node ended")

    def decided(
        self,
        ask: Ask,
        matches: Sequence[Match],
        answer: Answer | None,
        decision: Decision,
        verdicts: Sequence[Verdict],
        failure: str | None,
    ) -> None:
        """Record a decision, if it is to be logged."""
        if self._off:
            return
        if self._all or decision.decision != "admit" or any(map(_differs_in_shadow, verdicts)):
            at_ms = self._at_ms(ask, answer)
            self._take(DecisionEntry("decision", at_ms, ask, matches, answer, decision, verdicts, failure))
        elif answer is not None:
            self.refreshed(ask, matches, answer)

    def late(
        self,
        ask: Ask,
        matches: Sequence[Match],
        answer: Answer,
        decision: Decision,
        verdicts: Sequence[Verdict],
    ) -> None:
        """Record what the store decided of an ask that had already been answered without it."""
        if self._off or ask.mode == "peek":
            return
        if self._all:
            at_ms = self._at_ms(ask, answer)
            failure = "store_full" if decision.source == "fallback" else None
            self._take(DecisionEntry("late", at_ms, ask, matches, answer, decision, verdicts, failure))
        else:
            self.refreshed(ask, matches, answer)

    def leased(
        self,
        kind: Literal["lease", "settlement"],
        ask: Ask,
        matches: Sequence[Match],
        answer: Answer,
        decision: Decision,
        verdicts: Sequence[Verdict],
        lease: tuple[bytes, int],
    ) -> None:
        """Record a lease that was asked for, or settled, whatever else is logged."""
        if not self._off:
            failure = "store_full" if decision.source == "fallback" else None
            at_ms = self._at_ms(ask, answer)
            self._take(DecisionEntry(kind, at_ms, ask, matches, answer, decision, verdicts, failure, lease))

    def refreshed(self, ask: Ask, matches: Sequence[Match], answer: Answer) -> None:
        """Record the outcomes of the ids of an ask that is not logged itself, if any id was written."""
        if not self._off and any(answer.id_outcomes):
            self._take(IdsEntry("ids", self._at_ms(ask, answer), ask, matches, answer))

    def renewed(self, ask: Ask, matches: Sequence[Match], answer: Answer) -> None:
        """Record the ids that this node wrote again, if any was written."""
        if not self._off and any(answer.id_outcomes):
            self._take(IdsEntry("renewal", self._at_ms(ask, answer), ask, matches, answer))

    def changed(
        self,
        kind: Literal["quota", "factor", "reset"],
        what: str,
        before: object,
        after: object,
        *,
        who: str | None = None,
        version: int | None = None,
        order: int | None = None,
    ) -> None:
        """Record a change of what decisions depend on; ``before`` and ``after`` are JSON values."""
        if not self._off:
            self._take(ChangeEntry(kind, self._now_ms(), what, before, after, who, version, order))

    def _at_ms(self, ask: Ask, answer: Answer | None) -> int:
        """When it was decided: by the caller's clock where that counts, else by the store's or the node's."""
        if ask.at_ms is not None:
            return ask.at_ms
        return answer.at_ms if answer is not None else self._now_ms()

    def _take(self, entry: LogEntry) -> None:
        size = size_of(entry)
        if self._bytes + size > MAX_WAITING_BYTES:
            self._drop(1, "too much waits to be sent")
            return
        self._bytes += size
        self._waiting.append(entry)

    def _drop(self, rows: int, why: str) -> None:
        self.dropped += rows
        self._unreported[why] += rows
        self._warn(f"rows of the decision log are dropped: {why}")

    def _warn(self, trouble: str) -> None:
        """Log a problem, only once while it lasts."""
        if trouble not in self._troubles:
            self._troubles.add(trouble)
            log.warning("decision log send failed", trouble=trouble)

    def _recover(self) -> None:
        if self._troubles:
            self._troubles.clear()
            log.info("decision log send recovered")

    async def _send_on(self) -> None:
        while True:
            await sleep(SEND_EVERY_S)
            try:
                await self._send()
            except Exception:
                log.exception("decision log send failed unexpectedly")  # and is tried again

    async def _look_on(self) -> None:
        while True:
            if not self._away():
                with contextlib.suppress(StoreError):  # then the last status stays
                    self.log_status = await self._stream.status()
            await sleep(LOOK_EVERY_S)

    async def _send(self) -> None:
        """Send all that waits; a batch whose sending was cut short goes first, unchanged."""
        while self._pending or self._waiting or self._unreported:
            self._pending = self._pending or self._next_batch()
            took = await self._deliver(self._pending)
            self._pending = None
            if not (took or self._waiting):
                return  # the dropped rows are reported when there is room
            await sleep(0)

    def _next_batch(self) -> PendingBatch:
        packing = Packing(self._secret(), plain_ids=self._plain_ids)
        reported, self._unreported = self._unreported, Counter()
        for why, rows in reported.items():
            packing.add(ChangeEntry("dropped", self._now_ms(), why, None, {"rows": rows}))
        lost = 0
        while self._waiting and packing.rows < ROWS_IN_BATCH and packing.size < BATCH_BYTES:
            entry = self._waiting.popleft()
            self._bytes -= size_of(entry)
            try:
                packing.add(entry)
            except Exception:
                lost += 1
                log.exception("decision log row could not be packed")
        if lost:
            self._drop(lost, "they could not be packed")
        if not packing.rows:
            return self._next_batch()  # which reports that
        self._number += 1
        batch = packing.batch(self._node, self._number, self._now_ms(), self._siblings())
        return PendingBatch(batch, self._number, packing.rows, reported)

    def _siblings(self) -> list[Sibling]:
        """The other nodes in the heartbeat when it was last read."""
        nodes = self.log_status.nodes if self.log_status is not None else ()
        others = (each for each in nodes if each.node != self._node)
        return nlargest(MOST_SIBLINGS, others, key=attrgetter("at_ms"))

    async def _deliver(self, pending: PendingBatch) -> bool:
        """Send a batch until the store has it or has no room. Its id makes a second copy harmless."""
        while True:
            if self._away():
                await sleep(SEND_EVERY_S)
                continue
            try:
                took = await self._stream.append(pending.batch, pending.rows, self._node, pending.number)
            except StoreError as error:
                self._warn(f"the store does not take batches: {error.reason}")
                await sleep(SEND_EVERY_S)
                continue
            if took:
                self._recover()
            else:
                self._unreported += pending.reported
                if rows := pending.rows - len(pending.reported):
                    self._drop(rows, "the stream is full, as nobody reads it")
            return took


def _differs_in_shadow(verdict: Verdict) -> bool:
    """Whether a shadow quota would have done something other than admit."""
    return verdict.shadow and verdict.outcome != "admit"
