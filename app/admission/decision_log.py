"""The node's side of the decision log: what was decided, taken down beside the answers and sent on.

Nothing here holds a decision up. What waits to be sent is bounded in bytes; what finds no place there or in
the store is dropped and counted, and the log itself is told so.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import sleep
from collections import Counter, deque
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Final, Literal, NamedTuple, Protocol

import structlog

from app.admission.ending import end
from app.admission.log_rows import Changed, Decided, Entry, IdsAlone, Packing, size_of
from app.admission.plan import Match
from app.domain.ask import Ask
from app.domain.decision import Decision, Verdict
from app.store.decision_log import Sibling
from app.store.decision_log_standing import LogStanding
from app.store.port import Answer, StoreError

Which = Literal["all", "denied", "off"]

SEND_EVERY_S: Final = 0.1
LOOK_EVERY_S: Final = 1.0
"""How often the node looks how the log stands, for its metrics."""

ROWS_IN_BATCH: Final = 250
"""At most; to put so many together takes some milliseconds, in which no ask is answered."""

BATCH_BYTES: Final = 64 * 1024
"""A batch of so many is full, so that what the store may hold is bounded in bytes too."""

MAX_WAITING_BYTES: Final = 64 * 1024 * 1024
"""What may wait to be sent, as estimated: a second or two of a node that is as busy as it can be."""

MOST_SIBLINGS: Final = 256
"""So many other nodes a batch names, those that were there last: some 60 bytes each."""

CLOSE_WITHIN_S: Final = 2.0

log: Final = structlog.get_logger("quotagate.log")


class Stream(Protocol):
    """Where batches go; ``app.store.log_stream`` has it."""

    async def append(self, batch: bytes, rows: int, node: str, number: int) -> bool:
        """Leave a node's batch of a number; False if there is no room; raises ``StoreError``."""

    async def standing(self) -> LogStanding:
        """How the log stands, and what its writer has left about itself; raises ``StoreError``."""


class Leaving(NamedTuple):
    """A batch under way: its number, its rows, and how many dropped before it tells of, by why."""

    batch: bytes
    number: int
    rows: int
    told: Counter[str]


