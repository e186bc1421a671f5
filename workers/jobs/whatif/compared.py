"""The asks of a log in both worlds: under the quotas of the log, and under others."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from workers.jobs.whatif.quota_form import THROTTLE
from workers.jobs.whatif.rows import LoggedAsk


@dataclass(slots=True)
class World:
    """The results of a principal's asks, or of all asks, under one set of quotas.

    Attributes:
        decisions: the number of asks by decision; an ask that came again counts by its last answer.
        usage: the admitted usage by field; ``producer_ids`` are new ids.
        wait_ms: the sum of all waits that were answered, and of all waits in queues.
        gave_up: refused asks that their callers gave up while they waited.
        retries: how often asks came again.
        refused_by, delayed_by: the number of these asks by the key of the quota that decided.
    """

    decisions: Counter[str] = field(default_factory=Counter)
    usage: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    wait_ms: int = 0
    gave_up: int = 0
    retries: int = 0
    refused_by: Counter[str] = field(default_factory=Counter)
    delayed_by: Counter[str] = field(default_factory=Counter)

    @property
    def refused(self) -> int:
        """How many asks were refused."""
        return self.decisions["throttle"] + self.decisions["reject"]

    def add(self, other: World) -> None:
        """Add the results of other asks of the same world."""
        self.decisions += other.decisions
        for name, amount in other.usage.items():
            self.usage[name] += amount
        self.wait_ms += other.wait_ms
        self.gave_up += other.gave_up
        self.retries += other.retries
        self.refused_by += other.refused_by
        self.delayed_by += other.delayed_by


@dataclass(slots=True)
class Compared:
    """Asks in both worlds.

    Attributes:
        newly_refused: admitted in the log, and refused by the other quotas.
        newly_admitted: the other way round.
        kept: answers that were taken from the log, since the store did not give them.
    """

    before: World = field(default_factory=World)
    after: World = field(default_factory=World)
    newly_refused: int = 0
    newly_admitted: int = 0
    kept: int = 0

    @property
    def changed(self) -> int:
        """How many asks were admitted in one world only."""
        return self.newly_refused + self.newly_admitted

    def add(self, other: Compared) -> None:
        """Add the results of other asks."""
        self.before.add(other.before)
        self.after.add(other.after)
        self.newly_refused += other.newly_refused
        self.newly_admitted += other.newly_admitted
        self.kept += other.kept


@dataclass(slots=True)
class UsageSeries:
    """The asks of a principal over time, for charts.

    Attributes:
        usage: what was asked for in modes admit and record, by the beginning of the slice and the field; for
            ``producer_ids`` the ids that were charged in the log.
        refused_before, refused_after: the number of refused asks by the beginning of the slice.
        limits: the limits that the log's verdicts name, by quota key, each from a time on.
    """

    usage: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    refused_before: Counter[int] = field(default_factory=Counter)
    refused_after: Counter[int] = field(default_factory=Counter)
    limits: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def add(self, ask: LoggedAsk, slice_ms: int) -> None:
        """Add an ask as it was logged."""
        begin_ms = ask.at_ms - ask.at_ms % slice_ms
        if ask.rank >= THROTTLE:
            self.refused_before[begin_ms] += 1
        if ask.mode in {"admit", "record"}:
            for name, amount in zip(ask.caller.fields, ask.amounts, strict=True):
                self.usage[begin_ms, name] += amount
        for verdict in ask.verdicts:
            if verdict.charged_ids:
                self.usage[begin_ms, "producer_ids"] += len(verdict.charged_ids)
            quota = verdict.quota.applied.quota
            limits = self.limits.setdefault(quota.key, [])
            if not limits or limits[-1][1] != quota.limit:
                limits.append((begin_ms, quota.limit))


@dataclass(slots=True)
class QuotaOutcome:
    """The refusals of one quota of one entity in both worlds.

    Attributes:
        limits_before: all limits that the log's verdicts name.
        limit_after: None if the other quotas do not have it.
        shadow_after: the other quotas have it in shadow, so it refuses nobody.
        refused_before, refused_after: the asks whose refusal this quota decided.
    """

    limits_before: set[float] = field(default_factory=set)
    limit_after: float | None = None
    shadow_after: bool = False
    refused_before: int = 0
    refused_after: int = 0
