"""Asks in flight at the same moment travel together: while one script call is under way, the next gathers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import structlog

from app.admission.ending import finish
from app.admission.patience import Moment, Patience
from app.admission.queue import QUANTUM, CallerGoneError, Group, Late, OverloadedError, Queue
from app.domain.caller import ANYONE, Caller
from app.store.port import Answer, Plan, StoreError

log = structlog.get_logger("quotagate.store")

MAX_ASKS: Final = 100
MAX_IDS: Final = 200
"""What one script call takes at most, so that no caller holds the store for long; a larger ask goes alone."""

MAX_PARTS: Final = 20
"""Of so many requests at most one call has asks: their answers are all written in one turn of the event loop,
and who waits for the next turn waits for that. A batch may have a hundred asks in it all the same."""

CLOSE_WITHIN_S: Final = 1.0

LOOK_AGAIN_S: Final = 0.005
"""When a reply was there to be read, or the node had not sent the call yet: the loop gets so long."""

QUEUE_S: Final = 2.0
"""How long an ask may wait in this node, unless the settings say otherwise."""


class Calls(Protocol):
    """Who makes the calls; ``app.admission.circuit`` does."""

    async def decide(self, plans: Sequence[Plan]) -> list[Answer]:
        """Decide the first plans in order in one call, at least one of them, or raise ``StoreError``."""

    def silent_since(self) -> float | None:
        """Since when the store owes a reply and says nothing, by the loop's clock; None while it does not."""

    def give_up(self) -> None:
        """Fail the call under way: the store has been silent for too long."""


Part = tuple[Group, int, int]
"""Of a group the plans from one place to another, which are in one call."""