class DecisionLog:
    """Takes decisions down and sends them on.

    Args:
        which: every decision; those that are not plain admissions, and what became of ids; or none.
        node: names this process among all.
        secret: gives the deployment's hash secret.
        now_ms: the store's time, as this node knows it.
        plain_ids: keep ids as they were asked for, beside their digests.
        away: says that the store is known to be away, so that nothing is sent there meanwhile.

    Attributes:
        dropped: rows that could not be logged, for want of room or otherwise.
        standing: how the log stood when it was looked at last; None before that.
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
        self.standing: LogStanding | None = None
        self._stream = stream
        self._all, self._off = which == "all", which == "off"
        self._node = node
        self._secret = secret
        self._now_ms = now_ms
        self._plain_ids = plain_ids
        self._waiting: deque[Entry] = deque()
        self._bytes = 0
        self._number = 0
        self._leaving: Leaving | None = None
        self._untold: Counter[str] = Counter()
        """Rows dropped, by why, of which the log has no row yet."""
        self._sending: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._troubles: set[str] = set()

    async def open(self) -> None:
        """Send from now on."""
        if not self._off:
            self._sending = asyncio.create_task(self._send_on(), name="send the decision log")
            self._looking = asyncio.create_task(self._look_on(), name="look at the decision log")

    async def close(self) -> None:
        """Send what waits, but not for ever, and no more."""
        if self._sending is None or self._looking is None:
            return
        await end(self._looking)
        await end(self._sending)
        try:
            async with asyncio.timeout(CLOSE_WITHIN_S):
                await self._send()
        except TimeoutError:
            self._drop(len(self._waiting) + (self._leaving.rows if self._leaving else 0), "the node ended")

    def decided(
        self,
        ask: Ask,
        matches: Sequence[Match],
        answer: Answer | None,
        decision: Decision,
        verdicts: Sequence[Verdict],
        failure: str | None,
    ) -> None:
        """Take a decision down, if it is to be logged."""
        if self._off:
            return
        if not self._all and decision.decision == "admit" and not any(map(_shown_alone, verdicts)):
            if answer is not None:
                self.refreshed(ask, matches, answer)
            return
        at_ms = self._at_ms(ask, answer)
        self._take(Decided("decision", at_ms, ask, matches, answer, decision, verdicts, failure))

    def late(
        self,
        ask: Ask,
        matches: Sequence[Match],
        answer: Answer,
        decision: Decision,
        verdicts: Sequence[Verdict],
    ) -> None:
        """Take down what the store decided of an ask that had been answered without it by then."""
        if self._off or ask.mode == "peek":
            return
        if self._all:
            at_ms = self._at_ms(ask, answer)
            failure = "store_full" if decision.source == "fallback" else None
            self._take(Decided("late", at_ms, ask, matches, answer, decision, verdicts, failure))
        else:
            self.refreshed(ask, matches, answer)

    def refreshed(self, ask: Ask, matches: Sequence[Match], answer: Answer) -> None:
        """Take down what became of the ids of an ask that is not logged itself, if anything did."""
        if not self._off and any(answer.fates):
            self._take(IdsAlone(self._at_ms(ask, answer), ask, matches, answer))

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
        """Take down a change of what decisions are made by; ``before`` and ``after`` are JSON values."""
        if not self._off:
            self._take(Changed(kind, self._now_ms(), what, before, after, who, version, order))

    def _at_ms(self, ask: Ask, answer: Answer | None) -> int:
        """When it was decided: by the caller's clock where that counts, else the store's, or the node's."""
        if ask.at_ms is not None:
            return ask.at_ms
        return answer.at_ms if answer is not None else self._now_ms()

    def _take(self, entry: Entry) -> None:
        size = size_of(entry)
        if self._bytes + size > MAX_WAITING_BYTES:
            self._drop(1, "too much waits to be sent")
            return
        self._bytes += size
        self._waiting.append(entry)

    def _drop(self, rows: int, why: str) -> None:
        self.dropped += rows
        self._untold[why] += rows
        self._say(f"rows of the decision log are dropped: {why}")

    def _say(self, trouble: str) -> None:
        """Each trouble is said once for as long as it goes on."""
        if trouble not in self._troubles:
            self._troubles.add(trouble)
            log.warning("the decision log", trouble=trouble)

    def _say_well(self) -> None:
        if self._troubles:
            self._troubles.clear()
            log.info("the decision log is sent on again")

    async def _send_on(self) -> None:
        while True:
            await sleep(SEND_EVERY_S)
            try:
                await self._send()
            except Exception:
                log.exception("the decision log could not be sent")  # and is tried again

    async def _look_on(self) -> None:
        while True:
            if not self._away():
                with contextlib.suppress(StoreError):  # then the last look stands
                    self.standing = await self._stream.standing()
            await sleep(LOOK_EVERY_S)

    async def _send(self) -> None:
        """Send all that waits; what was under way when that was cut short goes first, as it was."""
        while self._leaving or self._waiting or self._untold:
            if self._leaving is None:
                self._leaving = self._next_batch()
            took = await self._deliver(self._leaving)
            self._leaving = None
            if not (took or self._waiting):
                return  # what was dropped is told when there is room
            await sleep(0)

    def _next_batch(self) -> Leaving:
        packing = Packing(self._secret(), plain_ids=self._plain_ids)
        told, self._untold = self._untold, Counter()
        for why, rows in told.items():
            packing.add(Changed("dropped", self._now_ms(), why, None, {"rows": rows}))
        lost = 0
        while self._waiting and packing.rows < ROWS_IN_BATCH and packing.size < BATCH_BYTES:
            entry = self._waiting.popleft()
            self._bytes -= size_of(entry)
            try:
                packing.add(entry)
            except Exception:
                lost += 1
                log.exception("a row of the decision log could not be put together")
        if lost:
            self._drop(lost, "they could not be put together")
        if not packing.rows:
            return self._next_batch()  # which tells of that
        self._number += 1
        batch = packing.batch(self._node, self._number, self._now_ms(), self._siblings())
        return Leaving(batch, self._number, packing.rows, told)

    def _siblings(self) -> list[Sibling]:
        """The other nodes, as the log's heartbeat had them when it was looked at last."""
        nodes = self.standing.nodes if self.standing is not None else ()
        others = sorted((each for each in nodes if each[0] != self._node), key=itemgetter(2), reverse=True)
        return others[:MOST_SIBLINGS]

    async def _deliver(self, leaving: Leaving) -> bool:
        """Send a batch until the store has it, or has no room: twice is no harm, as it is known by its id."""
        while True:
            if self._away():
                await sleep(SEND_EVERY_S)
                continue
            try:
                took = await self._stream.append(leaving.batch, leaving.rows, self._node, leaving.number)
            except StoreError as error:
                self._say(f"the store does not take it: {error.reason}")
                await sleep(SEND_EVERY_S)
                continue
            if took:
                self._say_well()
            else:
                self._untold += leaving.told
                if rows := leaving.rows - len(leaving.told):
                    self._drop(rows, "the stream is full, as nobody reads it")
            return took


def _shown_alone(verdict: Verdict) -> bool:
    """Whether a quota that only looks on would have said something else than to admit."""
    return verdict.shadow and verdict.outcome != "admit"
