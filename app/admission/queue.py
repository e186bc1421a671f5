"""What waits for the store: requests by fair turns of two levels, callers and whom they ask for."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from app.admission.turns import Turns
from app.domain.caller import ANYONE, Caller
from app.store.port import Answer, Plan, StoreError

QUANTUM: Final = 10
"""How many asks of one request leave in one turn, so that a batch does not go ahead of everybody's."""

Late = Callable[[int, Answer], None]
"""Told the place of a plan, and its answer, that came when the request had gone on without it."""


class OverloadedError(Exception):
    """The node has more to do than it can answer in time, and does not take this in; nothing is charged.

    Args:
        cause: one word for the metric.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class CallerGoneError(Exception):
    """The caller has left, and nothing was sent for it."""


class Group:
    """The plans of one request, decided in order, perhaps over several calls.

    Attributes:
        caller: who sent the request.
        on_behalf_of: whom it asks for: the second level of turns.
        since: when the request came, by the loop's clock.
        within_s: how long it may wait here.
        answers: as far as they came.
        sent: how many were put into a call.
    """

    __slots__ = (
        "answers",
        "caller",
        "done",
        "is_accounting",
        "late",
        "on_behalf_of",
        "plans",
        "sent",
        "since",
        "within_s",
    )

    def __init__(
        self,
        plans: Sequence[Plan],
        done: asyncio.Future[StoreError | None],
        late: Late | None = None,
        caller: Caller = ANYONE,
        on_behalf_of: str = "",
        since: float = 0.0,
        within_s: float = math.inf,
    ) -> None:
        self.plans = plans
        self.done = done
        self.late = late
        self.caller = caller
        self.on_behalf_of = on_behalf_of
        self.since = since
        self.within_s = within_s
        self.answers: list[Answer] = []
        self.sent = 0
        self.is_accounting = any(plan.mode in ("record", "refund") for plan in plans)

    def finish(self, error: StoreError | None) -> None:
        """Let the request go on, with what has been answered."""
        if not self.done.done():
            self.done.set_result(error)

    def refuse(self, error: Exception) -> None:
        """End the request, of which nothing was sent."""
        if not self.done.done():
            self.done.set_exception(error)

    def unsent_accounts(self) -> list[Group]:
        """Its records and refunds that were not sent, each a group whose answer is late already.

        The work is done whoever was told what, so they are sent all the same.
        """
        groups = []
        for place in range(self.sent, len(self.plans)):
            plan = self.plans[place]
            if plan.mode in ("record", "refund"):
                late = None if self.late is None else partial(_at_place, self.late, place)
                group = Group((plan,), self.done, late, self.caller, self.on_behalf_of, self.since)
                groups.append(group)
        return groups


class Queue:
    """Groups by fair turns: of callers, and of each caller's of those whom it asks for.

    A turn weighs one for each ask and one for each producer id in it.
    """

    def __init__(self) -> None:
        self._turns: Turns[Turns[deque[Group]]] = Turns(partial(Turns, deque))
        self.asks = 0
        """How many asks wait."""

    def __bool__(self) -> bool:
        return bool(self._turns)

    def add(self, group: Group) -> None:
        """Let a group wait, the last of those for the same."""
        self._turns.of(group.caller.turn).of(group.on_behalf_of).append(group)
        self.asks += len(group.plans) - group.sent

    def put_back(self, group: Group, place: int) -> None:
        """Let a group wait on that was decided only up to a place; the first of those for the same."""
        if group.sent == len(group.plans):
            self._turns.of(group.caller.turn).of(group.on_behalf_of).appendleft(group)
        self.asks += group.sent - place
        group.sent = place

    def next_since(self, caller: Caller, on_behalf_of: str, else_: float) -> float:
        """Since when the group of a caller waits that is next for the same; ``else_`` if there is none."""
        its = self._turns.waiting(caller.turn)
        groups = its.waiting(on_behalf_of) if its is not None else None
        return groups[0].since if groups else else_

    def first(self) -> Group:
        """Whose turn it is; only while something waits."""
        return self._turns.first()[1].first()[1][0]

    def took(self, asks: int, ids: int) -> None:
        """Charge the turn of the first group, of which so many asks left; what is left of it goes last."""
        _, its = self._turns.first()
        _, groups = its.first()
        group = groups[0]
        self.asks -= asks
        groups.popleft()
        if group.sent < len(group.plans):
            groups.append(group)  # so that others pass between its parts
        its.took(asks + ids, is_left=bool(groups))
        self._turns.took(asks + ids, is_left=bool(its))

    def drop(self) -> None:
        """Let the first group wait no more, whose turn costs nothing."""
        _, its = self._turns.first()
        _, groups = its.first()
        group = groups.popleft()
        self.asks -= len(group.plans) - group.sent
        its.took(0.0, is_left=bool(groups))
        self._turns.took(0.0, is_left=bool(its))

    def drain(self) -> list[Group]:
        """Everything that waits, which waits no more."""
        groups = []
        while self:
            groups.append(self.first())
            self.drop()
        return groups


def _at_place(late: Late, place: int, _own: int, answer: Answer) -> None:
    late(place, answer)
