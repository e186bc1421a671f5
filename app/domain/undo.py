"""Undo: takes the charge of an ask in one slot back, after another slot refused the ask.

A refund cannot do this. It gives back from the newest sample although an older one took the charge, and
tokens that the bucket may have filled up meanwhile. Either lets more pass than the limit. After an undo, a
bucket admits at most as much as if the charge had never been made. If that can no longer be known, nothing is
given back:

- A bucket has a *birth*, which changes when it is removed, when its times move with a clock, when debt is
  forgiven, when a lowered burst may have cut tokens off, and when tokens are refunded: without the charge,
  the refund might have been cut off at the burst.
- A store has a *history*, which changes when a replica takes over: the replica may lack the charge.

So the *stamp* of a charge names both. A charge that is not given back is over by itself after a window.
"""

from __future__ import annotations

from typing import NamedTuple

from app.domain.sampled_rate import Samples
from app.domain.token_bucket import Tokens


class Stamp(NamedTuple):
    """The record of a charge to a bucket that undo needs.

    Attributes:
        birth: the bucket's birth; 0 if the charge cannot be undone.
        at_ms: when it was charged, by the time in the bucket.
        taken: the units that it took.
        history: the store's history.
    """

    birth: float
    at_ms: float
    taken: float
    history: bytes


def give_back_sample(state: Samples, stamp: Stamp) -> tuple[Samples, float]:
    """Give units back in the sample that took the charge; also return how many.

    >>> from app.domain.sampled_rate import Sample
    >>> state = (Sample(5.0, 0, 900), Sample(2.0, 1000, 1000))
    >>> give_back_sample(state, Stamp(1, 400, 3, b""))
    ((Sample(value=2.0, start_ms=0, last_ms=900), Sample(value=2.0, start_ms=1000, last_ms=1000)), 3)
    >>> give_back_sample(state, Stamp(1, 950, 3, b""))[1]
    0.0
    """
    for place, sample in enumerate(state):
        if sample.start_ms <= stamp.at_ms <= sample.last_ms:
            given = min(sample.value, stamp.taken)
            changed = sample._replace(value=sample.value - given)
            return (*state[:place], changed, *state[place + 1 :]), given
    return state, 0.0


def give_back_tokens(
    state: Tokens, stamp: Stamp, now_ms: int, largest_limit: float, burst: float
) -> tuple[Tokens, float]:
    """Give back the taken tokens, less those that may have been refilled since; also return how many.

    >>> give_back_tokens(Tokens(4.0, 1000), Stamp(1, 1000, 6, b""), 1200, 10, 20)
    (Tokens(tokens=8.0, at_ms=1000), 4.0)

    Args:
        largest_limit: the largest limit since the bucket was born.
    """
    given = stamp.taken - largest_limit * ((now_ms - stamp.at_ms) / 1000)
    given = min(given, burst - state.tokens)
    if given <= 0:
        return state, 0.0
    return Tokens(state.tokens + given, state.at_ms), given
