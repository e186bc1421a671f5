"""Oracles with planted faults for some principals, which an audit must find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from app.domain.ask import Ask
from app.domain.ladder import AppliedQuota
from app.domain.oracle import (
    ADMIT,
    Bucket,
    BucketCharge,
    IdsBucket,
    Judgement,
    Oracle,
    Part,
    RateBucket,
    TokensBucket,
)
from app.domain.producer_ids import IdPlace, ProducerIds
from app.domain.quota import Layers, Quota

SOMETIMES = 9
"""A fault appears once in this many times."""


class FaultyOracle(Oracle):
    """An oracle whose buckets have a fault, for some principals."""

    def __init__(self, secret: bytes, faults: Mapping[str, Callable[[Quota, int], Bucket]]) -> None:
        super().__init__(secret)
        self.faults = dict(faults)
        self._of: str | None = None

    def _part(self, ask: Ask, found: AppliedQuota, now_ms: int) -> Part:
        is_own = found.bucket.startswith("user=") and "," not in found.bucket
        self._of = ask.principal if is_own else None
        return super()._part(ask, found, now_ms)

    def _absent(self, quota: Quota) -> Bucket:
        if self._of in self.faults:
            return self.faults[self._of](quota, self.max_ids)
        return super()._absent(quota)


def forgetful(quota: Quota, max_ids: int) -> Bucket:
    """Sometimes forgets a charge."""
    if quota.algorithm == "sampled_rate":
        return ForgetfulRate()
    return ForgetfulTokens() if quota.algorithm == "token_bucket" else ForgetfulIds(max_ids)


def gullible(quota: Quota, max_ids: int) -> Bucket:
    """Sometimes takes a new id as seen."""
    if quota.algorithm == "producer_ids":
        return IdsBucket(max_ids, GullibleIds())
    return RateBucket() if quota.algorithm == "sampled_rate" else TokensBucket()


def lenient(quota: Quota, max_ids: int) -> Bucket:
    """Admits asks that the quota refuses."""
    if quota.algorithm == "producer_ids":
        return LenientIds(max_ids)
    return RateBucket() if quota.algorithm == "sampled_rate" else LenientTokens()


def impatient(quota: Quota, max_ids: int) -> Bucket:
    """Gives waits that are one millisecond too short."""
    if quota.algorithm == "producer_ids":
        return ImpatientIds(max_ids)
    return ImpatientRate() if quota.algorithm == "sampled_rate" else TokensBucket()


def double(quota: Quota, max_ids: int) -> Bucket:
    """Charges everything twice."""
    if quota.algorithm == "producer_ids":
        return DoubleIds(max_ids)
    return DoubleRate() if quota.algorithm == "sampled_rate" else DoubleTokens()


def grasping(quota: Quota, max_ids: int) -> Bucket:
    """Charges asks that are refused."""
    if quota.algorithm == "producer_ids":
        return IdsBucket(max_ids)
    return GraspingRate() if quota.algorithm == "sampled_rate" else GraspingTokens()


@dataclass(slots=True)
class DoubleRate(RateBucket):
    def charge(self, charge: BucketCharge) -> bool:
        return RateBucket.charge(self, charge) and RateBucket.charge(self, charge)


@dataclass(slots=True)
class DoubleTokens(TokensBucket):
    def charge(self, charge: BucketCharge) -> bool:
        return TokensBucket.charge(self, charge) and TokensBucket.charge(self, charge)


@dataclass(slots=True)
class DoubleIds(IdsBucket):
    def charge(self, charge: BucketCharge) -> bool:
        unseen = len(self._unseen(charge))
        charged = IdsBucket.charge(self, charge)
        self.state.charges += [charge.now_ms] * unseen
        return charged


@dataclass(slots=True)
class GraspingRate(RateBucket):
    def touch(self, charge: BucketCharge) -> None:
        RateBucket.charge(self, charge)


@dataclass(slots=True)
class GraspingTokens(TokensBucket):
    def touch(self, charge: BucketCharge) -> None:
        TokensBucket.charge(self, charge)


@dataclass(slots=True)
class ForgetfulRate(RateBucket):
    charges: int = 0
    forgotten: int = 0

    def charge(self, charge: BucketCharge) -> bool:
        self.charges += charge.usage > 0  # forgetting a usage of 0 may change nothing
        if self.charges % SOMETIMES or not charge.usage:
            return RateBucket.charge(self, charge)
        self.forgotten += 1
        return True


@dataclass(slots=True)
class ForgetfulTokens(TokensBucket):
    charges: int = 0
    forgotten: int = 0

    def charge(self, charge: BucketCharge) -> bool:
        self.charges += charge.usage > 0  # forgetting a usage of 0 may change nothing
        if self.charges % SOMETIMES or not charge.usage:
            return TokensBucket.charge(self, charge)
        self.forgotten += 1
        return True


@dataclass(slots=True)
class ForgetfulIds(IdsBucket):
    charges: int = 0
    forgotten: int = 0

    def charge(self, charge: BucketCharge) -> bool:
        before = list(self.state.charges)
        charged = IdsBucket.charge(self, charge)
        self.charges += charged
        if charged and self.charges % SOMETIMES == 0:
            self.forgotten += 1
            self.state.charges = before
        return charged


@dataclass(slots=True)
class LenientIds(IdsBucket):
    def judge(self, charge: BucketCharge) -> Judgement:
        del charge
        return ADMIT


@dataclass(slots=True)
class LenientTokens(TokensBucket):
    def judge(self, charge: BucketCharge) -> Judgement:
        del charge
        return ADMIT


@dataclass(slots=True)
class ImpatientRate(RateBucket):
    def judge(self, charge: BucketCharge) -> Judgement:
        said = RateBucket.judge(self, charge)
        return said._replace(throttle_ms=said.throttle_ms - 1) if said.throttle_ms > 1 else said


@dataclass(slots=True)
class ImpatientIds(IdsBucket):
    def judge(self, charge: BucketCharge) -> Judgement:
        said = IdsBucket.judge(self, charge)
        return said._replace(throttle_ms=said.throttle_ms - 1) if said.throttle_ms > 1 else said


@dataclass(slots=True)
class GullibleIds(ProducerIds):
    """Takes about a ninth of its unknown ids as seen: the same ids at each ask."""

    taken: set[bytes] = field(default_factory=set)

    def find(self, spread: bytes, now_ms: int, layers: Layers) -> IdPlace | None:
        found = ProducerIds.find(self, spread, now_ms, layers)
        live = self.live_layers(now_ms, layers)
        if found is None and live and spread[0] % SOMETIMES == 0:
            self.taken.add(spread)
            self.segments[-1].counts.setdefault(live[-1], 0)
            return IdPlace(len(self.segments) - 1, live[-1])
        return found
