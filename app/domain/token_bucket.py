"""The token bucket: refilled at the limit, up to a burst; strict under deny, in bounded debt under delay."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import NamedTuple

from app.domain.holds import Holds, ended, held
from app.domain.quota import MAX_THROTTLE_MS


class Tokens(NamedTuple):
    """The state of a bucket when it was last written."""

    tokens: float
    at_ms: int


def tokens_at(state: Tokens | None, now_ms: int, limit: float, burst: float) -> float:
    """The tokens at a moment; an absent bucket is full.

    >>> tokens_at(Tokens(40.0, 0), 2000, 5, 100), tokens_at(None, 0, 5, 100)
    (50.0, 100)
    """
    if state is None:
        return burst
    return min(burst, state.tokens + limit * ((now_ms - state.at_ms) / 1000))


def forgive(tokens: float, max_debt: float) -> tuple[float, float]:
    """The tokens without the debt beyond ``max_debt``, and the forgiven debt.

    >>> forgive(-100.0, 60), forgive(-60.0, 60), forgive(-(2.0**53), math.inf)
    ((-60, 40.0), (-60.0, 0.0), (-9007199254740992.0, 0.0))
    """
    return (-max_debt, -max_debt - tokens) if tokens < -max_debt else (tokens, 0.0)


def refund(state: Tokens | None, cost: float, burst: float) -> Tokens | None:
    """Give tokens back, up to the burst. Times stay, and an absent bucket, which is full, stays absent."""
    return None if state is None else Tokens(min(burst, state.tokens + cost), state.at_ms)


def delay_ms(tokens: float, limit: float, longest_ms: int = MAX_THROTTLE_MS) -> int:
    """How long until a debt is refilled, rounded half up; at least 1 ms if there is a debt.

    >>> delay_ms(-60.0, 5), delay_ms(0.0, 5), delay_ms(-1.0, 0)
    (12000, 0, 2147483647)
    """
    if tokens >= 0:
        return 0
    if limit == 0:
        return longest_ms
    return max(1, math.floor(min(-tokens / limit * 1000, float(longest_ms)) + 0.5))


def most_tokens(burst: float, holds: Holds) -> float:
    """The level to which a bucket fills: the burst less the held units, at least 0 after a lowered burst.

    >>> from app.domain.holds import Hold
    >>> most_tokens(30, (Hold(b"a", 10, 400),)), most_tokens(5, (Hold(b"a", 10, 400),))
    (20.0, 0.0)
    """
    return max(burst - held(holds), 0.0)


def reckon(
    state: Tokens | None, holds: Holds, now_ms: int, limit: float, burst: float
) -> tuple[Tokens | None, Holds]:
    """The state when the last of the ended leases ended, and the holds of the leases that still last.

    The tokens of a lease were taken when it was granted. Until its end the bucket fills only up to the burst
    less the held units.

    >>> from app.domain.holds import Hold
    >>> reckon(Tokens(8.0, 0), (Hold(b"a", 10, 400), Hold(b"b", 10, 900)), 500, 100, 30)
    (Tokens(tokens=10.0, at_ms=400), (Hold(lease=b'b', units=10, ends_ms=900),))
    """
    over, rest = ended(holds, now_ms)
    for place, hold in enumerate(over):
        assert state is not None
        at_ms = max(hold.ends_ms, state.at_ms)
        state = Tokens(tokens_at(state, at_ms, limit, most_tokens(burst, holds[place:])), at_ms)
    return state, rest


def wait_ms(state: Tokens, cost: float, now_ms: int, limit: float, burst: float, holds: Holds = ()) -> int:
    """The least whole wait >= 1 ms after which the bucket holds the cost, at most the longest throttle.

    >>> wait_ms(Tokens(0.0, 0), 1, 0, 10, 100)
    100
    """

    def suffices(wait: int) -> bool:
        then, rest = reckon(state, holds, now_ms + wait, limit, burst)
        return tokens_at(then, now_ms + wait, limit, most_tokens(burst, rest)) >= cost

    # The tokens never fall, so bisection finds the least wait.
    return 1 + bisect_left(range(1, MAX_THROTTLE_MS), True, key=suffices)
