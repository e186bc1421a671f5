"""Volumes and the throttle factor: what observations make of it, and what it makes of a limit (section 6).

Everything here is a function of a state and a time. Times are milliseconds; which clock they are of is the
caller's affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple, Protocol

from app.domain.quota import PRODUCER_BYTE_RATE, Quota

LEAST_HOLD_MS: Final = 1_000
"""The least that an ask to produce waits while the factor is 0."""

LEAST_LIMIT: Final = 1.0
"""In bytes per second: what a factor above 0 leaves of a produce limit at least."""

NAMED_AT_MOST: Final = 10
"""Volumes without sizes that are named one by one."""

Source = Literal["kafka", "push", "static"]
VolumeState = Literal["ok", "violating", "unknown"]
Holder = Literal["validity", "fallback"]


class ObservationFailed(Exception):
    """The cluster itself could not be described; the text says why."""


class Volume(NamedTuple):
    """What a broker tells of one log directory; None for what nobody knows, which is neither 0 nor full."""

    broker: str
    dir: str
    total_bytes: int | None
    available_bytes: int | None


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at the volumes of a cluster.

    Attributes:
        volumes: what was told; a log directory that is offline has no sizes.
        answered: brokers that told all their volumes, so that one they do not name is gone; None: the whole
            cluster was told, and what it does not name is gone.
        silent: active brokers that did not answer, and why in a few words.
    """

    volumes: tuple[Volume, ...]
    answered: frozenset[str] | None = None
    silent: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_part(self) -> bool:
        """Whether it only tells of some volumes, and misses no other."""
        return self.answered == frozenset() and not self.silent


@dataclass(frozen=True, slots=True)
class Limit:
    """The one limit that every volume is held to; at it or below a volume violates."""

    min_available_bytes: int | None = None
    min_available_ratio: float | None = None

    def violates(self, total_bytes: int | None, available_bytes: int | None) -> bool | None:
        """Whether a volume of such sizes violates; None if what the limit needs is not known.

        >>> Limit(min_available_bytes=100).violates(None, 100), Limit(min_available_ratio=0.1).violates(0, 0)
        (True, True)
        >>> Limit(min_available_ratio=0.1).violates(None, 5) is None
        True
        """
        if available_bytes is None:
            return None
        if self.min_available_bytes is not None:
            return available_bytes <= self.min_available_bytes
        if total_bytes is None or self.min_available_ratio is None:
            return None
        return total_bytes == 0 or available_bytes / total_bytes <= self.min_available_ratio


class Policy(Protocol):
    """What factor the volumes of a cluster call for."""

    def __call__(self, violating: int, volumes: int) -> float:
        """The factor, of how many known volumes violate and how many there are."""


def all_or_nothing(violating: int, volumes: int) -> float:
    """Strimzi's policy: 0 if any volume in the cluster violates, else 1."""
    del volumes
    return 0.0 if violating else 1.0


@dataclass(frozen=True, slots=True)
class Rules:
    """What the deployment decides about volumes.

    Attributes:
        source: where observations come from; None for nowhere: the factor is 1, drills apart.
        interval_ms: time between observations.
        validity_ms: how long a factor holds, and what was observed of a volume is known.
        fallback: the factor once that is over.
        excluded: principals that no factor touches.
    """

    source: Source | None = None
    limit: Limit = Limit()
    interval_ms: int = 60_000
    validity_ms: int = 300_000
    fallback: float = 1.0
    excluded: frozenset[str] = frozenset()
    policy: Policy = all_or_nothing

    @property
    def observes(self) -> bool:
        """Whether there is anything to observe, and so a validity that can end."""
        return self.source in ("kafka", "push")


