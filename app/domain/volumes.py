"""Volumes and the throttle factor: how observations set the factor, and how it scales a limit.

Everything here is a function of a state and a time. Times are in milliseconds; the caller chooses the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

from app.domain.errors import UnknownBrokerError, VolumeCountError
from app.domain.quota import PRODUCER_BYTE_RATE, Quota

LEAST_SUSPENSION_MS: Final = 1_000
"""The shortest wait of an ask to produce while the factor is 0."""

LEAST_LIMIT: Final = 1.0
"""The lowest produce limit that a factor above 0 leaves, in bytes per second."""

KNOWN_AT_MOST: Final = 10_000
"""The most volumes that pushes may make known. Polled brokers may have more."""

NAMED_AT_MOST: Final = 10
"""How many volumes without sizes a text names before it only counts them."""

Source = Literal["kafka", "push", "static"]
VolumeState = Literal["ok", "violating", "unknown"]
Holder = Literal["validity", "fallback"]


class Volume(NamedTuple):
    """One log directory, as its broker reports it; None is an unknown size, which is neither 0 nor full."""

    broker: str
    dir: str
    total_bytes: int | None
    available_bytes: int | None


@dataclass(frozen=True, slots=True)
class Observation:
    """One observation of the volumes of a cluster.

    Attributes:
        volumes: the reported volumes; a log directory that is offline has no sizes.
        answered: the brokers that reported all their volumes; their other volumes are gone. None: the report
            is of the whole cluster; all other volumes are gone. Empty, without a silent broker: the report is
            of some volumes, and says nothing about the others.
        silent: the active brokers that did not answer, each with the reason in a few words.
    """

    volumes: tuple[Volume, ...]
    answered: frozenset[str] | None = None
    silent: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_part(self) -> bool:
        """Whether it reports some volumes and says nothing about all others."""
        return self.answered == frozenset() and not self.silent


@dataclass(frozen=True, slots=True)
class VolumeLimit:
    """The limit for every volume; a volume at or below it violates. Exactly one field is set."""

    min_available_bytes: int | None = None
    min_available_ratio: float | None = None

    def violates(self, total_bytes: int | None, available_bytes: int | None) -> bool | None:
        """Whether a volume of these sizes violates; None if a size that the limit needs is unknown.

        >>> VolumeLimit(min_available_bytes=100).violates(None, 100)
        True
        >>> ratio = VolumeLimit(min_available_ratio=0.1)
        >>> ratio.violates(0, 0), ratio.violates(None, 5)
        (True, None)
        """
        if available_bytes is None:
            return None
        if self.min_available_bytes is not None:
            return available_bytes <= self.min_available_bytes
        if total_bytes is None or self.min_available_ratio is None:
            return None
        return total_bytes == 0 or available_bytes / total_bytes <= self.min_available_ratio


FactorPolicy = Callable[[int, int], float]
"""A policy: the factor, from the number of violating volumes and the number of all volumes."""


def all_or_nothing(violating: int, _volumes: int) -> float:
    """Strimzi's policy: the factor is 0 if any volume in the cluster violates, else 1."""
    return 0.0 if violating else 1.0


@dataclass(frozen=True, slots=True)
class VolumeRules:
    """The settings of a deployment for volumes.

    Attributes:
        source: where observations come from. Without a source the factor is 1, except in a drill.
        interval_ms: the time between observations.
        validity_ms: how long a factor, and the observed size of a volume, stay valid.
        fallback: the factor when its validity has ended.
        excluded: the principals to which no factor applies.
    """

    source: Source | None = None
    limit: VolumeLimit = VolumeLimit()
    interval_ms: int = 60_000
    validity_ms: int = 300_000
    fallback: float = 1.0
    excluded: frozenset[str] = frozenset()
    policy: FactorPolicy = all_or_nothing

    @property
    def observes(self) -> bool:
        """Whether observations are made, so that validity can end."""
        return self.source in ("kafka", "push")


class KnownVolume(NamedTuple):
    """A volume, with its last known sizes.

    Attributes:
        observed_ms: when its sizes were observed; None if they never were.
        is_current: whether the last observation had its sizes.
    """

    broker: str
    dir: str
    total_bytes: int | None
    available_bytes: int | None
    observed_ms: int | None
    is_current: bool

    def is_valid(self, now_ms: int, rules: VolumeRules) -> bool:
        """Whether the sizes still count: up to and including the end of their validity."""
        return self.observed_ms is not None and now_ms <= self.observed_ms + rules.validity_ms

    def violates(self, now_ms: int, rules: VolumeRules) -> bool:
        """Whether it is known to violate."""
        return (
            self.is_valid(now_ms, rules)
            and rules.limit.violates(self.total_bytes, self.available_bytes) is True
        )

    def state(self, now_ms: int, rules: VolumeRules) -> VolumeState:
        """The volume's state: violating if known to violate, ok by the last observation, else unknown."""
        if self.violates(now_ms, rules):
            return "violating"
        judged = rules.limit.violates(self.total_bytes, self.available_bytes)
        return "ok" if self.is_current and judged is False and self.is_valid(now_ms, rules) else "unknown"


