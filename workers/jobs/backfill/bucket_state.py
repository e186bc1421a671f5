"""The state of one bucket, replayed from its log rows in the store's order, and written as assertions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from app.domain import sampled_rate
from app.domain.ask import Mode
from app.domain.assertion import Assertion, identity_of
from app.domain.exact_ids import ExactIds
from app.domain.oracle import BucketCharge, IdsBucket, RateBucket, TokensBucket, corrected_now
from app.domain.quota import Layers, Quota
from app.domain.token_bucket import tokens_at
from workers.jobs.verdicts import digests_of

SPARE: Final = 2
"""Write times of forgotten ids are dropped once there are this many times more write times than ids."""

FEW_IDS: Final = 8
"""So few write times are kept in any case."""

Subject = tuple[str, str, str | None]


class Write(NamedTuple):
    """A write of a verdict to its bucket.

    Attributes:
        quota: the quota as it applied.
        is_refused: the ask was refused, by this quota or another: nothing was charged.
        charged_ids, refreshed_ids: digests as signed integers; None for other quotas.
    """

    quota: Quota
    at_ms: int
    mode: str
    is_refused: bool
    usage: float
    charged_ids: Sequence[int] | None
    refreshed_ids: Sequence[int] | None


@dataclass(slots=True)
class WrittenIds(ExactIds):
    """Exact ids, each with the time of its last write."""

    written: dict[bytes, int] = field(default_factory=dict)

    def move(self, by_ms: int) -> None:
        """Shift all times by the same amount: the clock was set back by more than a window."""
        super(WrittenIds, self).move(by_ms)
        self.written = {id_: at + by_ms for id_, at in self.written.items()}

    def write(self, id_: bytes, now_ms: int, layers: Layers, max_ids: int) -> None:
        """Put an id into the open layer, as logged, if there is room for it."""
        self.forget(id_)
        if self.remembered(now_ms, layers) < max_ids:
            self.adopt(id_, now_ms, layers)

    def adopt(self, spread: bytes, now_ms: int, layers: Layers) -> None:
        """Write an unseen id to the open layer, and remember when."""
        super(WrittenIds, self).adopt(spread, now_ms, layers)
        self.written[spread] = now_ms
        held = sum(map(len, self.held.values()))
        if len(self.written) > SPARE * held + FEW_IDS:
            self.written = {id_: self.written[id_] for ids in self.held.values() for id_ in ids}


@dataclass(slots=True)
class IdsState:
    """The state of a bucket of producer ids.

    Attributes:
        subject: quota key, name and identity of the bucket.
        quota: the quota of the last write; None before.
    """

    subject: Subject
    max_ids: int
    quota: Quota | None = None
    state: WrittenIds = field(default_factory=WrittenIds)

    def apply(self, write: Write) -> None:
        """Apply the writes of a decision to the bucket."""
        self.quota = quota = write.quota
        now_ms = corrected_now("admit", quota, IdsBucket(self.max_ids, self.state), write.at_ms)
        charged = digests_of(write.charged_ids)
        for id_ in (*digests_of(write.refreshed_ids), *charged):
            self.state.write(id_, now_ms, quota.layers, self.max_ids)
        self._charge(len(charged), now_ms, quota)

    def use(self, id_: bytes, at_ms: int, quota: Quota) -> None:
        """Apply one use from a history without charges: an id that no layer holds is charged."""
        self.quota = quota
        if self.state.find(id_, at_ms, quota.layers) is None:
            self.state.write(id_, at_ms, quota.layers, self.max_ids)
            self._charge(1, at_ms, quota)
        else:
            self.state.refresh(id_, at_ms, quota.layers, quota.limit, self.max_ids)

    def assertions(self, at_ms: int) -> Iterator[Assertion]:
        """The content of the bucket at a moment after its last row."""
        quota, state = self.quota, self.state
        if quota is None:
            return
        charges = Counter(at for at in state.charges if at_ms - at < quota.window_ms)
        for at in sorted(charges):
            yield Assertion(*self.subject, "charge", at, value=float(charges[at]))
        ids = [
            (state.written[id_], int.from_bytes(id_, "big", signed=True), state.layers[number])
            for number in state.live_layers(at_ms, quota.layers)
            for id_ in state.held.get(number, ())
        ]
        for written, digest, layer in sorted(ids):
            yield Assertion(*self.subject, "id", written, digest, layer)

    def _charge(self, ids: int, now_ms: int, quota: Quota) -> None:
        """Charge a number of ids; the log, or the layers, have already shown that they were new."""
        if ids:
            self.state.charges += [now_ms] * ids
            self.state.charge((), now_ms, quota.window_ms, quota.layers, quota.limit, self.max_ids)


@dataclass(slots=True)
class LevelState:
    """The state of a sampled rate or a token bucket, which the oracle's bucket charges and refunds."""

    subject: Subject
    level: RateBucket | TokensBucket
    quota: Quota | None = None

    def apply(self, write: Write) -> None:
        """Apply the writes of a decision to the bucket."""
        quota, level = write.quota, self.level
        if isinstance(level, RateBucket) and self._is_ordinary(level.state, write):
            self.quota = quota
            level.state = sampled_rate.record(
                level.state, write.usage, write.at_ms, quota.samples, quota.sample_ms
            )
            return
        mode: Mode = "refund" if write.mode == "refund" else "admit"
        now_ms = corrected_now(mode, quota, self.level, write.at_ms)
        charge = BucketCharge(quota, write.usage, "delay", True, now_ms, write.at_ms)
        if mode != "refund" and write.is_refused:
            self.level.touch(charge)  # charges nothing, but ends a debt
            return
        self.quota = quota
        if mode == "refund":
            self.level.refund(charge)
        else:
            self.level.charge(charge)

    @staticmethod
    def _is_ordinary(state: sampled_rate.Samples, write: Write) -> bool:
        """Whether a write is a charge, and no clock was set back: most of them, so they go a shorter way."""
        in_order = not state or write.at_ms >= state[-1].last_ms
        return in_order and write.mode != "refund" and not write.is_refused

    def assertions(self, at_ms: int) -> Iterator[Assertion]:
        """The content of the bucket at a moment after its last row."""
        quota = self.quota
        if quota is None:
            return
        if isinstance(self.level, RateBucket):
            kept = sampled_rate.kept_samples(quota.samples)
            for sample in sampled_rate.live_samples(self.level.state, at_ms, kept, quota.sample_ms):
                start_ms, value, last_ms = sample.start_ms, float(sample.value), sample.last_ms
                yield Assertion(*self.subject, "sample", start_ms, value=value, last_ms=last_ms)
            return
        state = self.level.state
        if state is not None and tokens_at(state, at_ms, quota.limit, quota.burst) < quota.burst:
            yield Assertion(*self.subject, "tokens", state.at_ms, value=float(state.tokens))


def bucket_state_of(quota: Quota, bucket: str, max_ids: int) -> IdsState | LevelState:
    """The empty state of a quota's bucket."""
    subject = quota.key, bucket, identity_of(quota)
    if quota.algorithm == "producer_ids":
        return IdsState(subject, max_ids)
    return LevelState(subject, RateBucket() if quota.algorithm == "sampled_rate" else TokensBucket())
