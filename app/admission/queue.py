"""Requests that wait for a store call, served by fair turns on two levels.

Callers take turns (a caller is an API key, or an address without one), and so do the principals that one
caller asks for. A turn takes at most 10 asks of one request, and weighs 1 per ask and 1 per producer id. So
neither a flood of requests nor a batch of 1,000 asks goes ahead of everybody else.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from app.admission.turns import FairTurns
from app.domain.caller import ANYONE, Caller
from app.store.port import Answer, Plan, StoreError

QUANTUM: Final = 10
"""How many asks of one request are served in one turn."""

LateCallback = Callable[[int, Answer], None]
"""Called with the index of a plan and its answer, if the answer came after the request was finished."""


class Group:
    """The plans of one request, decided in order, in one store call or several.

    Attributes:
        caller: who sent the request.
        on_behalf_of: the principal it asks for, for the second level of turns.
        since: when the request arrived, by the loop's clock.
        within_s: how long it may wait in the queue.
        answers: the answers so far.
        sent: how many plans have been put into a call.
        is_accounting: whether it has records or refunds, which are sent even if the caller has left.
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
        late: LateCallback | None = None,
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
        """Finish the request with the answers so far."""
        if not self.done.done():
            self.done.set_result(error)

    def refuse(self, error: Exception) -> None:
        """Refuse the request, of which nothing was sent."""
        if not self.done.done():
            self.done.set_exception(error)

    def unsent_accounts(self) -> list[Group]:
        """Return its unsent records and refunds, each as a group of its own whose answer will be late.

        The work that they account for is done, so they are sent even after the request was answered.
        """
        return [
            Group(
                (plan,),
                self.done,
                None if self.late is None else partial(_at_place, self.late, place),
                self.caller,
                self.on_behalf_of,
                self.since,
            )
            for place, plan in enumerate(self.plans[self.sent :], self.sent)
            if plan.mode in ("record", "refund")
        ]


class Queue:
    """Waiting groups, by fair turns of callers and of each caller's principals."""

    def __init__(self) -> None:
        self._turns: FairTurns[FairTurns[deque[Group]]] = FairTurns(partial(FairTurns, deque))
        self.asks = 0
        """How many asks are waiting."""

    def __bool__(self) -> bool:
        return bool(self._turns)

    def add(self, group: Group) -> None:
        """Add a group behind the others of its caller and principal."""
        self._turns.of(group.caller.turn).of(group.on_behalf_of).append(group)
        self.asks += len(group.plans) - group.sent

    def put_back(self, group: Group, place: int) -> None:
        """Put a group that was decided only up to an index back to the front of its caller and principal."""
        if group.sent == len(group.plans):
            self._turns.of(group.caller.turn).of(group.on_behalf_of).appendleft(group)
        self.asks += group.sent - place
        group.sent = place

    def next_since(self, caller: Caller, on_behalf_of: str, else_: float) -> float:
        """Return the arrival time of the next group of a caller and principal; else ``else_``."""
        its = self._turns.waiting(caller.turn)
        groups = its.waiting(on_behalf_of) if its is not None else None
        return groups[0].since if groups else else_

    def first(self) -> Group:
        """Return the group whose turn it is. The queue must not be empty."""
        return self._turns.first()[1].first()[1][0]

    def charge(self, asks: int, ids: int) -> None:
        """Charge the turn of the first group for what was sent of it; its remaining asks go to the back."""
        _, its = self._turns.first()
        _, groups = its.first()
        group = groups[0]
        self.asks -= asks
        groups.popleft()
        if group.sent < len(group.plans):
            groups.append(group)  # others go in between
        its.charge(asks + ids, is_left=bool(groups))
        self._turns.charge(asks + ids, is_left=bool(its))

    def drop(self) -> None:
        """Remove the first group, whose turn costs nothing."""
        _, its = self._turns.first()
        _, groups = its.first()
        group = groups.popleft()
        self.asks -= len(group.plans) - group.sent
        its.charge(0.0, is_left=bool(groups))
        self._turns.charge(0.0, is_left=bool(its))

    def drain(self) -> list[Group]:
        """Remove and return all groups."""
        groups = []
        while self:
            groups.append(self.first())
            self.drop()
        return groups


def _at_place(late: LateCallback, place: int, _own: int, answer: Answer) -> None:
    late(place, answer)
