"""The sampled rate of Kafka 3.8 and later: recording, measuring, delaying and refusing usage.

The state of a bucket is a tuple of samples, oldest first; an empty tuple is an absent bucket. Kafka keeps a
ring of N+1 samples, in which the next slot is always obsolete, so a list of the live ones is enough.
Source of the arithmetic: ``SampledStat``, ``Rate`` and ``QuotaUtils`` of Apache Kafka.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from app.domain.holds import Holds, ended, held
from app.domain.quota import MAX_THROTTLE_MS

UNREACHABLE_MS: Final = 1 << 40
"""A window longer than any real one."""


class Sample(NamedTuple):
    """One slice of a rate: its sum, and the times of its beginning and last event, in milliseconds."""

    value: float
    start_ms: int
    last_ms: int


Samples = tuple[Sample, ...]


def kept_samples(samples: int) -> int:
    """How many samples a bucket keeps: at least two, because deny decides one sample as two."""
    return max(samples, 2)


def live_samples(state: Samples, now_ms: int, samples: int, sample_ms: int) -> Samples:
    """The samples whose last event is younger than the window."""
    return tuple(s for s in state if now_ms - s.last_ms < samples * sample_ms)


def record(state: Samples, usage: float, now_ms: int, samples: int, sample_ms: int) -> Samples:
    """Record usage: into the newest sample while it is younger than ``sample_ms``, else into a new one.

    >>> record((), 3, 0, 11, 1000)
    (Sample(value=3.0, start_ms=0, last_ms=0),)
    """
    if state and now_ms - state[-1].start_ms < sample_ms:
        newest = state[-1]
        return (*state[:-1], Sample(newest.value + usage, newest.start_ms, now_ms))
    return (
        *live_samples(state, now_ms, kept_samples(samples), sample_ms),
        Sample(float(usage), now_ms, now_ms),
    )


def refund(state: Samples, usage: float) -> Samples:
    """Give usage back, from the newest sample backwards, never below 0; no sample begins, times stay.

    >>> refund((Sample(5, 0, 0), Sample(2, 1000, 1000)), 3)
    (Sample(value=4.0, start_ms=0, last_ms=0), Sample(value=0.0, start_ms=1000, last_ms=1000))
    """
    refunded: list[Sample] = []
    for sample in reversed(state):
        taken = min(sample.value, usage)
        usage -= taken
        refunded.append(sample._replace(value=float(sample.value - taken)))
    return tuple(reversed(refunded))


def window_ms(elapsed_ms: int, samples: int, sample_ms: int) -> int:
    """The span over which a rate is measured, from the age of its oldest live sample.

    A cold rate is measured as if N-1 full samples had passed, so that an early burst does not look like a
    high rate. The span is at least 1 ms, because a rate over no time is undefined.

    >>> window_ms(0, 11, 1000), window_ms(999, 11, 1000), window_ms(10_500, 11, 1000), window_ms(0, 1, 1000)
    (10000, 10999, 10500, 1)
    """
    missing = samples - 1 - elapsed_ms // sample_ms
    return max(elapsed_ms + max(missing, 0) * sample_ms, 1)


def measure(state: Samples, now_ms: int, samples: int, sample_ms: int) -> tuple[float, int]:
    """The rate per second, and the window in milliseconds over which it was measured.

    >>> measure((Sample(50.0, 0, 0),), 999, 11, 1000)
    (4.545867806164196, 10999)
    """
    alive = live_samples(state, now_ms, samples, sample_ms)
    elapsed = now_ms - alive[0].start_ms if alive else 0
    window = window_ms(elapsed, samples, sample_ms)
    return total(alive) / (window / 1000), window


def total(alive: Samples) -> float:
    """The plain sum of the samples, oldest first."""
    summed = 0.0
    for sample in alive:
        summed += sample.value
    return summed


def delay_ms(observed: float, limit: float, window: int, longest_ms: int = MAX_THROTTLE_MS) -> int:
    """How long to hold an answer so that the rate over the window falls to the limit.

    With O observed, T the limit and W the window, a delay of X makes the rate O * W / (W + X); setting that
    equal to T gives X = (O - T) / T * W. Rounded half up; at least 1 ms above the limit.

    >>> delay_ms(100, 50, 2000), delay_ms(16.5, 20.4, 9000), delay_ms(100, 50, 9000, 500), delay_ms(1, 0, 1)
    (2000, 0, 500, 2147483647)
    """
    if observed <= limit:
        return 0
    if limit == 0:
        return longest_ms
    exact = (observed - limit) / limit * window
    return max(1, math.floor(min(exact, float(longest_ms)) + 0.5))


def largest_usage(limit: float, samples: int, sample_ms: int) -> float:
    """The most that an empty bucket can hold under deny, in units: Kafka's "max value in a quota window".

    >>> largest_usage(10, 4, 1000), largest_usage(7, 2, 2000)
    (30.0, 14.0)
    """
    return limit * ((samples - 1) * sample_ms / 1000)


def too_large(usage: float, limit: float, samples: int, sample_ms: int) -> bool:
    """Whether this usage alone, measured over N-1 samples, is above the limit."""
    return usage / ((samples - 1) * sample_ms / 1000) > limit


def reckon(state: Samples, holds: Holds, now_ms: int, samples: int, sample_ms: int) -> tuple[Samples, Holds]:
    """The state after the leases that ended by now, each recorded at its end, and the holds of the others.

    >>> from app.domain.holds import Hold
    >>> reckon((Sample(1.0, 0, 0),), (Hold(b"a", 3, 400), Hold(b"b", 5, 900)), 500, 11, 1000)
    ((Sample(value=4.0, start_ms=0, last_ms=400),), (Hold(lease=b'b', units=5, ends_ms=900),))
    """
    over, rest = ended(holds, now_ms)
    for hold in over:
        at_ms = max(hold.ends_ms, state[-1].last_ms if state else hold.ends_ms)
        state = record(state, hold.units, at_ms, samples, sample_ms)
    return state, rest


def wait_ms(
    state: Samples,
    usage: float,
    now_ms: int,
    limit: float,
    samples: int,
    sample_ms: int,
    holds: Holds = (),
) -> int:
    """The least whole wait >= 1 ms after which this usage would pass if nothing else were recorded meanwhile.

    The measured rate is not monotone in time: it falls within a sample, springs back at the sample's edge
    while cold, and drops when a sample dies. Between two edges the live samples and their sum stay the same,
    so the first passing moment follows from the least passing window. The search goes from edge to edge.
    A hold counts as usage until its end, and is recorded then.

    The caller must have refused usage that is too large, because it never passes.

    >>> wait_ms((Sample(20.0, 0, 0),), 20, 5000, 2, 11, 1000)
    6000
    """
    at = now_ms + 1
    for place, hold in enumerate(holds):
        used = usage + held(holds[place:])
        passes = _passing(state, used, at, hold.ends_ms, limit, samples, sample_ms)
        if passes is not None:
            return passes - now_ms
        at = max(at, hold.ends_ms)
        state, _ = reckon(state, (hold,), at, samples, sample_ms)
    passes = _passing(state, usage, at, None, limit, samples, sample_ms)
    assert passes is not None
    return passes - now_ms


def _passing(
    state: Samples, usage: float, at: int, until: int | None, limit: float, samples: int, sample_ms: int
) -> int | None:
    """The first passing moment from ``at`` on and before ``until``, or None."""
    edges = {s.last_ms + samples * sample_ms for s in state} | {s.start_ms + sample_ms for s in state[-1:]}
    for edge in [*sorted(edge for edge in edges if edge > at), None]:
        end = min((e for e in (edge, until) if e is not None), default=None)
        # with no live sample the window cannot grow
        if live_samples(state, at, samples, sample_ms) or not too_large(usage, limit, samples, sample_ms):
            passes = _first_passing(state, usage, at, limit, samples, sample_ms)
            if end is None or passes < end:
                return passes
        if end is None or end == until:
            return None
        at = end
    return None


def _first_passing(
    state: Samples, usage: float, at_ms: int, limit: float, samples: int, sample_ms: int
) -> int:
    """The first passing moment from ``at_ms`` on, if no further edge came."""
    alive = live_samples(record(state, usage, at_ms, samples, sample_ms), at_ms, samples, sample_ms)
    start = alive[0].start_ms
    need = _least_window(total(alive), limit)
    full = (samples - 1) * sample_ms
    elapsed = at_ms - start
    if need <= full:
        return at_ms
    if elapsed < full and need < full + sample_ms:
        return at_ms + max(0, need - full - elapsed % sample_ms)
    return max(at_ms, start + need)


def _least_window(units: float, limit: float) -> int:
    """The least window in milliseconds over which these units measure at most the limit."""
    guess = units * 1000 / limit
    if guess > UNREACHABLE_MS:
        return UNREACHABLE_MS
    window = max(math.ceil(guess), 1)
    while window > 1 and units / ((window - 1) / 1000) <= limit:
        window -= 1
    while units / (window / 1000) > limit:
        window += 1
    return window
