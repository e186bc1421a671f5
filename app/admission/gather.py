"""Asks in flight at the same moment travel together: while one script call is under way, the next gathers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from app.admission.ending import finish
from app.store.port import Answer, Plan, StoreError

MAX_ASKS: Final = 100
MAX_IDS: Final = 200
"""What one script call takes at most, so that no caller holds the store for long; a larger ask goes alone."""

CLOSE_WITHIN_S: Final = 1.0

GRACE_TURNS: Final = 8
"""Turns of the event loop for a reply that has arrived to be read; on an idle loop they take microseconds."""


Late = Callable[[int, Answer], None]
"""Told the place of a plan, and its answer, that came when the request had gone on without it."""


class Caller(Protocol):
    """Who makes the calls; ``app.admission.circuit`` does."""

    async def decide(self, plans: Sequence[Plan]) -> list[Answer]:
        """Decide plans in order in one call, or raise ``StoreError``."""


class Group:
    """The plans of one request, decided in order, perhaps over several calls.

    Attributes:
        answers: as far as they came.
        sent: how many were put into a call.
    """

    __slots__ = ("answers", "done", "late", "plans", "sent", "timer")

    def __init__(
        self, plans: Sequence[Plan], done: asyncio.Future[StoreError | None], late: Late | None
    ) -> None:
        self.plans = plans
        self.late = late
        self.answers: list[Answer] = []
        self.sent = 0
        self.done = done
        self.timer: asyncio.TimerHandle | None = None

    def finish(self, error: StoreError | None) -> None:
        """Let the request go on, with what has been answered."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.done.done():
            self.done.set_result(error)


class Gatherer:
    """One call at a time to a store; what waits meanwhile leaves together, whole or in part.

    There is no timer and no added latency: an ask that finds no call under way leaves at once. A group that
    was too large for one call goes to the back, so that others pass between its parts.

    Args:
        budget_s: the longest a group waits without any of its asks being answered.
    """

    def __init__(self, store: Caller, *, budget_s: float) -> None:
        self._store = store
        self._budget_s = budget_s
        self._waiting: deque[Group] = deque()
        self._calling: asyncio.Task[None] | None = None

    async def decide(
        self, plans: Sequence[Plan], late: Late | None = None
    ) -> tuple[list[Answer], StoreError | None]:
        """The answers in order: all of them, or those that came before a failure, and the failure.

        Args:
            late: told of answers that come afterwards: what they charged is charged all the same.
        """
        loop = asyncio.get_running_loop()
        group = Group(plans, loop.create_future(), late)
        self._arm(group, loop)
        self._waiting.append(group)
        if self._calling is None:
            self._calling = loop.create_task(self._call_while_waiting(loop))
        return group.answers, await group.done

    async def close(self) -> None:
        """Wait for what is under way, but not for ever."""
        await finish(self._calling, CLOSE_WITHIN_S)

    def _arm(self, group: Group, loop: asyncio.AbstractEventLoop) -> None:
        if group.timer is not None:
            group.timer.cancel()
        group.timer = loop.call_later(self._budget_s, self._expire, group, loop, GRACE_TURNS)

    def _expire(self, group: Group, loop: asyncio.AbstractEventLoop, turns: int) -> None:
        """Give up on the store, but first read what it has said: a busy loop runs timers before sockets."""
        if turns and not group.done.done():
            loop.call_soon(self._expire, group, loop, turns - 1)
        else:
            group.finish(StoreError("budget"))

    async def _call_while_waiting(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while parts := self._next_call():
                await self._call(parts, loop)
        finally:
            self._calling = None

    def _next_call(self) -> list[tuple[Group, Sequence[Plan]]]:
        """What leaves now: the front of the queue, up to the bounds of a call."""
        parts: list[tuple[Group, Sequence[Plan]]] = []
        asks, ids = MAX_ASKS, MAX_IDS
        while self._waiting and asks > 0:
            group = self._waiting.popleft()
            if group.done.done():
                continue
            taken, ids_taken = _fitting(group.plans, group.sent, asks, ids, alone=not parts)
            if taken == 0:
                self._waiting.appendleft(group)
                break
            asks, ids = asks - taken, ids - ids_taken
            parts.append((group, group.plans[group.sent : group.sent + taken]))
            group.sent += taken
            if group.sent < len(group.plans):
                break  # it goes on when this call has come back
        return parts

    async def _call(
        self, parts: Sequence[tuple[Group, Sequence[Plan]]], loop: asyncio.AbstractEventLoop
    ) -> None:
        try:
            answers = await self._store.decide([plan for _, its_plans in parts for plan in its_plans])
        except StoreError as error:
            for group, _ in parts:
                group.finish(error)
            return
        at = 0
        for group, its_plans in parts:
            its_answers = answers[at : at + len(its_plans)]
            at += len(its_plans)
            if group.done.done():  # it has waited too long and was answered without the store
                if group.late is not None:
                    for place, answer in enumerate(its_answers, group.sent - len(its_plans)):
                        group.late(place, answer)
                continue
            group.answers += its_answers
            if len(group.answers) == len(group.plans):
                group.finish(None)
            else:
                self._arm(group, loop)
                self._waiting.append(group)


def _fitting(plans: Sequence[Plan], start: int, asks: int, ids: int, *, alone: bool) -> tuple[int, int]:
    """How many plans from ``start`` on fit into a call, and their ids; the first of a call always fits."""
    taken = ids_taken = 0
    for plan in plans[start : start + asks]:
        if ids_taken + plan.ids > ids and not (alone and taken == 0):
            break
        taken += 1
        ids_taken += plan.ids
    return taken, ids_taken
