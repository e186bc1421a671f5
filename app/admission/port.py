"""The port to admission, for the routes and for the caller's clock in front of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from app.admission.atomic_asks import AtomicDecision
from app.admission.plan import PlannedAsk
from app.domain.ask import Ask
from app.domain.caller import ANYONE, Caller

Then = Callable[[PlannedAsk | Exception], None]
"""Called once with an ask that is decided, or with the error in its place."""


class Decider(Protocol):
    """Decides asks: ``Admission``, or ``CallerClock`` in front of it.

    All raise ``OverloadedError`` and ``CallerGoneError`` (``app.admission.errors``), and ``OutOfBoundsError``
    for an ask of a bound caller that would record in a bucket that others share, or give back to one. Nothing
    was charged then.
    """

    def begin(self, ask: Ask, caller: Caller, then: Then, within_s: float | None = None) -> object:
        """Decide one ask, and call ``then`` once, perhaps before this returns.

        Args:
            within_s: how long the ask may wait in this node, if less than usual.
        """

    async def decide(
        self, asks: Sequence[Ask], caller: Caller = ANYONE, within_s: float | None = None
    ) -> list[PlannedAsk]:
        """Decide asks in order.

        Args:
            within_s: as for ``begin``; only with a single ask.
        """

    async def decide_atomically(
        self, asks: Sequence[Ask], caller: Caller = ANYONE, within_s: float | None = None
    ) -> AtomicDecision:
        """Admit all of these asks or none: they deny, and have neither producer ids nor an ``id``.

        Args:
            within_s: as for ``begin``.
        """
