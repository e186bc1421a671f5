"""Replays a log under other quotas: which asks would they refuse, and how long would callers wait?

All asks of the log go through one loop over all buckets, in the store's order, so an ask that one quota
refuses charges none, as in the store. Callers do not react in the log as they would have; the scenarios say
what is assumed of them:

- ``as-logged``: every ask comes when it came.
- ``retry-after-wait``: an ask that is throttled and was not in the log comes again after its wait, up to
  ``retries`` times. The log already has the retries of those that were refused then.
- ``stop-while-waiting``: a caller sends nothing while it waits. Its asks queue, a throttled one in front, and
  one that has waited for longer than ``patience_ms`` is given up.

Answers without the store, kept answers, and asks that a throttle factor of 0 held, stay as they are. So do
the units of leases. The log begins with empty buckets here, so its first window is judged too kindly; rows
of a lead-in fill the buckets without being counted.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Literal

from app.domain.decision import OUTCOMES
from app.domain.ladder import AppliedQuota, MatchingRules, Quotas
from app.domain.oracle import key_of
from app.domain.quota import Quota
from app.domain.usage import usage_field
from workers.jobs.whatif.buckets import Bucket, empty, new_bucket
from workers.jobs.whatif.compared import Compared, QuotaOutcome, UsageSeries
from workers.jobs.whatif.matching import Match, QuotaMatcher
from workers.jobs.whatif.other_rows import follow
from workers.jobs.whatif.quota_form import DELAY, REFUSED, THROTTLE, manner_of
from workers.jobs.whatif.rows import LoggedAsk, LoggedCaller, LoggedChange, VerdictOfAsk
from workers.jobs.whatif.sequential import sequential

RULES: Final = MatchingRules()

MOST_SERIES: Final = 4_096
"""The most principals with a series for a chart; a series takes as much memory as its slices of time."""

APART: Final = "apart"

Scenario = Literal["as-logged", "retry-after-wait", "stop-while-waiting"]


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The assumptions of a what-if.

    Attributes:
        retries: how often a refused ask comes again.
        patience_ms: after this wait a queued ask is given up.
        from_ms: asks before this time fill the buckets, and are not counted.
        is_whole: the log has the first batch of every node.
        sequential: ``QUOTAGATE_COMBINE_DELAYS``.
        slice_ms: the length of a slice of time in the series of principals.
        apart: if given, asks are not counted by principal: those that charge a bucket of these entities
            count under ``APART``, all others under an empty name.
    """

    scenario: Scenario = "as-logged"
    retries: int = 3
    patience_ms: int = 60_000
    from_ms: int = 0
    max_ids: int = 1_000_000
    is_whole: bool = False
    sequential: bool = False
    rules: MatchingRules = RULES
    slice_ms: int = 60_000
    apart: frozenset[str] | None = None


class _Applied:
    """A quota that applies to a caller: its forms, its bucket, and the place of its usage."""

    __slots__ = ("applied", "bucket", "counts_ids", "forms", "per_unit", "place", "shadow")

    def __init__(self, match: Match, bucket: Bucket, caller: LoggedCaller) -> None:
        self.applied, self.forms = match
        self.bucket = bucket
        self.shadow = self.forms.quota.shadow
        self.counts_ids = self.forms.counts_ids
        field_, self.per_unit = usage_field(self.forms.quota)
        self.place = -1 if self.counts_ids else caller.fields.index(field_)


class _Plan:
    """The quotas of a caller, and where its asks are counted: with all asks of its principal."""

    __slots__ = ("applied", "compared", "queue", "series")

    def __init__(
        self, applied: list[_Applied], compared: Compared, queue: _Queue | None, series: UsageSeries | None
    ) -> None:
        self.applied = applied
        self.compared = compared
        self.series = series
        self.queue = queue


@dataclass(slots=True)
class _Queue:
    """The asks of a caller that sends nothing while it waits."""

    free_ms: int = 0
    asks: deque[_Pending] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _Pending:
    """An ask that was not answered finally."""

    ask: LoggedAsk
    counts: bool
    came_ms: int
    tries: int = 0
    queue: _Queue | None = None
    limiting: AppliedQuota | None = None