class Drill(NamedTuple):
    """A factor that an administrator set for a while; it overrides the volumes."""

    factor: float
    since_ms: int
    until_ms: int
    who: str

    def is_active(self, now_ms: int) -> bool:
        """Whether the drill has not ended; a time before its start, by another clock, counts as during it."""
        return now_ms < self.until_ms


@dataclass(frozen=True, slots=True)
class FactorState:
    """The factor as set by observations. The store keeps these fields by name.

    Attributes:
        factor, since_ms: the last factor, and since when it has had this value.
        valid_until_ms: the end of its validity, inclusive.
        next_check_ms: when the next observation is due.
        observed_ms: when the last observation was made or failed; at first, the start.
        succeeded: whether the last observation succeeded.
        reason: the cause of the factor, as a text.
        trouble: why the last observation failed and which brokers were silent, as a text; or "".
        active_brokers: how many brokers the last observation found.
        violations: the number of violating volumes, summed over all observations.
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
    volumes: tuple[KnownVolume, ...] = ()
    active_brokers: int = 0
    violations: int = 0


class CurrentFactor(NamedTuple):
    """The factor in force at a moment.

    Attributes:
        valid_until_ms: None if no observations are made, so validity does not end.
        held_by: ``validity`` while observations fail or are missing, then ``fallback``; else None.
        held_since_ms: since when ``held_by`` has had this value.
    """

    factor: float
    since_ms: int
    valid_until_ms: int | None
    next_check_ms: int | None
    reason: str
    held_by: Holder | None = None
    held_since_ms: int = 0


def start_state(now_ms: int, rules: VolumeRules) -> FactorState:
    """The state before the first observation: a factor of 1.0, valid from now."""
    assert rules.source is not None
    return FactorState(
        source=rules.source,
        factor=1.0,
        since_ms=now_ms,
        valid_until_ms=now_ms + rules.validity_ms,
        next_check_ms=now_ms + rules.interval_ms,
        observed_ms=now_ms,
        succeeded=True,
        reason="start: nothing has been observed yet",
    )


def after_observation(state: FactorState, seen: Observation, now_ms: int, rules: VolumeRules) -> FactorState:
    """The state after an observation.

    Raises:
        VolumeCountError: the observation is of a part of the cluster, and too many volumes would be known.
    """
    state = after_missed_pushes(state, now_ms, rules)
    volumes = tuple(_merged(state.volumes, seen, now_ms, rules))
    if seen.is_part and len(volumes) > KNOWN_AT_MOST:
        raise VolumeCountError(len(volumes))
    reported = {(v.broker, v.dir) for v in seen.volumes}
    never_seen = seen.silent.keys() - {v.broker for v in volumes}
    without = [v for v in seen.volumes if rules.limit.violates(v.total_bytes, v.available_bytes) is None]
    troubles = [
        *(f"broker {broker} is unknown: {why}" for broker, why in sorted(seen.silent.items())),
        *_named("without sizes", without),
        *(_outdated(volumes, reported, now_ms, rules) if seen.is_part else ()),
    ]
    active = seen.answered | seen.silent.keys() if seen.answered is not None else frozenset()
    brokers = active or {v.broker for v in volumes}
    succeeded = not never_seen and all(v.is_valid(now_ms, rules) for v in volumes)
    return _judged(
        state, volumes, len(brokers), now_ms, rules, succeeded=succeeded, trouble="; ".join(troubles)
    )


def after_failure(state: FactorState, why: str, now_ms: int, rules: VolumeRules) -> FactorState:
    """The state after an observation that failed as a whole, because the cluster could not be described."""
    state = after_missed_pushes(state, now_ms, rules)
    volumes = tuple(known._replace(is_current=False) for known in state.volumes)
    trouble = f"the observation failed: {why}"
    return _judged(state, volumes, state.active_brokers, now_ms, rules, succeeded=False, trouble=trouble)


def after_forgetting(state: FactorState, broker: str, now_ms: int, rules: VolumeRules) -> FactorState:
    """The state without the volumes of a broker, which left the cluster.

    The last observation is judged again without them. Nothing is observed, so no validity begins anew.

    Raises:
        UnknownBrokerError: no volume of this broker is known.
    """
    volumes = tuple(known for known in state.volumes if known.broker != broker)
    if len(volumes) == len(state.volumes):
        raise UnknownBrokerError(broker)
    seen_ms = state.observed_ms
    succeeded = all(v.is_valid(seen_ms, rules) for v in volumes)
    trouble = "; ".join(_outdated(volumes, frozenset(), seen_ms, rules))
    brokers = len({v.broker for v in volumes})
    after = _judged(
        state, volumes, brokers, seen_ms, rules, succeeded=succeeded, trouble=trouble, judged_ms=now_ms
    )
    return replace(after, violations=state.violations)


def factor_in_force(
    state: FactorState | None, drill: Drill | None, now_ms: int, rules: VolumeRules
) -> CurrentFactor:
    """The factor in force at a moment: a drill's, the observed one while it is valid, or the fallback."""
    if not rules.observes or state is None:
        current = CurrentFactor(1.0, state.since_ms if state else 0, None, None, "off: nothing is observed")
    else:
        current = _observed_in_force(after_missed_pushes(state, now_ms, rules), now_ms, rules)
    if drill is not None and drill.is_active(now_ms):
        reason = f"drill: by {drill.who}, until {drill.until_ms}"
        return current._replace(factor=drill.factor, since_ms=drill.since_ms, reason=reason, held_by=None)
    return current