class Gatherer:
    """One call at a time to a store; what waits meanwhile leaves together, whole or in part, by fair turns.

    An ask that finds no call under way leaves at once. What waits in the queue waits for this node, however
    long: that never makes up an answer. Only the silence of the store does: one timer for each call asks the
    kernel whether it is silent, and after the patience for that (``app.admission.patience``) everything that
    waits or arrives is answered without the store, until the reply comes or the call fails.

    Args:
        budget_s: how long the store may be silent on a quiet node.
        timeout_s: after so long a silence the call has failed.
        queue_s: how long an ask may wait here: of whom one waits longer, nothing more is taken in.
        queued: is told how long the asks of a group waited until they left.
    """

    def __init__(
        self,
        store: Calls,
        *,
        budget_s: float,
        timeout_s: float = 0.5,
        queue_s: float = QUEUE_S,
        queued: Callable[[float, int], None] = lambda _seconds, _asks: None,
    ) -> None:
        self._store = store
        self._patience = Patience(budget_s)
        self._timeout_s = max(timeout_s, 2 * budget_s)
        self._queue_s = queue_s
        self._queued = queued
        self._queue = Queue()
        self._calling: asyncio.Task[None] | None = None
        self._in_call: list[Part] = []
        self._timer: asyncio.TimerHandle | None = None
        self._stretch = 1.0
        """How much longer than others the call under way may take: 1,000 ids are five calls' work."""
        self.is_late = False
        """Whether the call under way has been silent for too long."""

    @property
    def waiting(self) -> int:
        """How many asks wait for a call."""
        return self._queue.asks

    async def decide(
        self,
        plans: Sequence[Plan],
        late: Late | None = None,
        *,
        caller: Caller = ANYONE,
        on_behalf_of: str = "",
        within_s: float | None = None,
    ) -> tuple[list[Answer], StoreError | None]:
        """The answers in order: all of them, or those that came before a failure, and the failure.

        Args:
            late: told of answers that come afterwards: what they charged is charged all the same.
            on_behalf_of: whom the caller asks for; of several the first.
            within_s: how long it may wait here, if that is less than what holds for all.

        Raises:
            OverloadedError: asks for the same have waited for too long; nothing was sent.
            CallerGoneError: the caller left before anything was sent.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        since = caller.came_at or now
        within_s = self._queue_s if within_s is None else min(within_s, self._queue_s)
        group = Group(plans, loop.create_future(), late, caller, on_behalf_of, since, within_s)
        if self.is_late:
            self._answer_without_store(group)
        else:
            if now - min(since, self._queue.next_since(caller, on_behalf_of, since)) > within_s:
                raise OverloadedError("age")
            self._queue.add(group)
        if self._calling is None and self._queue:
            self._calling = loop.create_task(self._call_while_waiting(loop))
        return group.answers, await group.done

    async def close(self) -> None:
        """Wait for what is under way, but not for ever."""
        await finish(self._calling, CLOSE_WITHIN_S)
        self._patience.close()

    async def _call_while_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while parts := self._next_call(loop.time()):
                await self._call(parts, loop)
        finally:
            self._calling = None

    def _next_call(self, now: float) -> list[Part]:
        """What leaves now: those whose turn it is, up to the bounds of a call."""
        parts: list[Part] = []
        asks, ids = MAX_ASKS, MAX_IDS
        while self._queue and asks > 0 and len(parts) < MAX_PARTS:
            group = self._queue.first()
            if self._is_dropped(group, now):
                self._queue.drop()
                continue
            taken, ids_taken = _fitting(group, min(asks, QUANTUM), ids, alone=not parts)
            if taken == 0:
                break
            if group.sent == 0:
                self._queued(now - group.since, len(group.plans))
            asks, ids = asks - taken, ids - ids_taken
            parts.append((group, group.sent, group.sent + taken))
            group.sent += taken
            self._queue.took(taken, ids_taken)
        self._stretch = max(1.0, (MAX_IDS - ids) / MAX_IDS)
        return parts

    def _is_dropped(self, group: Group, now: float) -> bool:
        """Whether nothing of a group is to be sent any more, which is ended by this."""
        if group.is_accounting:
            return False
        if group.done.done():
            return True
        if group.sent:
            return False
        if group.caller.is_gone():
            group.refuse(CallerGoneError())
        elif now - group.since > group.within_s:
            group.refuse(OverloadedError("age"))
        return group.done.done()

    async def _call(self, parts: list[Part], loop: asyncio.AbstractEventLoop) -> None:
        self._in_call = parts
        began = self._patience.began(loop.time())
        self._look_in(self._patience.budget_s * self._stretch, began, loop)
        try:
            answers = await self._store.decide(
                [plan for group, start, end in parts for plan in group.plans[start:end]]
            )
        except StoreError as error:
            for group, _, _ in parts:
                group.finish(error)
            return
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._in_call, self.is_late = [], False
        at = 0
        for group, start, end in parts:
            self._take(group, start, answers[at : at + end - start])
            at += end - start
        self._put_back(parts, len(answers))

    def _take(self, group: Group, start: int, answers: Sequence[Answer]) -> None:
        """Give a group answers to its plans from ``start`` on."""
        if group.done.done():  # it was answered without the store
            if group.late is not None:
                for place, answer in enumerate(answers, start):
                    group.late(place, answer)
            return
        group.answers += answers
        if len(group.answers) == len(group.plans):
            group.finish(None)

    def _put_back(self, parts: Sequence[Part], decided: int) -> None:
        """Let what a call did not come to go with the next: a store stops when a call has written enough."""
        left: dict[Group, int] = {}
        for group, start, end in parts:
            if decided < end - start:
                left.setdefault(group, start + max(decided, 0))
            decided -= end - start
        for group, place in reversed(left.items()):
            if group.done.done():
                group.sent = place
                for account in group.unsent_accounts():
                    self._queue.add(account)
            else:
                self._queue.put_back(group, place)

    # The silence of the store

    def _look_in(self, seconds: float, began: Moment, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(seconds, self._look, began, loop)

    def _look(self, began: Moment, loop: asyncio.AbstractEventLoop) -> None:
        """Judge the silence of the store, if there is one."""
        now = loop.time()
        since = self._store.silent_since()
        if since is None:
            self._look_in(LOOK_AGAIN_S, began, loop)
            return
        silent_s = now - since
        patience_s = self._patience.lasts_s(began, self._patience.now(now)) * self._stretch
        if silent_s >= max(self._timeout_s, patience_s):
            self._store.give_up()
        elif silent_s >= patience_s:
            said = {"silent_ms": round(silent_s * 1000), "patience_ms": round(patience_s * 1000)}
            log.warning("the store is silent; quotas answer by on_store_failure until it replies", **said)
            self._answer_all_without_store()
            self._look_in(self._timeout_s - silent_s, began, loop)
        else:
            self._look_in(min(patience_s - silent_s, self._patience.budget_s), began, loop)

    def _answer_all_without_store(self) -> None:
        """Answer everything that waits without the store; its records and refunds are sent all the same."""
        self.is_late = True
        for group, _, _ in self._in_call:
            group.finish(StoreError("budget"))
        for group in self._queue.drain():
            self._answer_without_store(group)

    def _answer_without_store(self, group: Group) -> None:
        group.finish(StoreError("budget"))
        for account in group.unsent_accounts() if group.is_accounting else ():
            self._queue.add(account)


def _fitting(group: Group, asks: int, ids: int, *, alone: bool) -> tuple[int, int]:
    """How many plans that were not sent fit into a call, and their ids; the first of a call always fits."""
    taken = ids_taken = 0
    for plan in group.plans[group.sent : group.sent + asks]:
        if ids_taken + plan.ids > ids and not (alone and taken == 0):
            break
        taken += 1
        ids_taken += plan.ids
    return taken, ids_taken
