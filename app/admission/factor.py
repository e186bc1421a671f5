"""The throttle factor as decisions see it: while it is 0, asks to produce must wait."""

from __future__ import annotations

from typing import Final, NamedTuple

from app.domain.ask import Ask
from app.domain.volumes import CurrentFactor, Drill, FactorState, VolumeRules

PRODUCE: Final = "produce_bytes"


class ThrottlingStatus(NamedTuple):
    """The throttle factor and the volumes at one time.

    Attributes:
        fallbacks: how often the fallback came into force on this node.
    """

    now_ms: int
    rules: VolumeRules
    in_force: CurrentFactor
    state: FactorState | None
    drill: Drill | None
    fallbacks: int


class FactorSource:
    """Gives the throttle factor, here always 1; ``throttle_factor/throttling.py`` has the factor in force."""

    def on(self, _ask: Ask) -> float:
        """Return the factor for an ask; 1 if the factor does not apply to it."""
        return 1.0

    def suspension_ms(self, _at_ms: int | None) -> int:
        """Return how long an ask to produce must wait while the factor is 0."""
        return 0


UNTHROTTLED: Final = FactorSource()


def is_suspended(ask: Ask, factor: float) -> bool:
    """Return whether a factor of 0 suspends an ask: it has produce bytes above 0."""
    return factor == 0 and ask.usage.get(PRODUCE, 0) > 0
