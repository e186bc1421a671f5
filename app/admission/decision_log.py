"""The node's side of the decision log: records decisions and sends them to the store in batches.

Nothing here delays a decision. The queue of rows is bounded in bytes. Rows that find no room there or in the
store are dropped and counted, and a row of the log reports them.
"""

from __future__ import annotations

import asyncio
import math
from asyncio import sleep
from collections import Counter, deque
from collections.abc import Callable, Sequence
from heapq import nlargest
from itertools import chain
from operator import attrgetter
from typing import Final, Literal, NamedTuple, Protocol

import structlog

from app.admission.ending import end
from app.admission.log_pages import LogPage, PackedAdmissions, logged_ask, logged_quotas, made_of
from app.admission.log_rows import (
    ChangeEntry,
    DecisionEntry,
    IdsEntry,
    LogEntry,
    Packing,
    UndoneEntry,
    size_of,
)
from app.admission.logs import Logs
from app.admission.plain import Logged, PlainQuotas, PlannedAsk
from app.admission.plan import Match, why_by_policy
from app.decision_log.batch import ADMISSION, NEXT_ROW, NOT_ASKED, Sibling
from app.decision_log.status import LogStatus
from app.domain.ask import Ask
from app.domain.decision import Decision, Verdict
from app.domain.ladder import AppliedQuota
from app.store.port import Answer, PackedAnswer, StoreError

Which = Literal["all", "denied", "off"]

SEND_EVERY_S: Final = 0.1
LOOK_EVERY_S: Final = 1.0
"""How often the node reads the status of the log, for its metrics."""

ROWS_IN_BATCH: Final = 180
"""The most rows in a batch besides plain admissions: packing this many takes some milliseconds, in which no
ask is answered."""

BATCH_BYTES: Final = 64 * 1024
"""A batch of this size is full, so that the log's share of the store is bounded in bytes too."""

MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
"""The most bytes that may wait to be sent, by estimate: one or two seconds of a fully loaded node."""

MOST_SIBLINGS: Final = 256
"""The most other nodes that a batch names, most recently seen first; each takes some 60 bytes."""

CLOSE_WITHIN_S: Final = 2.0