def missed_pushes(state: FactorState, now_ms: int, rules: VolumeRules) -> int:
    """How many pushed observations were due and did not arrive; 0 for polls, which report their failures."""
    return max(now_ms - state.observed_ms, 0) // rules.interval_ms if rules.source == "push" else 0


def after_missed_pushes(state: FactorState, now_ms: int, rules: VolumeRules) -> FactorState:
    """The state after the missed pushes, each of which counts as a failed observation.

    A volume that is known to violate extends the validity of the factor, even in a failed observation. The
    result depends only on how many observations were missed, not on the exact time.
    """
    ticks = missed_pushes(state, now_ms, rules)
    if ticks < 1:
        return state
    late = replace(
        state,
        observed_ms=state.observed_ms + ticks * rules.interval_ms,
        succeeded=False,
        trouble="nothing was pushed within an interval",
        volumes=tuple(known._replace(is_current=False) for known in state.volumes),
    )
    known_until = max((_violates_until(v, rules) for v in late.volumes), default=0)
    extending = (min(now_ms, known_until) - state.observed_ms) // rules.interval_ms
    if extending < 1:
        return late
    extended_ms = state.observed_ms + extending * rules.interval_ms
    return replace(late, valid_until_ms=max(state.valid_until_ms, extended_ms + rules.validity_ms))


def suspension_ms(next_check_ms: int | None, now_ms: int, rules: VolumeRules) -> int:
    """How long an ask to produce waits while the factor is 0; if the next check is overdue, one interval."""
    if next_check_ms is None or next_check_ms < now_ms:
        return max(LEAST_SUSPENSION_MS, rules.interval_ms)
    return max(LEAST_SUSPENSION_MS, next_check_ms - now_ms)


def scaled_quota(quota: Quota, factor: float) -> Quota:
    """A produce quota with its limit multiplied by a factor above 0; a limit of 0 stays.

    A token bucket keeps its tokens and refills more slowly.
    """
    if quota.key != PRODUCER_BYTE_RATE or factor == 1 or quota.limit == 0:
        return quota
    return replace(quota, limit=max(LEAST_LIMIT, quota.limit * factor))


def _observed_in_force(state: FactorState, now_ms: int, rules: VolumeRules) -> CurrentFactor:
    if now_ms > state.valid_until_ms:
        ended = state.valid_until_ms + 1
        reason = f"fallback: {state.trouble or 'no observation succeeded while the factor was valid'}"
        return CurrentFactor(
            rules.fallback, ended, state.valid_until_ms, state.next_check_ms, reason, "fallback", ended
        )
    set_ms = state.valid_until_ms - rules.validity_ms
    overdue = rules.source == "kafka" and now_ms > state.next_check_ms + rules.interval_ms
    held = overdue or set_ms < state.observed_ms
    why = "; ".join(filter(None, ["observations are overdue" if overdue else "", state.trouble]))
    reason = f"held: {why}; {state.reason}" if held else "; ".join(filter(None, [state.reason, why]))
    return CurrentFactor(
        state.factor,
        state.since_ms,
        state.valid_until_ms,
        state.next_check_ms,
        reason,
        "validity" if held else None,
        set_ms if held else 0,
    )


