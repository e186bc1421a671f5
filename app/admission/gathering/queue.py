"""Requests that wait for a store call, served by fair turns on two levels.

Callers take turns (a caller is an API key, or an address without one), and so do the principals that one
caller asks for. A turn takes at most 10 asks of one request, and weighs 1 per ask and 1 per producer id. So
neither a flood of requests nor a batch of 1,000 asks goes ahead of everybody else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Self

from msgspec import Struct, field

from app.admission.gathering.fair_turns import FairTurns
from app.domain.caller import ANYONE, Caller
from app.store.port import Answer, Plan

QUANTUM: Final = 10
"""How many asks of one request are served in one turn."""

ACCOUNTING: Final = frozenset({"record", "refund", "settle", "undo"})
"""The modes of asks for work that is done, and of undos: they are sent even if nobody waits for them."""

LateCallback = Callable[[Any, int, Answer], None]
"""Called with a request, the index of a plan and its answer, if that came after the request was finished."""

DoneCallback = Callable[[Any, Exception | None], None]
"""Called once with a finished request, and with the error that ended it; None if it has all its answers.

A ``StoreError``: the store failed; asks without an answer are decided without it.
An ``AdmissionError``: the request was refused, and nothing was sent.
"""


class Group(Struct, eq=False):
    """The plans of one request, decided in order, in one store call or several.

    Attributes:
        caller: who sent the request.
        on_behalf_of: the principal it asks for, for the second level of turns.
        since: when the request arrived, by the monotonic clock.
        ids: how many producer ids its plans have.
        is_accounting: whether it has records or refunds, which are sent even if the caller has left.
        within_s: how long it may wait in the queue.
        answers: the answers so far; none is added once the request is finished.
        is_done: whether it is finished, or its caller no longer waits.
        sent: how many plans have been put into a call.
    """

    plans: Sequence[Plan]
    done: DoneCallback
    late: LateCallback | None
    caller: Caller
    on_behalf_of: str
    since: float
    ids: int
    is_accounting: bool
    within_s: float = math.inf
    answers: list[Answer] = field(default_factory=list)
    is_done: bool = False
    sent: int = 0

    @classmethod
    def of(
        cls,
        plans: Sequence[Plan],
        done: DoneCallback,
        late: LateCallback | None = None,
        caller: Caller = ANYONE,
        on_behalf_of: str = "",
        since: float = 0.0,
    ) -> Self:
        """Return the group of these plans."""
        ids, is_accounting = 0, False
        for plan in plans:
            ids += plan.ids
            if plan.mode in ACCOUNTING:
                is_accounting = True
        return cls(plans, done, late, caller, on_behalf_of, since, ids, is_accounting)

    def unsent_accounts(self) -> list[Group]:
        """Return its unsent records and refunds, each as a group of its own whose answer will be late.

        The work that they account for is done, so they are sent even after the request was answered.
        """
        return [
            self._account(place, plan)
            for place, plan in enumerate(self.plans[self.sent :], self.sent)
            if plan.mode in ACCOUNTING
        ]

    def _account(self, place: int, plan: Plan) -> Group:
        late = None if self.late is None else partial(_of, self.late, self, place)
        account = Group.of((plan,), self.done, late, self.caller, self.on_behalf_of, self.since)
        account.is_done = True
        return account


class Queue:
    """Waiting groups, by fair turns of callers and of each caller's principals."""

    def __init__(self) -> None:
        self._turns: FairTurns[FairTurns[deque[Group]]] = FairTurns(partial(FairTurns, deque))
        self.asks = 0
        """How many asks are waiting."""

    def __bool__(self) -> bool:
        return len(self._turns) > 0

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
        principals = self._turns.waiting(caller.turn)
        groups = principals.waiting(on_behalf_of) if principals is not None else None
        return groups[0].since if groups else else_

    def first(self) -> Group:
        """Return the group whose turn it is. The queue must not be empty."""
        return self._turns.first()[1].first()[1][0]

    def charge(self, asks: int, ids: int) -> None:
        """Charge the first group's turn for the asks and ids sent; its remaining asks go to the back."""
        _, principals = self._turns.first()
        _, groups = principals.first()
        group = groups[0]
        self.asks -= asks
        groups.popleft()
        if group.sent < len(group.plans):
            groups.append(group)  # others go in between
        principals.charge(asks + ids, is_left=bool(groups))
        self._turns.charge(asks + ids, is_left=bool(principals))

    def drop(self) -> None:
        """Remove the first group, whose turn costs nothing."""
        _, principals = self._turns.first()
        _, groups = principals.first()
        group = groups.popleft()
        self.asks -= len(group.plans) - group.sent
        principals.charge(0.0, is_left=bool(groups))
        self._turns.charge(0.0, is_left=bool(principals))

    def drain(self) -> list[Group]:
        """Remove and return all groups."""
        groups = []
        while self:
            groups.append(self.first())
            self.drop()
        return groups


def _of(late: LateCallback, group: Group, place: int, _account: Group, _own: int, answer: Answer) -> None:
    """Report the late answer to an accounting group as the answer to its plan in the original group."""
    late(group, place, answer)
