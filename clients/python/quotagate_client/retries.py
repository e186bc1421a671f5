"""Decides whether a failed call is repeated, and after how long."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

import httpx

NEVER_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
"""After these errors nothing can have been charged."""
GATEWAY: Final = frozenset({502, 503, 504})
"""Statuses of a load balancer for a node that may have charged the ask."""
KEPT_S: Final = 60.0
"""How long a node remembers the answer to an ask with an id; a later retry would be charged again."""


@dataclass(frozen=True, slots=True)
class Retries:
    """The number and the timing of retries; ``times`` 0 turns off retries and generated ids.

    Only a call that was never sent, that was shed, or that charges at most once is repeated. After a shed
    call the wait is the answer's ``Retry-After``, even if it is longer than ``longest_s``.
    """

    times: int = 2
    first_s: float = 0.05
    longest_s: float = 1.0
    within_s: float = 30.0

    def __post_init__(self) -> None:
        if self.times < 0 or self.first_s < 0 or self.longest_s < 0:
            raise ValueError("times, first_s and longest_s must be 0 or more")
        if not 0 <= self.within_s < KEPT_S:
            raise ValueError(f"within_s must be below {KEPT_S:g}: for so long an id is known")

    def wait_s(self, failed: int, spent_s: float, dice: random.Random) -> float | None:
        """Return how long to wait after this many failures and seconds; None: do not retry."""
        if failed > self.times:
            return None
        longest: float = min(self.first_s * 2 ** (failed - 1), self.longest_s)
        wait = longest * (0.5 + 0.5 * dice.random())
        return wait if spent_s + wait <= self.within_s else None

    def may_wait(self, failed: int, spent_s: float, wait_s: float) -> bool:
        """Whether to repeat a call that was shed, after this long."""
        return failed <= self.times and spent_s + wait_s <= self.within_s


def may_repeat(outcome: httpx.Response | httpx.RequestError, *, safe: bool) -> bool:
    """Whether to repeat a call with this outcome; ``safe`` calls charge at most once."""
    if isinstance(outcome, httpx.Response):
        return safe and outcome.status_code in GATEWAY
    if isinstance(outcome, httpx.UnsupportedProtocol):
        return False
    return safe or isinstance(outcome, NEVER_SENT)
