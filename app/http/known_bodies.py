"""Bodies of plain asks that came before, byte for byte, and what was made of them."""

from __future__ import annotations

from typing import Final, NamedTuple

from app.admission.generations import Generations, Sightings
from app.admission.plain import PlainAsk

MAX_KNOWN: Final = 1_024
"""The longest body that is kept, in bytes; a plain ask without many ids has about a hundred."""

MOST_BYTES: Final = 16 * 1024 * 1024
"""The memory for all bodies and what was made of them."""


class KnownBody(NamedTuple):
    """What was made of a body; ``ids`` is how many producer ids it has, each as often as it has it."""

    ask: PlainAsk
    ids: int


class KnownBodies:
    """Remembers the bodies of plain asks: equal bodies are equal asks.

    A body is kept when it comes for the second time, so one that comes only once costs nothing here. Whoever
    sends a new body each time gains nothing, and pushes out hardly anything: one in 255 is kept.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._kept: Generations[bytes, KnownBody] = Generations(most_bytes)
        self._seen = Sightings()
        self.get_any: Final = self._kept.get
        """Returns what was made of a body, even if it is no longer valid; None of one that is not known."""

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, body: bytes, edition: object) -> KnownBody | None:
        """Return what was made of a body, if that is still valid.

        Args:
            edition: that of the quotas in force (``Decider.edition``).
        """
        known = self._kept.get(body)
        if known is None or known.ask.quotas.edition is edition:
            return known
        self._kept.remove(body)
        return None

    def remove(self, body: bytes) -> None:
        """Forget a body that was just found."""
        self._kept.remove(body)

    def add(self, body: bytes, ask: PlainAsk, ids: int) -> None:
        """Remember a body that is not known, if it came before."""
        if len(body) <= MAX_KNOWN and self._seen.again(body) and self._kept.get(body) is None:
            self._kept.add(body, KnownBody(ask, ids), 2 * len(body) + ask.size)