def _merged(
    before: Iterable[KnownVolume], seen: Observation, now_ms: int, rules: VolumeRules
) -> Iterator[KnownVolume]:
    """The known volumes after an observation, in the order of brokers and directories."""
    known = {(v.broker, v.dir): v for v in before}
    reported = {(v.broker, v.dir): v for v in seen.volumes}
    for place in sorted(known.keys() | reported.keys()):
        earlier, now = known.get(place), reported.get(place)
        if now is not None and rules.limit.violates(now.total_bytes, now.available_bytes) is not None:
            yield KnownVolume(*now, observed_ms=now_ms, is_current=True)
        elif now is not None:  # its sizes are unknown now; earlier ones count while they are valid
            yield (earlier or KnownVolume(*now, observed_ms=None, is_current=False))._replace(
                is_current=False
            )
        elif earlier is not None and _stays(earlier, seen, now_ms, rules):
            yield earlier if seen.is_part else earlier._replace(is_current=False)


def _stays(known: KnownVolume, seen: Observation, now_ms: int, rules: VolumeRules) -> bool:
    """Whether a volume that the observation does not name still exists."""
    if seen.is_part:
        return True
    if seen.answered is None or known.broker in seen.answered:
        return False
    # Volumes of an active broker that is silent stay, so that missing sizes show; others stay while valid.
    return known.broker in seen.silent or known.is_valid(now_ms, rules)


def _outdated(
    volumes: Iterable[KnownVolume], reported: Collection[tuple[str, str]], now_ms: int, rules: VolumeRules
) -> Iterator[str]:
    """A text about the volumes that no push has renewed within their validity; none without them."""
    old = [v for v in volumes if not v.is_valid(now_ms, rules) and (v.broker, v.dir) not in reported]
    return _named("not renewed within the validity", old)


def _named(fault: str, volumes: Sequence[Volume | KnownVolume]) -> Iterator[str]:
    """A text that names the volumes with a fault; none without volumes."""
    if volumes:
        places = ", ".join(f"{v.dir} of broker {v.broker}" for v in volumes[:NAMED_AT_MOST])
        more = f", and {len(volumes) - NAMED_AT_MOST} more" if len(volumes) > NAMED_AT_MOST else ""
        yield f"{fault}: {places}{more}"


def _violates_until(known: KnownVolume, rules: VolumeRules) -> int:
    """Until when a volume is known to violate; 0 if it does not."""
    if known.observed_ms is None or not rules.limit.violates(known.total_bytes, known.available_bytes):
        return 0
    return known.observed_ms + rules.validity_ms


def _judged(
    state: FactorState,
    volumes: tuple[KnownVolume, ...],
    brokers: int,
    seen_ms: int,
    rules: VolumeRules,
    *,
    succeeded: bool,
    trouble: str,
    judged_ms: int | None = None,
) -> FactorState:
    """The state that follows: a violation or a success sets the factor, otherwise the last one stays.

    Args:
        seen_ms: when the observation was made.
        judged_ms: when it is judged, and a new factor begins; None: at once.
    """
    judged_ms = seen_ms if judged_ms is None else judged_ms
    violating = [v for v in volumes if v.violates(seen_ms, rules)]
    after = replace(
        state,
        volumes=volumes,
        active_brokers=brokers,
        observed_ms=seen_ms,
        next_check_ms=seen_ms + rules.interval_ms,
        succeeded=succeeded,
        trouble=trouble,
        violations=state.violations + len(violating),
    )
    if not succeeded and not violating:
        return after
    factor = rules.policy(len(violating), len(volumes))
    was = factor_in_force(state, None, judged_ms, rules)
    return replace(
        after,
        factor=factor,
        since_ms=was.since_ms if was.factor == factor else judged_ms,
        valid_until_ms=seen_ms + rules.validity_ms,
        reason=_because(violating, len(volumes)),
    )


def _because(violating: Sequence[KnownVolume], volumes: int) -> str:
    if not violating:
        return f"observed: {volumes} volumes, all within the limit"
    worst = min(violating, key=lambda v: v.available_bytes or 0)
    size = "" if worst.total_bytes is None else f" of {worst.total_bytes:,}"
    more = f", and {len(violating) - 1} more" if len(violating) > 1 else ""
    where = f"{worst.dir} of broker {worst.broker}"
    return f"violation: {where} has {worst.available_bytes:,}{size} bytes left{more}"