class Known(NamedTuple):
    """What is known of a volume.

    Attributes:
        observed_ms: when its sizes were told; None if they never were.
        told: whether the last observation told them.
    """

    broker: str
    dir: str
    total_bytes: int | None
    available_bytes: int | None
    observed_ms: int | None
    told: bool

    def is_valid(self, now_ms: int, rules: Rules) -> bool:
        """Whether its sizes still count: up to and including the end of the validity."""
        return self.observed_ms is not None and now_ms <= self.observed_ms + rules.validity_ms

    def violates(self, now_ms: int, rules: Rules) -> bool:
        """Whether it is known to violate."""
        return (
            self.is_valid(now_ms, rules)
            and rules.limit.violates(self.total_bytes, self.available_bytes) is True
        )

    def state(self, now_ms: int, rules: Rules) -> VolumeState:
        """Known to violate, or told to be well, or unknown."""
        if self.violates(now_ms, rules):
            return "violating"
        judged = rules.limit.violates(self.total_bytes, self.available_bytes)
        return "ok" if self.told and judged is False and self.is_valid(now_ms, rules) else "unknown"


class Drill(NamedTuple):
    """A factor that somebody set for a while, whatever the volumes say."""

    factor: float
    since_ms: int
    until_ms: int
    who: str

    def holds(self, now_ms: int) -> bool:
        """Whether it has not ended; a time behind its beginning, by another's clock, is taken as that."""
        return now_ms < self.until_ms


@dataclass(frozen=True, slots=True)
class State:
    """What observations have made of the factor.

    Attributes:
        factor, since_ms: the last one, and since when it has been that.
        valid_until_ms: up to and including this time.
        next_check_ms: when the next observation is due.
        observed_ms: when the last observation was made, however it ended; the beginning before there was one.
        succeeded: whether it succeeded.
        reason: what made the factor, in words.
        trouble: why the last observation failed, and which brokers were silent, in words; "" if all was well.
        active_brokers: how many brokers it met.
        violations: volumes that violated, summed over all observations.
    """

    source: Source
    factor: float
    since_ms: int
    valid_until_ms: int
    next_check_ms: int
    observed_ms: int
    succeeded: bool
    reason: str
    trouble: str = ""
    volumes: tuple[Known, ...] = ()
    active_brokers: int = 0
    violations: int = 0


class InForce(NamedTuple):
    """The factor that holds at a moment.

    Attributes:
        valid_until_ms: None if nothing observes, and so nothing ends.
        held_by: ``validity`` while observations fail or stay away, then ``fallback``; None if neither.
        held_since_ms: since when it has been held so.
    """

    factor: float
    since_ms: int
    valid_until_ms: int | None
    next_check_ms: int | None
    reason: str
    held_by: Holder | None = None
    held_since_ms: int = 0


def start(now_ms: int, rules: Rules) -> State:
    """The state before the first observation: 1.0, valid from now."""
    assert rules.source is not None
    return State(
        source=rules.source,
        factor=1.0,
        since_ms=now_ms,
        valid_until_ms=now_ms + rules.validity_ms,
        next_check_ms=now_ms + rules.interval_ms,
        observed_ms=now_ms,
        succeeded=True,
        reason="start: nothing has been observed yet",
    )


def observed(state: State, seen: Observation, now_ms: int, rules: Rules) -> State:
    """The state after an observation."""
    state = lapsed(state, now_ms, rules)
    volumes = tuple(_merged(state.volumes, seen, now_ms, rules))
    told = {(v.broker, v.dir) for v in seen.volumes}
    unknown = [
        v
        for v in volumes
        if not v.told
        and not v.is_valid(now_ms, rules)
        and (v.broker in seen.silent or (v.broker, v.dir) in told)
    ]
    never_seen = seen.silent.keys() - {v.broker for v in volumes}
    trouble = "; ".join(f"broker {broker} is unknown: {why}" for broker, why in sorted(seen.silent.items()))
    without = [v for v in seen.volumes if rules.limit.violates(v.total_bytes, v.available_bytes) is None]
    if without:
        places = ", ".join(f"{v.dir} of broker {v.broker}" for v in without[:NAMED_AT_MOST])
        more = f", and {len(without) - NAMED_AT_MOST} more" if len(without) > NAMED_AT_MOST else ""
        trouble = "; ".join(filter(None, [trouble, f"without sizes: {places}{more}"]))
    active = seen.answered | seen.silent.keys() if seen.answered is not None else frozenset()
    brokers = active or {v.broker for v in volumes}
    succeeded = not unknown and not never_seen
    return _judged(state, volumes, len(brokers), now_ms, rules, succeeded=succeeded, trouble=trouble)


