"""The port to admission: what the routes, and the caller's clock in front of it, ask to decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from app.admission.plain import PlainAsk
from app.domain.ask import Ask
from app.domain.caller import ANYONE, Caller
from app.domain.decision import Decision
from app.domain.quota import Quota

T = TypeVar("T")
Remaining = tuple[float, ...]
"""What remains of each quota of an ask that all of them admit."""


class InFull(NamedTuple):
    """A decision with all verdicts, and the quota of each verdict, in order."""

    decision: Decision
    quotas: tuple[Quota, ...]


class Joint(NamedTuple):
    """A decision on asks of which all are admitted or none.

    Attributes:
        parts: for each ask what its own quotas say of it, with all verdicts.
    """

    decision: Decision
    parts: tuple[InFull, ...]


class Decider(Protocol):
    """Decides asks: ``Admission``, or ``CallerClock`` in front of it.

    ``decide`` and ``decide_in_full`` raise ``OverloadedError`` and ``CallerGoneError``
    (``app.admission.errors``); nothing was charged then. ``decide`` also raises ``OutOfBoundsError`` for an
    ask of a bound caller that would record in a bucket that others share, or give back to one.
    """

    def plain(self, ask: Ask) -> PlainAsk | None:
        """Return an ask made ready, which serves equal ones while it is valid; None if it is not plain."""

    @property
    def edition(self) -> object:
        """That of the quotas in force: a plain ask is valid while it has the same one."""

    async def decide(self, asks: Sequence[Ask | PlainAsk], caller: Caller = ANYONE) -> list[Decision]:
        """Decide asks in order."""

    def begin(
        self, ask: Ask | PlainAsk, caller: Caller, then: Callable[[Decision | Exception], None]
    ) -> object:
        """Decide an ask, and call ``then`` once, perhaps before this returns.

        It gets the decision, or the ``OverloadedError`` or ``CallerGoneError``.

        Returns:
            the ``edition`` that decides. A plain ask of another one is decided all the same, in more time.

        Raises:
            OverloadedError: instead of the call.
            OutOfBoundsError: as for ``decide``.
        """

    async def decide_in_full(
        self, ask: Ask, caller: Caller = ANYONE, within_s: float | None = None
    ) -> InFull:
        """Decide an ask that wants detail and has no id.

        Args:
            within_s: how long the ask may wait in this node, if that is less than for all others.
        """

    async def decide_together(
        self, asks: Sequence[Ask], caller: Caller = ANYONE, within_s: float | None = None
    ) -> Joint:
        """Decide asks of which all are admitted or none: they deny, and have neither ids nor an ``id``.

        Args:
            within_s: as for ``decide_in_full``.
        """

    def begin_in_full(
        self,
        ask: PlainAsk,
        caller: Caller,
        admitted: Callable[[Remaining], T],
        then: Callable[[T | InFull | Exception], None],
        within_s: float | None = None,
    ) -> object:
        """Decide a plain ask that wants detail, and call ``then`` once, perhaps before this returns.

        Args:
            admitted: makes what ``then`` gets if every quota admits and there is no more to say. Otherwise it
                gets the whole decision, or the ``OverloadedError`` or ``CallerGoneError``.
            within_s: as for ``decide_in_full``.

        Returns:
            as ``begin``.

        Raises:
            OverloadedError: instead of the call.
        """
