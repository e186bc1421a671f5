"""The throttle factor as decisions see it: while it is 0, asks to produce must wait."""

from __future__ import annotations

from typing import Final

from app.domain.ask import Ask

PRODUCE: Final = "produce_bytes"


class FactorSource:
    """Gives the throttle factor: here always 1; ``app.admission.throttling.Throttling`` the one in force."""

    def on(self, _ask: Ask) -> float:
        """Return the factor for an ask; 1 if the factor does not apply to it."""
        return 1.0

    def hold_ms(self, _at_ms: int | None) -> int:
        """Return how long an ask to produce must wait while the factor is 0."""
        return 0


UNTHROTTLED: Final = FactorSource()


def is_held(ask: Ask, factor: float) -> bool:
    """Return whether a factor of 0 holds an ask: it has produce bytes above 0."""
    return factor == 0 and ask.usage.get(PRODUCE, 0) > 0