def failed(state: State, why: str, now_ms: int, rules: Rules) -> State:
    """The state after an observation that failed as a whole: the cluster could not be described."""
    state = lapsed(state, now_ms, rules)
    volumes = tuple(known._replace(told=False) for known in state.volumes)
    trouble = f"the observation failed: {why}"
    return _judged(state, volumes, state.active_brokers, now_ms, rules, succeeded=False, trouble=trouble)


def in_force(state: State | None, drill: Drill | None, now_ms: int, rules: Rules) -> InForce:
    """The factor that holds at a moment: a drill's, the observed one while it is valid, or the fallback."""
    if not rules.observes or state is None:
        found = InForce(1.0, state.since_ms if state else 0, None, None, "off: nothing is observed")
    else:
        found = _observed_in_force(lapsed(state, now_ms, rules), now_ms, rules)
    if drill is not None and drill.holds(now_ms):
        reason = f"drill: by {drill.who}, until {drill.until_ms}"
        return found._replace(factor=drill.factor, since_ms=drill.since_ms, reason=reason, held_by=None)
    return found


def missed(state: State, now_ms: int, rules: Rules) -> int:
    """How many observations were due and did not come.

    Only where they are pushed: whoever polls says himself how a poll ended.
    """
    return max(now_ms - state.observed_ms, 0) // rules.interval_ms if rules.source == "push" else 0


def lapsed(state: State, now_ms: int, rules: Rules) -> State:
    """The state with the observations that were due and did not come, each of which failed.

    A volume that is known to violate renews the validity of the factor, also in an observation that fails.
    The same for any two times up to which as many were missed.
    """
    ticks = missed(state, now_ms, rules)
    if ticks < 1:
        return state
    late = replace(
        state,
        observed_ms=state.observed_ms + ticks * rules.interval_ms,
        succeeded=False,
        trouble="nothing was pushed within an interval",
        volumes=tuple(known._replace(told=False) for known in state.volumes),
    )
    known_until = max((_violates_until(v, rules) for v in late.volumes), default=0)
    renewing = (min(now_ms, known_until) - state.observed_ms) // rules.interval_ms
    if renewing < 1:
        return late
    renewed_ms = state.observed_ms + renewing * rules.interval_ms
    return replace(late, valid_until_ms=max(state.valid_until_ms, renewed_ms + rules.validity_ms))


def hold_ms(next_check_ms: int | None, now_ms: int, rules: Rules) -> int:
    """How long an ask to produce waits while the factor is 0; an overdue check counts as one interval."""
    if next_check_ms is None or next_check_ms < now_ms:
        return max(LEAST_HOLD_MS, rules.interval_ms)
    return max(LEAST_HOLD_MS, next_check_ms - now_ms)


def scaled(quota: Quota, factor: float) -> Quota:
    """A produce quota under a factor above 0: its limit is multiplied, but for one that admits nothing.

    What a token bucket holds stays: the factor slows its refill.
    """
    if quota.key != PRODUCER_BYTE_RATE or factor == 1 or quota.limit == 0:
        return quota
    return replace(quota, limit=max(LEAST_LIMIT, quota.limit * factor))


