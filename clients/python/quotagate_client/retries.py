"""Which failed calls are made again, and after how long."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

import httpx

NEVER_SENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
"""With these nothing can have been charged."""
GATEWAY: Final = frozenset({502, 503, 504})
"""What a balancer says of a node that may have charged the ask."""
KEPT_S: Final = 60.0
"""For so long a node gives the answer to an ask with an id again; a later retry would be charged anew."""


@dataclass(frozen=True, slots=True)
class Retries:
    """How often and how patiently: ``times`` 0 turns retries off, and with them the made-up ids.

    Only a call that was never sent, that was shed, or that is charged once however often it is sent, is made
    again. After one that was shed the wait is what the answer asks for, whatever ``longest_s`` is.
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
        """How long to wait after so many failures in so many seconds; None: not again."""
        if failed > self.times:
            return None
        longest: float = min(self.first_s * 2 ** (failed - 1), self.longest_s)
        wait = longest * (0.5 + 0.5 * dice.random())
        return wait if spent_s + wait <= self.within_s else None

    def may_wait(self, failed: int, spent_s: float, wait_s: float) -> bool:
        """Whether a call that was shed is made again after so long."""
        return failed <= self.times and spent_s + wait_s <= self.within_s


def may_repeat(outcome: httpx.Response | httpx.RequestError, *, safe: bool) -> bool:
    """Whether a call that came out like this may be made again; ``safe`` ones charge at most once."""
    if isinstance(outcome, httpx.Response):
        return safe and outcome.status_code in GATEWAY
    if isinstance(outcome, httpx.UnsupportedProtocol):
        return False
    return safe or isinstance(outcome, NEVER_SENT)