CLOSED: Final = LogPage(0)
TOO_MUCH: Final = "too much waits to be sent"
NOT_PACKED: Final = "they could not be packed"

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
        self._waiting: deque[LogPage] = deque()
        self._page = CLOSED
        """The page that takes rows: the last one that waits, or one without room."""
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
            waiting = sum(page.count for page in self._waiting)
            self._drop(waiting + (self._pending.rows if self._pending else 0), "the node ended")

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
        if answer is not None and answer.undone:
            self._take_undone(ask, matches, answer)
        if answer is not None and answer.earlier is not None:
            for each in answer.tries[1:]:
                self.refreshed(ask, matches, each)
        if self._all or decision.decision != "admit" or any(map(_differs_in_shadow, verdicts)):
            at_ms = self._at_ms(ask, answer)
            self._take(DecisionEntry("decision", at_ms, ask, matches, answer, decision, verdicts, failure))
        elif answer is not None:
            self.refreshed(ask, matches, answer)

    def admitted(self, planned: PlannedAsk, plain: PlainQuotas, packed: PackedAnswer | None) -> None:
        """Record a plain admission, of which the writer makes a row, as ``decided`` would record it."""
        page = self._page
        if page.room <= 0:
            page = self._turned()
        logged = plain.logged
        if logged is None or logged.page != page.number:
            logged = self._introduced(page, planned, plain)
            if logged is None:
                return
        page.count += 1
        if packed is None:
            page.room -= logged.room
            page.rows += ADMISSION.pack(logged.place, self._now_ms(), NOT_ASKED, 0)
            return
        answer, order, outcomes = packed.packed, packed.order, packed.id_outcomes
        page.room -= logged.room + len(answer)
        head = ADMISSION.pack(
            logged.place, packed.at_ms, NOT_ASKED if order is None else order, len(outcomes)
        )
        page.rows += head + answer + outcomes

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
            self._take_released(ask, matches, answer, lease)
            failure = why_by_policy(answer) if decision.source == "fallback" else None
            at_ms = self._at_ms(ask, answer)
            self._take(DecisionEntry(kind, at_ms, ask, matches, answer, decision, verdicts, failure, lease))

    def lapsed(self, ask: Ask, applied: AppliedQuota, units: float, answer: Answer) -> None:
        """Record what counts as spent in a bucket, as leases ended unsettled, whatever else is logged."""
        if not self._off:
            after = {"quota": applied.quota.key, "units": units}
            at_ms, order = self._at_ms(ask, answer), answer.order
            self._take(ChangeEntry("lapse", at_ms, applied.bucket, None, after, order=order))

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

    def _take_undone(self, ask: Ask, matches: Sequence[Match], answer: Answer) -> None:
        by_key = {match.key: match for match in matches}
        for each in answer.undone:
            of = (by_key[each.key],)
            if each.order is not None:
                self._take(UndoneEntry("undone", each.at_ms, ask, of, each.order, each.taken))
            if each.undo_order is not None:
                self._take(UndoneEntry("undo", each.at_ms, ask, of, each.undo_order, each.given))

    def _take_released(
        self, ask: Ask, matches: Sequence[Match], answer: Answer, lease: tuple[bytes, int]
    ) -> None:
        """Record what was held in one slot and freed at once: as a lease of which nothing was spent."""
        by_key = {match.key: match for match in matches}
        for each in answer.released:
            of = (by_key[each.key],)
            at_ms = each.at_ms if ask.at_ms is None else ask.at_ms
            if each.order is not None:
                self._take(UndoneEntry("lease", at_ms, ask, of, each.order, each.units, lease))
            if each.release_order is not None and each.released_ms is not None:
                at_ms = each.released_ms if ask.at_ms is None else ask.at_ms
                its = lease[0], 0
                self._take(UndoneEntry("settlement", at_ms, ask, of, each.release_order, 0.0, its))

    def _at_ms(self, ask: Ask, answer: Answer | None) -> int:
        """When it was decided: by the caller's clock where that counts, else by the store's or the node's."""
        if ask.at_ms is not None:
            return ask.at_ms
        return answer.at_ms if answer is not None else self._now_ms()

    def _take(self, entry: LogEntry) -> None:
        size = size_of(entry)
        if self._bytes + size > MAX_WAITING_BYTES:
            self._drop(1, TOO_MUCH)
            return
        page = self._page if self._page.room > 0 else self._turned()
        page.add(entry, size)
        self._account(page)

    def _turned(self) -> LogPage:
        """Begin another page, and return it."""
        self._account(self._page)
        self._page = LogPage(BATCH_BYTES)
        self._waiting.append(self._page)
        return self._page

    def _account(self, page: LogPage) -> None:
        """Count the memory of a page; what admissions took since the last time is at most one batch."""
        held = page.held
        self._bytes += held - page.counted
        page.counted = held

    def _introduced(self, page: LogPage, planned: PlannedAsk, plain: PlainQuotas) -> Logged | None:
        """Make an ask known to a page; return None if that fails, or if there is no room."""
        logged, quotas = plain.logged, plain.shared.logged
        if logged is None or quotas is None:
            try:
                logged = logged_ask(planned, plain, self._secret(), plain_ids=self._plain_ids)
                quotas = logged_quotas(planned, plain)
            except Exception:
                self._drop(1, NOT_PACKED)
                log.exception("decision log row could not be packed")
                return None
        if self._bytes + logged.held > MAX_WAITING_BYTES:
            self._drop(1, TOO_MUCH)
            return None
        page.introduce(plain, logged, quotas)
        self._account(page)
        return logged

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
                await self._send(begun_by=self._page.number)
            except Exception:
                log.exception("decision log send failed unexpectedly")  # and is tried again

    async def _look_on(self) -> None:
        while True:
            if not self._away():
                try:
                    self.log_status = await self._stream.status()
                except StoreError:
                    pass  # the last status stays
                except Exception:
                    log.exception("decision log status failed unexpectedly")  # and is tried again
            await sleep(LOOK_EVERY_S)

    async def _send(self, *, begun_by: float = math.inf) -> None:
        """Send all that waits; a batch whose sending was cut short goes first, unchanged.

        Args:
            begun_by: leave a page of a higher number that still takes rows. On a busy node each batch would
                else have the few rows that came while the last one was sent, and cost as much as a full one.
        """
        while self._pending or self._waiting or self._unreported:
            if not self._pending and self._is_filling(after=begun_by):
                return
            self._pending = self._pending or self._next_batch()
            if self._pending is None:
                continue  # what was to be packed is lost, and is reported next
            took = await self._deliver(self._pending)
            self._pending = None
            if not (took or self._waiting):
                return  # the dropped rows are reported when there is room
            await sleep(0)

    def _is_filling(self, *, after: float) -> bool:
        """Whether only a page waits that has a higher number and still takes rows."""
        return bool(self._waiting) and self._waiting[0] is self._page and self._page.number > after

    def _next_batch(self) -> PendingBatch | None:
        """Return a batch of what waits, or None if nothing of it can be packed."""
        packing = Packing(self._secret(), plain_ids=self._plain_ids)
        reported, self._unreported = self._unreported, Counter()
        for why, rows in reported.items():
            packing.add(ChangeEntry("dropped", self._now_ms(), why, None, {"rows": rows}))
        admissions, admitted = None, 0
        if self._waiting:
            page = self._waiting.popleft()
            if page is self._page:
                self._page = CLOSED
            self._bytes -= page.counted
            admissions, admitted = self._pack(page, packing)
        if not packing.rows and not admitted:
            return None
        self._number += 1
        batch = packing.batch(self._node, self._number, self._now_ms(), self._siblings(), admissions)
        return PendingBatch(batch, self._number, packing.rows + admitted, reported)

    def _pack(self, page: LogPage, packing: Packing) -> tuple[PackedAdmissions | None, int]:
        """Pack the rows of a page that fit into a batch; the others still wait.

        Returns:
            its admissions, and how many there are.
        """
        rows = bytearray(NEXT_ROW * packing.rows)
        if not page.entries:
            return (page.packed(rows + page.rows), page.count) if page.count else (None, 0)
        lost = admitted = asks = size = 0
        waiting = page.walk()
        for row in waiting:
            if packing.rows >= ROWS_IN_BATCH or packing.size + size >= BATCH_BYTES:
                rest = page.rest(chain([row], waiting))
                self._waiting.appendleft(rest)
                self._account(rest)
                break
            if row.place is not None:
                size += row.end - row.begin
                if row.place == asks:  # the first one of its ask
                    size += made_of(page.asks[row.place])[0].length
                    asks += 1
                admitted += 1
            else:
                try:
                    packing.add(page.entries.popleft())
                except Exception:
                    lost += 1
                    log.exception("decision log row could not be packed")
                    continue
            rows += page.rows[row.begin : row.end]
        if lost:
            self._drop(lost, NOT_PACKED)
        return (page.packed(rows, asks), admitted) if admitted else (None, 0)

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