def _observed_in_force(state: State, now_ms: int, rules: Rules) -> InForce:
    if now_ms > state.valid_until_ms:
        ended = state.valid_until_ms + 1
        reason = f"fallback: {state.trouble or 'no observation succeeded while the factor was valid'}"
        return InForce(
            rules.fallback, ended, state.valid_until_ms, state.next_check_ms, reason, "fallback", ended
        )
    set_ms = state.valid_until_ms - rules.validity_ms
    overdue = rules.source == "kafka" and now_ms > state.next_check_ms + rules.interval_ms
    held = overdue or set_ms < state.observed_ms
    why = "; ".join(filter(None, ["observations are overdue" if overdue else "", state.trouble]))
    reason = f"held: {why}; {state.reason}" if held else "; ".join(filter(None, [state.reason, why]))
    return InForce(
        state.factor,
        state.since_ms,
        state.valid_until_ms,
        state.next_check_ms,
        reason,
        "validity" if held else None,
        set_ms if held else 0,
    )


def _merged(before: Iterable[Known], seen: Observation, now_ms: int, rules: Rules) -> Iterator[Known]:
    """What is known after an observation; in the order of brokers and directories."""
    known = {(v.broker, v.dir): v for v in before}
    told = {(v.broker, v.dir): v for v in seen.volumes}
    for place in sorted(known.keys() | told.keys()):
        earlier, now = known.get(place), told.get(place)
        if now is not None and rules.limit.violates(now.total_bytes, now.available_bytes) is not None:
            yield Known(*now, observed_ms=now_ms, told=True)
        elif now is not None:  # its sizes are not known now; those of earlier count while they are valid
            yield (earlier or Known(*now, observed_ms=None, told=False))._replace(told=False)
        elif earlier is not None and _stays(earlier, seen, now_ms, rules):
            yield earlier if seen.is_part else earlier._replace(told=False)


def _stays(known: Known, seen: Observation, now_ms: int, rules: Rules) -> bool:
    """Whether a volume that was not told of is still there."""
    if seen.answered is None or known.broker in seen.answered:
        return False
    # That of an active broker which is silent stays, so that it is missed; others while they are valid.
    return known.broker in seen.silent or known.is_valid(now_ms, rules)


def _violates_until(known: Known, rules: Rules) -> int:
    """How long a volume is known to violate; 0 if it is not."""
    if known.observed_ms is None or not rules.limit.violates(known.total_bytes, known.available_bytes):
        return 0
    return known.observed_ms + rules.validity_ms


def _judged(
    state: State,
    volumes: tuple[Known, ...],
    brokers: int,
    now_ms: int,
    rules: Rules,
    *,
    succeeded: bool,
    trouble: str,
) -> State:
    """The factor that follows: set by what violates, else by success; otherwise the last one stays."""
    violating = [v for v in volumes if v.violates(now_ms, rules)]
    after = replace(
        state,
        volumes=volumes,
        active_brokers=brokers,
        observed_ms=now_ms,
        next_check_ms=now_ms + rules.interval_ms,
        succeeded=succeeded,
        trouble=trouble,
        violations=state.violations + len(violating),
    )
    if not succeeded and not violating:
        return after
    factor = rules.policy(len(violating), len(volumes))
    was = in_force(state, None, now_ms, rules)
    return replace(
        after,
        factor=factor,
        since_ms=was.since_ms if was.factor == factor else now_ms,
        valid_until_ms=now_ms + rules.validity_ms,
        reason=_because(violating, len(volumes)),
    )


def _because(violating: Sequence[Known], volumes: int) -> str:
    if not violating:
        return f"observed: {volumes} volumes, all within the limit"
    worst = min(violating, key=lambda v: v.available_bytes or 0)
    size = "" if worst.total_bytes is None else f" of {worst.total_bytes}"
    more = f", and {len(violating) - 1} more" if len(violating) > 1 else ""
    return (
        f"violation: {worst.dir} of broker {worst.broker} has {worst.available_bytes}{size} bytes left{more}"
    )
