"""The node's side of the decision log: records decisions and sends them to the store in batches.

Nothing here delays a decision. The queue of rows is bounded in bytes. Rows that find no room there or in the
store are dropped and counted, and a row of the log reports them.
"""

from __future__ import annotations

import asyncio
from asyncio import sleep
from collections import Counter, deque
from collections.abc import Callable, Sequence
from heapq import nlargest
from operator import attrgetter
from typing import Final, Literal, NamedTuple, Protocol

import structlog

from app.admission.answers import why_by_policy
from app.admission.log.rows import (
    ChangeEntry,
    DecisionEntry,
    IdsEntry,
    LogEntry,
    LogPage,
    UndoneEntry,
)
from app.admission.plan import Knowledge, PlannedAsk
from app.admission.recorder import Recorder
from app.decision_log.batch import Sibling
from app.decision_log.status import LogStatus
from app.domain.ask import Ask
from app.domain.decision import Verdict
from app.node.tasks import end
from app.store.port import Answer, Charge, StoreError

Which = Literal["all", "denied", "off"]

SEND_EVERY_S: Final = 0.1
POLL_EVERY_S: Final = 1.0
"""How often the node reads the status of the log, for its metrics."""

BATCH_BYTES: Final = 64 * 1024
"""A batch of this size is full, so that the log's share of the store is bounded in bytes too."""

MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
"""The most bytes that may wait to be sent, by estimate: one or two seconds of a fully loaded node."""

MOST_SIBLINGS: Final = 256
"""The most other nodes that a batch names, most recently seen first; each takes some 60 bytes."""

CLOSE_WITHIN_S: Final = 2.0

TOO_MUCH: Final = "too much waits to be sent"
NOT_PACKED: Final = "they could not be packed"

log: Final = structlog.get_logger("quotagate.log")


class Stream(Protocol):
    """The destination of batches, such as ``app.decision_log.stream.LogStream``."""

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


