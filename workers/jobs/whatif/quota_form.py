"""A quota in the form in which replays decide by it."""

from __future__ import annotations

from typing import Final

from app.domain import sampled_rate
from app.domain.oracle import BucketCharge
from app.domain.quota import (
    CONNECTION_CREATION_RATE,
    KEYS,
    MAX_THROTTLE_MS,
    PRODUCER_BYTE_RATE,
    RECHECK_MS,
    Enforcement,
    Quota,
)
from app.domain.volumes import scaled_quota
from workers.jobs.whatif.rows import LoggedAsk

DENY, RECHECK, RECORD = 1, 2, 4
MANNERS: Final = 8

REJECT: Final = -1
DELAY: Final = 1
THROTTLE: Final = 2
REFUSED: Final = 3
"""The places of these outcomes in ``OUTCOMES``."""


class QuotaForm:
    """A quota as it decides the asks of one manner, with what follows from its fields.

    Attributes:
        rank: the place in ``OUTCOMES`` of an answer that is a wait.
        samples: the number of samples to measure over: deny decides one sample as two.
        span_ms, kept_ms: how long a sample is measured, and kept.
        full_ms: the window of a rate, without the open sample.
        never: a usage above 0 is rejected, or delayed as long as possible, since the limit is 0.
        holds_up: the rate of connections: an acceptor holds one that must wait, and asks again.
    """

    __slots__ = (
        "clock_window_ms",
        "counts_ids",
        "enforcement",
        "full_ms",
        "holds_up",
        "is_deny",
        "kept_ms",
        "limit",
        "longest_ms",
        "never",
        "per_unit",
        "quota",
        "rank",
        "recheck",
        "recording",
        "sample_ms",
        "samples",
        "span_ms",
    )

    def __init__(
        self, quota: Quota, enforcement: Enforcement, *, recording: bool = False, recheck: bool = False
    ) -> None:
        self.quota = quota
        self.enforcement: Enforcement = enforcement
        self.recording = recording
        self.recheck = recheck
        self.counts_ids = quota.algorithm == "producer_ids"
        self.is_deny = enforcement == "deny"
        delays = recording if self.counts_ids else not self.is_deny
        self.rank = DELAY if delays else THROTTLE
        self.limit = quota.limit
        self.samples = max(quota.samples, 2) if self.is_deny else quota.samples
        self.sample_ms = quota.sample_ms
        self.span_ms = self.samples * quota.sample_ms
        self.kept_ms = sampled_rate.kept_samples(quota.samples) * quota.sample_ms
        self.full_ms = (self.samples - 1) * quota.sample_ms
        self.longest_ms = quota.longest_delay_ms
        self.clock_window_ms = quota.clock_window_ms
        self.never = quota.limit == 0 and not self.counts_ids
        self.holds_up = quota.key == CONNECTION_CREATION_RATE
        self.per_unit = KEYS[quota.key].per_unit

    def throttled(self, wait_ms: int) -> int:
        """The answer to an ask that must wait this long under deny."""
        if not self.holds_up:
            return min(wait_ms, MAX_THROTTLE_MS)
        return REJECT if self.recheck else min(wait_ms, RECHECK_MS)

    def charge(self, usage: float, now_ms: int, at_ms: int, ids: tuple[bytes, ...] = ()) -> BucketCharge:
        """The charge in the form of the domain."""
        return BucketCharge(self.quota, usage, self.enforcement, self.recording, now_ms, at_ms, ids)


class QuotaForms:
    """A quota, and its forms by the manner of an ask (``manner_of``).

    Attributes:
        forms: None until an ask of the manner came.
    """

    __slots__ = ("_scaled", "counts_ids", "forms", "quota")

    def __init__(self, quota: Quota) -> None:
        self.quota = quota
        self.counts_ids = quota.algorithm == "producer_ids"
        self.forms: list[QuotaForm | None] = [None] * MANNERS
        self._scaled: dict[float, QuotaForms] = {}

    def form(self, manner: int) -> QuotaForm:
        """The form for asks of a manner."""
        found = self.forms[manner]
        if found is None:
            is_recording = manner & RECORD > 0
            enforcement: Enforcement = "deny" if manner & DENY else self.quota.enforcement
            if is_recording and not self.counts_ids:
                enforcement = "delay"
            found = QuotaForm(self.quota, enforcement, recording=is_recording, recheck=manner & RECHECK > 0)
            self.forms[manner] = found
        return found

    def scaled(self, factor: float) -> QuotaForms:
        """The quota under a throttle factor above 0."""
        if self.quota.key != PRODUCER_BYTE_RATE:
            return self
        found = self._scaled.get(factor)
        if found is None:
            found = self._scaled[factor] = QuotaForms(scaled_quota(self.quota, factor))
        return found


def manner_of(ask: LoggedAsk) -> int:
    """How an ask is decided: the bits ``DENY``, ``RECHECK`` and ``RECORD``."""
    manner = DENY if ask.deny else 0
    if ask.recheck:
        manner |= RECHECK
    return manner | RECORD if ask.mode == "record" else manner
