"""The sampled rate, against Kafka's ring of samples; least waits, refunds, rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from app.domain import sampled_rate
from app.domain.quota import MAX_THROTTLE_MS
from app.domain.sampled_rate import Sample, Samples

WHOLE = st.integers(0, 50)
AMOUNTS = st.one_of(WHOLE, st.sampled_from((0.1, 0.5, 2.25, 7.3, 1 / 3)))
SPANS = st.tuples(st.integers(1, 5), st.integers(1, 20))
"""Numbers of samples, and their length in ms."""


@st.composite
def histories(draw: st.DrawFn, sample_ms: int, amounts: st.SearchStrategy[float]) -> list[tuple[int, float]]:
    """Times and amounts, in order of time, with gaps of about the length of a sample."""
    gaps = st.one_of(st.integers(0, 3 * sample_ms), st.sampled_from((0, 1, sample_ms - 1, sample_ms)))
    now, history = 1_000, []
    for gap, amount in draw(st.lists(st.tuples(gaps, amounts), max_size=12)):
        now += gap
        history.append((now, amount))
    return history


@dataclass
class Slot:
    value: float
    start_ms: int
    last_ms: int


@dataclass
class Kafka:
    """``SampledStat`` and ``Rate`` of Kafka 3.8: a ring of N+1 slots, purged when measured."""

    samples: int
    sample_ms: int
    slots: list[Slot] = field(default_factory=list)
    current: int = 0

    def record(self, usage: float, now_ms: int) -> None:
        if not self.slots:
            self.slots.append(Slot(0, now_ms, now_ms))
        if now_ms - self.slots[self.current].start_ms >= self.sample_ms:
            self.current = (self.current + 1) % (self.samples + 1)
            if self.current >= len(self.slots):
                self.slots.append(Slot(0, now_ms, now_ms))
            else:
                self.slots[self.current] = Slot(0, now_ms, now_ms)
        self.slots[self.current].value += usage
        self.slots[self.current].last_ms = now_ms

    def measure(self, now_ms: int) -> float:
        if not self.slots:
            return 0.0
        for n, slot in enumerate(self.slots):
            if now_ms - slot.last_ms >= self.samples * self.sample_ms:
                self.slots[n] = Slot(0, now_ms, now_ms)
        total = 0.0
        for slot in self.slots:
            total += slot.value
        elapsed = now_ms - min(slot.start_ms for slot in self.slots)
        full = elapsed // self.sample_ms
        if full < self.samples - 1:
            elapsed += (self.samples - 1 - full) * self.sample_ms
        return total / (max(elapsed, 1) / 1000)


@given(st.data(), SPANS, st.integers(0, 200))
def test_rate_equals_that_of_kafkas_ring(data: st.DataObject, span: tuple[int, int], later: int):
    samples, sample_ms = span
    kafka = Kafka(samples, sample_ms)
    state: Samples = ()
    for now, usage in data.draw(histories(sample_ms, WHOLE)):
        kafka.record(usage, now)
        state = sampled_rate.record(state, usage, now, samples, sample_ms)
        assert sampled_rate.measure(state, now, samples, sample_ms)[0] == kafka.measure(now)
    at = (state[-1].last_ms if state else 0) + later
    assert sampled_rate.measure(state, at, samples, sample_ms)[0] == kafka.measure(at)


@given(st.data(), SPANS)
def test_kept_samples_are_at_most_kafkas_slots(data: st.DataObject, span: tuple[int, int]):
    samples, sample_ms = span
    state: Samples = ()
    for now, usage in data.draw(histories(sample_ms, AMOUNTS)):
        state = sampled_rate.record(state, usage, now, samples, sample_ms)
        assert len(state) <= sampled_rate.kept_samples(samples) + 1


def passes(
    state: Samples, usage: float, at_ms: int, limit: float, samples: int, sample_ms: int, decided: int
) -> bool:
    after = sampled_rate.record(state, usage, at_ms, samples, sample_ms)
    return sampled_rate.measure(after, at_ms, decided, sample_ms)[0] <= limit


@given(
    st.data(),
    SPANS,
    st.one_of(st.integers(1, 5_000), st.sampled_from((0.7, 33.3, 101.5, 1e-3))),
    st.floats(0, 1, exclude_min=True),
)
def test_deny_wait_is_the_least_that_passes(
    data: st.DataObject, span: tuple[int, int], limit: float, part: float
):
    samples, sample_ms = span
    decided = max(samples, 2)
    state: Samples = ()
    now = 1_000
    for now, amount in data.draw(histories(sample_ms, AMOUNTS)):
        state = sampled_rate.record(state, amount, now, samples, sample_ms)
    now += data.draw(st.integers(0, 2 * sample_ms))
    largest = sampled_rate.largest_usage(limit, decided, sample_ms)
    usage = data.draw(st.sampled_from((part * largest, min(1.0, largest), largest)))
    if usage == 0 or sampled_rate.too_large(usage, limit, decided, sample_ms):
        return
    wait = sampled_rate.wait_ms(state, usage, now, limit, decided, sample_ms)
    least = next(
        d
        for d in range(1, 3 * (decided + 2) * sample_ms)
        if passes(state, usage, now + d, limit, samples, sample_ms, decided)
    )
    assert wait == least


def test_wait_may_be_short_within_a_sample_and_longer_at_its_edge():
    state = (Sample(100.0, 0, 0),)
    limit = 9.5
    assert sampled_rate.wait_ms(state, 1, 0, limit, 11, 1_000) == 632
    assert sampled_rate.wait_ms(state, 1, 999, limit, 11, 1_000) == 633


@given(st.floats(0, 1e9), st.floats(1e-3, 1e9), st.integers(1, 100_000), st.integers(1, MAX_THROTTLE_MS))
def test_delay_is_the_formula_rounded_half_up(observed: float, limit: float, window: int, longest: int):
    delay = sampled_rate.delay_ms(observed, limit, window, longest)
    if observed <= limit:
        assert delay == 0
        return
    assert 1 <= delay <= longest
    exact = (observed - limit) / limit * window
    if exact < longest:
        assert delay == max(1, math.floor(exact + 0.5))
        truth = (Fraction(observed) - Fraction(limit)) / Fraction(limit) * window
        assert abs(delay - max(truth, Fraction(1))) <= Fraction(1, 2) + truth * Fraction(1, 10**12)
    else:
        assert delay == longest


def test_delay_rounds_halves_up_and_is_at_least_1_ms():
    assert [sampled_rate.delay_ms(o, 2, 1) for o in (2.0, 2.0000001, 3.0, 5.0, 7.0)] == [0, 1, 1, 2, 3]
    assert sampled_rate.delay_ms(math.inf, 1, 1) == MAX_THROTTLE_MS


@given(st.data(), SPANS, AMOUNTS)
def test_refund_takes_from_the_newest_sample_and_stops_at_0(
    data: st.DataObject, span: tuple[int, int], refund: float
):
    samples, sample_ms = span
    state: Samples = ()
    for now, usage in data.draw(histories(sample_ms, AMOUNTS)):
        state = sampled_rate.record(state, usage, now, samples, sample_ms)
    after = sampled_rate.refund(state, refund)
    assert [(s.start_ms, s.last_ms) for s in after] == [(s.start_ms, s.last_ms) for s in state]
    assert all(0 <= s.value <= before.value for s, before in zip(after, state, strict=True))
    left = max(sampled_rate.total(state) - refund, 0.0)
    assert math.isclose(sampled_rate.total(after), left, abs_tol=1e-9)
    touched = [n for n, (s, before) in enumerate(zip(after, state, strict=True)) if s != before]
    assert all(s.value == 0 for s in after[touched[0] + 1 :]) if touched else True


@given(SPANS, st.integers(0, 500))
def test_window_is_at_least_all_samples_but_one(span: tuple[int, int], elapsed: int):
    samples, sample_ms = span
    window = sampled_rate.window_ms(elapsed, samples, sample_ms)
    assert window >= max((samples - 1) * sample_ms, elapsed, 1)
    if elapsed >= (samples - 1) * sample_ms:
        assert window == max(elapsed, 1)


def test_wait_may_last_longer_than_the_window_as_long_as_the_sample_lives():
    """A sample lives for a window after its last event, and its usage is then measured over a longer time."""
    state = (Sample(15.0, 0, 900),)
    assert sampled_rate.wait_ms(state, 1, 950, 5, 3, 1_000) == 3_200 - 950
    assert [passes(state, 1, at, 5, 3, 1_000, 3) for at in (3_199, 3_200)] == [False, True]
