"""The port for recording decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from app.admission.plan import PlannedAsk
from app.domain.ask import Ask
from app.domain.decision import Verdict
from app.store.port import Answer, Charge


class Recorder:
    """Receives all decisions and records none; ``app.admission.log.decision_log`` records them."""

    def decided(
        self,
        planned: PlannedAsk,
        answer: Answer | None,
        verdicts: Sequence[Verdict],
        failure: str | None,
    ) -> None:
        """Record a decision.

        Args:
            verdicts: those that made it; there may be none if every quota admits.
            failure: why it was made without the store.
        """

    def late(self, planned: PlannedAsk, answer: Answer, verdicts: Sequence[Verdict]) -> None:
        """Record the store's decision on an ask that had already been answered without it."""

    def leased(
        self,
        kind: Literal["lease", "settlement"],
        planned: PlannedAsk,
        answer: Answer,
        verdicts: Sequence[Verdict],
        lease: tuple[bytes, int],
    ) -> None:
        """Record a lease that was asked for, or settled; ``lease``: its name, and how long it lasts in ms.

        The ask's usage is the grant (the wish, if nothing was granted), or the usage spent.
        """

    def lapsed(self, ask: Ask, charge: Charge, units: float, answer: Answer) -> None:
        """Record the units that lapsed leases spent in a bucket of the ask."""

    def refreshed(self, planned: PlannedAsk, answer: Answer) -> None:
        """Record that ids of a refused ask were refreshed."""

    def renewed(self, planned: PlannedAsk, answer: Answer) -> None:
        """Record the ids that this node renewed: it answered for them, or the store lost them."""


UNRECORDED: Final = Recorder()