class Simulation:
    """Asks of a log, decided by other quotas, with callers that react as a scenario says.

    Attributes:
        series, limits: see ``WhatIf``.
    """

    def __init__(self, quotas: Quotas, assumptions: Assumptions) -> None:
        self._quotas = quotas
        self._how = assumptions
        self._matcher = QuotaMatcher(quotas, assumptions.rules)
        self._buckets: dict[tuple[object, ...], Bucket] = {}
        self._compared: dict[str, Compared] = {}
        self._queues: dict[tuple[str | None, ...], _Queue] = {}
        self._factors: dict[str, float] = {}
        self._later: list[tuple[int, int, _Pending]] = []
        self._numbers = count()
        self._refused: Counter[tuple[str, str]] = Counter()
        self._refused_before: Counter[tuple[str, str]] = Counter()
        self.series: dict[str, UsageSeries] = {}
        self.limits: dict[str, dict[str, Quota]] = {}

    def change(self, row: LoggedChange) -> None:
        """Apply a row that is no ask: a reset empties buckets here too, and a factor scales limits."""
        if row.kind == "factor":
            with suppress(TypeError, ValueError):
                self._factors[row.node] = float(row.change.get("after"))  # type: ignore[arg-type]
        elif row.kind == "reset":
            for key, bucket in self._buckets.items():
                if key[1] == row.change.get("what"):
                    empty(bucket)

    def take(self, ask: LoggedAsk) -> None:
        """Decide an ask of the log, after all that came before."""
        if self._later:
            self._until(ask.at_ms)
        plan = ask.caller.plan or self._plan(ask.caller)
        if ask.kind != "decision":
            self._follow(ask, plan)
            return
        counts = ask.at_ms >= self._how.from_ms
        if counts:
            self._before(plan, ask)
        if ask.replayed or ask.source == "fallback" or ask.limiting == "throttle_factor":
            if counts:
                plan.compared.kept += 1
                self._after(plan, ask, ask.rank, ask.wait_ms, None)
            return
        queue = plan.queue
        if queue is None:
            self._try(ask, plan, ask.at_ms, counts)
        elif queue.asks or queue.free_ms > ask.at_ms:
            pending = _Pending(ask, counts, ask.at_ms, queue=queue)
            queue.asks.append(pending)
            if len(queue.asks) == 1:
                self._schedule(queue.free_ms, pending)
        else:
            self._ask_queued(_Pending(ask, counts, ask.at_ms, queue=queue), ask.at_ms)
            if queue.asks:
                self._schedule(queue.free_ms, queue.asks[0])

    def finish(self) -> None:
        """Decide all asks that still come again or wait."""
        while self._later:
            self._until(self._later[0][0])

    def results(self) -> tuple[Compared, dict[str, Compared]]:
        """The results over all, and by principal."""
        overall = Compared()
        for compared in self._compared.values():
            overall.add(compared)
        return overall, dict(sorted(self._compared.items()))

    def outcomes(self, logged: Iterable[AppliedQuota]) -> dict[tuple[str, str], QuotaOutcome]:
        """The refusals by entity and key, of the quotas of both worlds.

        Args:
            logged: the quotas of the log's verdicts.
        """
        found: dict[tuple[str, str], QuotaOutcome] = {}
        for applied in logged:
            outcome = found.setdefault((applied.entity, applied.quota.key), QuotaOutcome())
            outcome.limits_before.add(applied.quota.limit)
        for key, by_entity in self._quotas.items():
            for entity, quota in by_entity.items():
                outcome = found.setdefault((str(entity), key), QuotaOutcome())
                outcome.limit_after, outcome.shadow_after = quota.limit, quota.shadow
        for name, outcome in found.items():
            outcome.refused_before, outcome.refused_after = self._refused_before[name], self._refused[name]
        return dict(sorted(found.items()))

    def decide(
        self, ask: LoggedAsk, plan: _Plan, at_ms: int, usage: dict[str, float] | None
    ) -> tuple[int, int, AppliedQuota | None]:
        """Decide an ask at a time, and charge its buckets.

        Args:
            usage: to which the admitted usage is added.

        Returns:
            the place of the outcome in ``OUTCOMES``, the wait, and the quota that decided.
        """
        mode, ids, amounts = ask.mode, ask.ids, ask.amounts
        manner = manner_of(ask)
        factor = self._factors.get(ask.node, 1.0) if self._factors else 1.0
        is_scaled = 0 < factor < 1  # an ask that a factor of 0 does not hold has no bytes
        worst = longest = 0
        limiting: AppliedQuota | None = None
        parts = []
        for each in plan.applied:
            forms = each.forms.scaled(factor) if is_scaled else each.forms
            form = forms.forms[manner] or forms.form(manner)
            bucket = each.bucket
            amount = len(ids) if each.counts_ids else amounts[each.place] / each.per_unit
            if at_ms < bucket.newest_ms - form.clock_window_ms and mode in {"admit", "record"}:
                bucket.move_to(at_ms)
            parts.append((bucket, form, amount, each.shadow))
            if mode == "refund":
                continue
            answer = bucket.ask(form, amount, at_ms, ids)
            if answer and not each.shadow:
                rank, wait = (form.rank, answer) if answer > 0 else (REFUSED, 0)
                if rank > worst or (rank == worst and wait > longest):
                    worst, longest, limiting = rank, wait, each.applied
        if self._how.sequential and worst == DELAY:
            _, longest = sequential(parts, at_ms, ids)
        if mode == "peek":
            return worst, longest, limiting
        for bucket, form, amount, _ in parts:
            if mode == "refund":
                bucket.refund(form, amount, at_ms)
            elif worst >= THROTTLE:
                bucket.touch(form, at_ms, ids)
            else:
                if usage is not None and form.counts_ids and ids:
                    usage["producer_ids"] += len(bucket.unseen(form, at_ms, ids))  # type: ignore[union-attr]
                bucket.charge(form, amount, at_ms, ids)
        if usage is not None and worst < THROTTLE and mode != "refund":
            for name, amount in zip(ask.caller.fields, amounts, strict=True):
                usage[name] += amount
        return worst, longest, limiting

    def _try(self, ask: LoggedAsk, plan: _Plan, at_ms: int, counts: bool) -> None:
        """Decide an ask of a caller that does not queue."""
        compared = plan.compared
        rank, wait, limiting = self.decide(ask, plan, at_ms, compared.after.usage if counts else None)
        if (
            rank == THROTTLE
            and self._how.scenario == "retry-after-wait"
            and self._how.retries
            and ask.rank < THROTTLE
            and ask.mode == "admit"
        ):
            if counts:
                compared.after.wait_ms += wait
            self._schedule(at_ms + wait, _Pending(ask, counts, at_ms, 1))
        elif counts:
            self._after(plan, ask, rank, wait, limiting)

    def _again(self, pending: _Pending, at_ms: int) -> None:
        """Decide an ask that comes again after its wait."""
        ask, plan = pending.ask, pending.ask.caller.plan
        after = plan.compared.after
        rank, wait, limiting = self.decide(ask, plan, at_ms, after.usage if pending.counts else None)
        after.retries += pending.counts
        if rank == THROTTLE and pending.tries < self._how.retries:
            if pending.counts:
                after.wait_ms += wait
            pending.tries += 1
            self._schedule(at_ms + wait, pending)
        elif pending.counts:
            self._after(plan, ask, rank, wait, limiting)

    def _ask_queued(self, pending: _Pending, at_ms: int) -> None:
        """Decide the first ask of a queue; if it is throttled, it waits or is given up."""
        queue, ask, patience = pending.queue, pending.ask, self._how.patience_ms
        assert queue is not None
        plan = ask.caller.plan
        after = plan.compared.after
        waited = at_ms - pending.came_ms
        if waited > patience:
            self._give_up(pending, waited, pending.limiting)
            return
        rank, wait, limiting = self.decide(ask, plan, at_ms, after.usage if pending.counts else None)
        after.retries += pending.counts and pending.tries > 0
        queue.free_ms = at_ms + min(wait, patience)
        if rank != THROTTLE or ask.mode != "admit":
            if pending.counts:
                after.wait_ms += waited
                self._after(plan, ask, rank, wait, limiting)
        elif waited + wait > patience:
            self._give_up(pending, patience, limiting)
        else:
            pending.tries += 1
            pending.limiting = limiting
            queue.asks.appendleft(pending)

    def _give_up(self, pending: _Pending, waited: int, limiting: AppliedQuota | None) -> None:
        if pending.counts:
            plan = pending.ask.caller.plan
            plan.compared.after.gave_up += 1
            plan.compared.after.wait_ms += waited
            self._after(plan, pending.ask, THROTTLE, 0, limiting)

    def _until(self, at_ms: int) -> None:
        """Decide all asks that come again, or leave a queue, up to a time."""
        while self._later and self._later[0][0] <= at_ms:
            now_ms, _, pending = heapq.heappop(self._later)
            queue = pending.queue
            if queue is None:
                self._again(pending, now_ms)
                continue
            while queue.asks and queue.free_ms <= now_ms:
                self._ask_queued(queue.asks.popleft(), now_ms)
            if queue.asks:
                self._schedule(queue.free_ms, queue.asks[0])

    def _schedule(self, at_ms: int, pending: _Pending) -> None:
        heapq.heappush(self._later, (at_ms, next(self._numbers), pending))

    def _follow(self, ask: LoggedAsk, plan: _Plan) -> None:
        """Apply a row with verdicts that is no decision: what it did then it does here too."""
        if ask.kind == "late":
            self.decide(ask, plan, ask.at_ms, None)
            return
        for each in plan.applied:
            amount = 0.0 if each.counts_ids else ask.amounts[each.place] / each.per_unit
            follow(ask, each.bucket, each.forms.form(manner_of(ask)), amount)

    def _plan(self, caller: LoggedCaller) -> _Plan:
        """Find a caller's quotas, once."""
        found = []
        for match in self._matcher.matches(caller):
            key = key_of(match.applied)
            bucket = self._buckets.get(key)
            if bucket is None:
                bucket = self._buckets[key] = new_bucket(match.applied.quota, self._how.max_ids)
            found.append(_Applied(match, bucket, caller))
        queue = None
        if self._how.scenario == "stop-while-waiting":
            queue = self._queues.setdefault((caller.principal, caller.client_id, caller.ip), _Queue())
        principal = caller.principal or ""
        counted_as = principal
        if self._how.apart is not None:
            entities = {each.applied.bucket.partition(";")[0] for each in found}
            counted_as = "" if entities.isdisjoint(self._how.apart) else APART
        compared = self._compared.get(counted_as)
        if compared is None:
            compared = self._compared[counted_as] = Compared()
        series = self.series.get(principal)
        if series is None and len(self.series) < MOST_SERIES:
            series = self.series[principal] = UsageSeries()
        if series is not None:
            by_key = self.limits.setdefault(principal, {})
            for each in found:
                by_key.setdefault(each.applied.quota.key, each.applied.quota)
        plan = caller.plan = _Plan(found, compared, queue, series)
        return plan

    def _before(self, plan: _Plan, ask: LoggedAsk) -> None:
        """Count an ask as it was logged."""
        before = plan.compared.before
        before.decisions[OUTCOMES[ask.rank]] += 1
        before.wait_ms += ask.wait_ms
        if plan.series is not None:
            plan.series.add(ask, self._how.slice_ms)
        if ask.limiting is not None and ask.rank:
            by_key = before.refused_by if ask.rank >= THROTTLE else before.delayed_by
            by_key[ask.limiting] += 1
            if ask.rank >= THROTTLE and (verdict := _refusing(ask.verdicts)) is not None:
                applied = verdict.quota.applied
                self._refused_before[applied.entity, applied.quota.key] += 1
        if ask.rank < THROTTLE and ask.mode in {"admit", "record"}:
            for name, amount in zip(ask.caller.fields, ask.amounts, strict=True):
                before.usage[name] += amount
            for verdict in ask.verdicts:
                if verdict.charged_ids:
                    before.usage["producer_ids"] += len(verdict.charged_ids)

    def _after(
        self, plan: _Plan, ask: LoggedAsk, rank: int, wait_ms: int, limiting: AppliedQuota | None
    ) -> None:
        """Count an ask as it was finally answered under the other quotas."""
        compared = plan.compared
        after = compared.after
        after.decisions[OUTCOMES[rank]] += 1
        after.wait_ms += wait_ms
        if not rank:
            if ask.rank >= THROTTLE:
                compared.newly_admitted += 1
            return
        if limiting is not None:
            by_key = after.refused_by if rank >= THROTTLE else after.delayed_by
            by_key[limiting.quota.key] += 1
        if rank >= THROTTLE:
            if limiting is not None:
                self._refused[limiting.entity, limiting.quota.key] += 1
            if plan.series is not None:
                plan.series.refused_after[ask.at_ms - ask.at_ms % self._how.slice_ms] += 1
            if ask.rank < THROTTLE:
                compared.newly_refused += 1
        elif ask.rank >= THROTTLE:
            compared.newly_admitted += 1


def _refusing(verdicts: Sequence[VerdictOfAsk]) -> VerdictOfAsk | None:
    """The verdict that decided a refusal: the worst one, of these the first with the longest wait."""
    found = None
    for verdict in verdicts:
        if verdict.rank < THROTTLE or verdict.quota.applied.quota.shadow:
            continue
        if found is None or (verdict.rank, verdict.wait_ms) > (found.rank, found.wait_ms):
            found = verdict
    return found