class DecisionLog(Recorder):
    """Records decisions and sends them to the store.

    Args:
        which: all decisions; all but ordinary admissions, plus the outcomes of ids; or none.
        node: the name of this process, and of no other.
        secret: returns the deployment's hash secret.
        now_ms: the store's time, as this node knows it.
        plain_ids: keep ids as they were asked for, in addition to their digests.
        away: whether the store is known to be away, so that nothing is sent meanwhile.

    Attributes:
        dropped: rows that could not be logged, for lack of room or another reason.
        log_status: the status of the log at the last poll; None before the first.
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
        self._node = node
        self._secret = secret
        self._now_ms = now_ms
        self._plain_ids = plain_ids
        self._waiting: deque[LogPage] = deque()
        """The pages that wait; the last one takes rows until it has the size of a batch."""
        self._bytes = 0
        """The memory that these pages take in bytes, by estimate."""
        self._number = 0
        self._pending: PendingBatch | None = None
        self._unreported: Counter[str] = Counter()
        """Dropped rows, by reason, that no row of the log reports yet."""
        self._sending: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._troubles: set[str] = set()

    async def open(self) -> None:
        """Begin to send batches."""
        if not self._off:
            self._sending = asyncio.create_task(self._send_on(), name="send the decision log")
            self._polling = asyncio.create_task(
                self._poll_forever(), name="poll the status of the decision log"
            )

    async def close(self) -> None:
        """Send the waiting rows, within a time limit, and stop."""
        if self._sending is None:
            return
        await end(self._polling)
        await end(self._sending)
        try:
            async with asyncio.timeout(CLOSE_WITHIN_S):
                await self._send()
        except TimeoutError:
            self._drop(
                sum(map(len, self._waiting)) + (self._pending.rows if self._pending else 0), "the node ended"
            )

    def decided(
        self, planned: PlannedAsk, answer: Answer | None, verdicts: Sequence[Verdict], failure: str | None
    ) -> None:
        """Record a decision, if it is to be logged."""
        if self._off or planned.decision is None:
            return
        if answer is not None and (answer.undone or answer.earlier is not None):
            self._take_undone(planned, answer)
            for each in answer.tries[1:]:
                self.refreshed(planned, each)
        decision = planned.decision
        is_ordinary = (
            decision.decision == "admit"
            and decision.source != "fallback"
            and not any(map(_differs_in_shadow, verdicts))
        )
        if self._all or not is_ordinary:
            at_ms = self._at_ms(planned.ask, answer, planned.known)
            self._take(DecisionEntry("decision", at_ms, planned, answer, verdicts, failure))
        elif answer is not None and answer.id_outcomes:
            self.refreshed(planned, answer)

    def late(self, planned: PlannedAsk, answer: Answer, verdicts: Sequence[Verdict]) -> None:
        """Record the store's decision on an ask that had already been answered without it."""
        if self._off or planned.ask.mode == "peek" or planned.decision is None:
            return
        if self._all:
            at_ms = self._at_ms(planned.ask, answer)
            failure = "store_full" if planned.decision.source == "fallback" else None
            self._take(DecisionEntry("late", at_ms, planned, answer, verdicts, failure))
        else:
            self.refreshed(planned, answer)

    def leased(
        self,
        kind: Literal["lease", "settlement"],
        planned: PlannedAsk,
        answer: Answer,
        verdicts: Sequence[Verdict],
        lease: tuple[bytes, int],
    ) -> None:
        """Record a lease that was asked for or settled, unless the log is off."""
        if not self._off and planned.decision is not None:
            self._take_released(planned, answer, lease)
            failure = why_by_policy(answer) if planned.decision.source == "fallback" else None
            at_ms = self._at_ms(planned.ask, answer)
            self._take(DecisionEntry(kind, at_ms, planned, answer, verdicts, failure, lease))

    def lapsed(self, ask: Ask, charge: Charge, units: float, answer: Answer) -> None:
        """Record the units that lapsed leases spent in a bucket, unless the log is off."""
        if not self._off:
            after = {"quota": charge.quota.key, "units": units}
            at_ms, order = self._at_ms(ask, answer), answer.order
            self._take(ChangeEntry("lapse", at_ms, charge.bucket, None, after, order=order))

    def refreshed(self, planned: PlannedAsk, answer: Answer) -> None:
        """Record the outcomes of the ids of an ask that is not logged itself, if any id was written."""
        if not self._off and any(answer.id_outcomes):
            self._take(IdsEntry("ids", self._at_ms(planned.ask, answer), planned, answer))

    def renewed(self, planned: PlannedAsk, answer: Answer) -> None:
        """Record the ids that this node wrote again, if any was written."""
        if not self._off and any(answer.id_outcomes):
            self._take(IdsEntry("renewal", self._at_ms(planned.ask, answer), planned, answer))

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
        """Record a change that affects decisions; ``before`` and ``after`` are JSON values."""
        if not self._off:
            self._take(ChangeEntry(kind, self._now_ms(), what, before, after, who, version, order))

    def _take_undone(self, planned: PlannedAsk, answer: Answer) -> None:
        by_key = {charge.key: charge for charge in planned.charges}
        for each in answer.undone:
            of = planned.ask, by_key[each.key]
            if each.order is not None:
                self._take(UndoneEntry("undone", each.at_ms, *of, each.order, each.taken))
            if each.undo_order is not None:
                self._take(UndoneEntry("undo", each.at_ms, *of, each.undo_order, each.given))

    def _take_released(self, planned: PlannedAsk, answer: Answer, lease: tuple[bytes, int]) -> None:
        """Record units held in one slot and freed at once, as a lease of which nothing was spent."""
        by_key, ask = {charge.key: charge for charge in planned.charges}, planned.ask
        for each in answer.released:
            of = ask, by_key[each.key]
            at_ms = each.at_ms if ask.at_ms is None else ask.at_ms
            if each.order is not None:
                self._take(UndoneEntry("lease", at_ms, *of, each.order, each.units, lease))
            if each.release_order is not None and each.released_ms is not None:
                at_ms = each.released_ms if ask.at_ms is None else ask.at_ms
                settled_lease = lease[0], 0
                self._take(UndoneEntry("settlement", at_ms, *of, each.release_order, 0.0, settled_lease))

    def _at_ms(self, ask: Ask, answer: Answer | None, known: Knowledge | None = None) -> int:
        """The time of a decision: by the caller's clock if that is in use, else by the store's or the node's.

        Args:
            known: the grounds on which this node answered for the ids, if it did so alone.
        """
        if ask.at_ms is not None:
            return ask.at_ms
        if answer is not None:
            return answer.at_ms
        return self._now_ms() if known is None else known.at_ms

    def _take(self, entry: LogEntry) -> None:
        if self._bytes > MAX_WAITING_BYTES:
            self._drop(1, TOO_MUCH)
            return
        page = self._waiting[-1] if self._waiting else None
        is_new = page is None or page.size >= BATCH_BYTES
        if page is None or is_new:
            page = LogPage(self._secret(), plain_ids=self._plain_ids)
        before = page.memory
        try:
            page.add(entry)
        except Exception:
            self._drop(1, NOT_PACKED)
            log.exception("decision log row could not be packed")
        if len(page):  # a batch without rows would be taken for a missing one
            if is_new:
                self._waiting.append(page)
            self._bytes += page.memory - before

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
                await self._send(only_full=True)
            except Exception:
                log.exception("decision log send failed unexpectedly")  # and is tried again

    async def _poll_forever(self) -> None:
        while True:
            if not self._away():
                try:
                    self.log_status = await self._stream.status()
                except StoreError:
                    pass  # the last status stays
                except Exception:
                    log.exception("decision log status failed unexpectedly")  # and is tried again
            await sleep(POLL_EVERY_S)

    async def _send(self, *, only_full: bool = False) -> None:
        """Send all waiting rows; a batch whose sending was interrupted goes first, unchanged.

        Args:
            only_full: after the first batch, send only full ones. On a busy node a batch would otherwise have
                the few rows that came during the last send, and cost as much as a full one.
        """
        sent = False
        while self._pending or self._waiting or self._unreported:
            if not self._pending and sent and only_full and len(self._waiting) == 1:
                return
            self._pending = self._pending or self._next_batch()
            took = await self._deliver(self._pending)
            self._pending, sent = None, True
            if not (took or self._waiting):
                return  # the dropped rows are reported when there is room
            await sleep(0)

    def _next_batch(self) -> PendingBatch:
        """Return a batch of the waiting rows."""
        if self._waiting:
            page = self._waiting.popleft()
            self._bytes -= page.memory
        else:
            page = LogPage(self._secret(), plain_ids=self._plain_ids)
        reported, self._unreported = self._unreported, Counter()
        for why, rows in reported.items():
            page.add(ChangeEntry("dropped", self._now_ms(), why, None, {"rows": rows}))
        self._number += 1
        batch = page.batch(self._node, self._number, self._now_ms(), self._siblings())
        return PendingBatch(batch, self._number, len(page), reported)

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
