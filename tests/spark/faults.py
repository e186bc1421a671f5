"""Oracles with a fault each, for some principals alone: what an audit has to find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from app.domain.ask import Ask
from app.domain.ladder import Applied
from app.domain.oracle import ADMIT, Bucket, Charge, IdsBucket, Oracle, Part, RateBucket, Said, TokensBucket
from app.domain.producer_ids import Place, ProducerIds
from app.domain.quota import Layers, Quota

SOMETIMES = 9
"""A fault strikes every so many times."""


class Faulty(Oracle):
    """An oracle whose buckets are made by a fault, for the principals that it strikes."""

    def __init__(self, secret: bytes, faults: Mapping[str, Callable[[Quota, int], Bucket]]) -> None:
        super().__init__(secret)
        self.faults = dict(faults)
        self._of: str | None = None

    def _part(self, ask: Ask, found: Applied, now_ms: int) -> Part:
        is_own = found.bucket.startswith("user=") and "," not in found.bucket
        self._of = ask.principal if is_own else None
        return super()._part(ask, found, now_ms)

    def _absent(self, quota: Quota) -> Bucket:
        if self._of in self.faults:
            return self.faults[self._of](quota, self.max_ids)
        return super()._absent(quota)


def forgetful(quota: Quota, max_ids: int) -> Bucket:
    """Forgets a charge now and then."""
    if quota.algorithm == "sampled_rate":
        return ForgetfulRate()
    return ForgetfulTokens() if quota.algorithm == "token_bucket" else ForgetfulIds(max_ids)


def gullible(quota: Quota, max_ids: int) -> Bucket:
    """Takes a new id as seen now and then."""
    if quota.algorithm == "producer_ids":
        return IdsBucket(max_ids, Gullible())
    return RateBucket() if quota.algorithm == "sampled_rate" else TokensBucket()


def lenient(quota: Quota, max_ids: int) -> Bucket:
    """Lets everything pass that the quota would refuse."""
    if quota.algorithm == "producer_ids":
        return LenientIds(max_ids)
    return RateBucket() if quota.algorithm == "sampled_rate" else LenientTokens()


def impatient(quota: Quota, max_ids: int) -> Bucket:
    """Says a wait that is a millisecond too short."""
    if quota.algorithm == "producer_ids":
        return ImpatientIds(max_ids)
    return ImpatientRate() if quota.algorithm == "sampled_rate" else TokensBucket()


def double(quota: Quota, max_ids: int) -> Bucket:
    """Charges everything twice."""
    if quota.algorithm == "producer_ids":
        return DoubleIds(max_ids)
    return DoubleRate() if quota.algorithm == "sampled_rate" else DoubleTokens()


def grasping(quota: Quota, max_ids: int) -> Bucket:
    """Takes the usage of an ask that was refused."""
    if quota.algorithm == "producer_ids":
        return IdsBucket(max_ids)
    return GraspingRate() if quota.algorithm == "sampled_rate" else GraspingTokens()


@dataclass(slots=True)
class DoubleRate(RateBucket):
    def charge(self, charge: Charge) -> bool:
        return RateBucket.charge(self, charge) and RateBucket.charge(self, charge)


@dataclass(slots=True)
class DoubleTokens(TokensBucket):
    def charge(self, charge: Charge) -> bool:
        return TokensBucket.charge(self, charge) and TokensBucket.charge(self, charge)


@dataclass(slots=True)
class DoubleIds(IdsBucket):
    def charge(self, charge: Charge) -> bool:
        unseen = len(self._unseen(charge))
        charged = IdsBucket.charge(self, charge)
        self.state.charges += [charge.now_ms] * unseen
        return charged


@dataclass(slots=True)
class GraspingRate(RateBucket):
    def touch(self, charge: Charge) -> None:
        RateBucket.charge(self, charge)


@dataclass(slots=True)
class GraspingTokens(TokensBucket):
    def touch(self, charge: Charge) -> None:
        TokensBucket.charge(self, charge)


@dataclass(slots=True)
class ForgetfulRate(RateBucket):
    charges: int = 0
    forgotten: int = 0

    def charge(self, charge: Charge) -> bool:
        self.charges += charge.usage > 0  # to forget a usage of 0 may change nothing
        if self.charges % SOMETIMES or not charge.usage:
            return RateBucket.charge(self, charge)
        self.forgotten += 1
        return True


@dataclass(slots=True)
class ForgetfulTokens(TokensBucket):
    charges: int = 0
    forgotten: int = 0

    def charge(self, charge: Charge) -> bool:
        self.charges += charge.usage > 0  # to forget a usage of 0 may change nothing
        if self.charges % SOMETIMES or not charge.usage:
            return TokensBucket.charge(self, charge)
        self.forgotten += 1
        return True


@dataclass(slots=True)
class ForgetfulIds(IdsBucket):
    charges: int = 0
    forgotten: int = 0

    def charge(self, charge: Charge) -> bool:
        before = list(self.state.charges)
        charged = IdsBucket.charge(self, charge)
        self.charges += charged
        if charged and self.charges % SOMETIMES == 0:
            self.forgotten += 1
            self.state.charges = before
        return charged


@dataclass(slots=True)
class LenientIds(IdsBucket):
    def judge(self, charge: Charge) -> Said:
        del charge
        return ADMIT


@dataclass(slots=True)
class LenientTokens(TokensBucket):
    def judge(self, charge: Charge) -> Said:
        del charge
        return ADMIT


@dataclass(slots=True)
class ImpatientRate(RateBucket):
    def judge(self, charge: Charge) -> Said:
        said = RateBucket.judge(self, charge)
        return said._replace(throttle_ms=said.throttle_ms - 1) if said.throttle_ms > 1 else said


@dataclass(slots=True)
class ImpatientIds(IdsBucket):
    def judge(self, charge: Charge) -> Said:
        said = IdsBucket.judge(self, charge)
        return said._replace(throttle_ms=said.throttle_ms - 1) if said.throttle_ms > 1 else said


@dataclass(slots=True)
class Gullible(ProducerIds):
    """Takes as seen, for ever, one in nine of the ids that it is asked for and does not hold."""

    taken: set[bytes] = field(default_factory=set)

    def find(self, spread: bytes, now_ms: int, layers: Layers) -> Place | None:
        found = ProducerIds.find(self, spread, now_ms, layers)
        live = self.live_layers(now_ms, layers)
        if found is None and live and spread[0] % SOMETIMES == 0:
            self.taken.add(spread)
            self.segments[-1].counts.setdefault(live[-1], 0)
            return Place(len(self.segments) - 1, live[-1])
        return found
