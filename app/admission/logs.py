"""The port for recording decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from app.admission.plain import PlainQuotas, PlannedAsk
from app.admission.plan import Match
from app.domain.ask import Ask
from app.domain.decision import Decision, Verdict
from app.domain.ladder import AppliedQuota
from app.store.port import Answer, PackedAnswer


class Logs:
    """Receives all decisions and records none; ``app.admission.decision_log.DecisionLog`` records them.

    Attributes:
        takes_admissions: whether plain admissions are recorded too.
    """

    takes_admissions = False

    def decided(
        self,
        ask: Ask,
        matches: Sequence[Match],
        answer: Answer | None,
        decision: Decision,
        verdicts: Sequence[Verdict],
        failure: str | None,
    ) -> None:
        """Record a decision; ``failure`` is why it was made without the store."""

    def admitted(self, planned: PlannedAsk, plain: PlainQuotas, packed: PackedAnswer | None) -> None:
        """Record a plain admission as the store answered it, if ``takes_admissions``.

        Args:
            plain: of the ask.
            packed: None if no quota applies.
        """

    def late(
        self,
        ask: Ask,
        matches: Sequence[Match],
        answer: Answer,
        decision: Decision,
        verdicts: Sequence[Verdict],
    ) -> None:
        """Record what the store decided of an ask that had already been answered without it."""

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
        """Record a lease that was asked for, or settled; ``lease``: its name, and how long it lasts in ms.

        The ask's usage is what was granted (the wish, if nothing was), or what was spent.
        """

    def lapsed(self, ask: Ask, applied: AppliedQuota, units: float, answer: Answer) -> None:
        """Record what counts as spent in a bucket of the ask, as leases ended that nobody had settled."""

    def refreshed(self, ask: Ask, matches: Sequence[Match], answer: Answer) -> None:
        """Record that ids of a refused ask were refreshed."""

    def renewed(self, ask: Ask, matches: Sequence[Match], answer: Answer) -> None:
        """Record the ids that this node wrote again, as it answered for them or the store lost them."""


UNLOGGED: Final = Logs()
