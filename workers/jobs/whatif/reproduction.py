"""Replays a log under its own quotas, and compares: a log that does not reproduce itself is no basis.

The quotas are those of the verdicts, not those of the logged changes. A verdict names the quota with all its
fields, the entity and the bucket, as the node resolved them; a change holds the definition alone, without the
deployment's defaults, and the log may begin after it.

Each ask is judged on the state that the log's own charges leave, so a wrong answer changes no later one.
After each ask the bucket is compared with what it showed. If they differ, it goes on from what it showed:

- the tokens of a token bucket are shown, so they are exact again but for the last digit;
- the number of charged ids is shown, but not when each of the surplus was charged: the bucket is in doubt
  until these and the unknown ids have expired;
- of a sampled rate only the sum and the window are shown: the bucket is in doubt until the logged charges
  alone explain what it shows, or it has shown what was expected for its whole span.

While a bucket is in doubt, its differences have the cause of the doubt.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from app.domain import sampled_rate
from app.domain.decision import BYTE_RATES, OUTCOMES, REQUEST_RATES
from app.domain.holds import MOST_HOLDS
from app.domain.quota import MAX_THROTTLE_MS, PRODUCER_BYTE_RATE, Quota
from app.domain.undo import Stamp, give_back_sample
from workers.jobs.audit.findings import improbable, unlikely
from workers.jobs.whatif.buckets import Bucket, Ids, Level, Rate, new_bucket
from workers.jobs.whatif.quota_form import (
    DELAY,
    REFUSED,
    REJECT,
    THROTTLE,
    QuotaForm,
    QuotaForms,
    manner_of,
)
from workers.jobs.whatif.rows import LoggedAsk, LoggedChange, VerdictOfAsk, VerdictQuota

Cause = Literal[
    "false_positive",
    "fallback",
    "late",
    "reset",
    "load",
    "quotas_changed",
    "factor_changed",
    "lease",
    "clock",
    "store_full",
    "slots",
    "replayed",
    "local",
    "older",
    "unordered",
    "other",
]
CAUSES: Final[Mapping[Cause, str]] = {
    "false_positive": "the filter took a new id as seen",
    "fallback": "the node answered without the store",
    "late": "a call that was answered without the store may have charged without a row",
    "reset": "the bucket had been reset",
    "load": "a backfill had been loaded into the bucket",
    "quotas_changed": "the entity's quotas changed at about that time",
    "factor_changed": "the throttle factor held the ask, or changed at about that time",
    "lease": "the bucket held units for leases",
    "clock": "a clock was corrected",
    "store_full": "the store was full",
    "slots": "charges in several slots of a cluster were taken back",
    "replayed": "the answer was a kept one",
    "local": "the node answered from ids that it knew",
    "older": "the bucket is older than the log",
    "unordered": "the store numbers no call of peeks, so others may have been decided before it",
    "other": "none of these",
}
"""Why a decision is not what the replay gives; the list is closed."""

EQUAL: Final = 1e-9
"""The allowed relative difference of numbers that went through the store as text."""

GRACE_MS: Final = 2_000
"""How long nodes may differ about a change; they follow within a second."""

PLAUSIBLE: Final = 2
"""How many new ids of one refused ask may have been taken as seen; a third one is no chance."""

MOVED: Final = 2
"""The correction of a bucket that moved back in time with the clock."""

EXAMPLES: Final = 10


class PartialLogError(ValueError):
    """The log leaves decisions out; replays need a log of ``QUOTAGATE_LOG=all``."""


class Example(NamedTuple):
    """A decision that the replay does not give, for no known cause.

    Attributes:
        identity: the batch and the place of the row.
    """

    identity: tuple[str, int]
    at_ms: int
    principal: str | None
    quota: str | None
    bucket: str | None
    logged: str
    exact: str


@dataclass(slots=True, eq=False)
class FollowedBucket:
    """A bucket as the log leaves it.

    Attributes:
        is_seen: the log has had an ask for it.
        doubt: why its state does not follow from the log; None if it does.
        doubt_ms: since when, or when the bucket last differed.
        began_ms: when the doubt began.
        charges: of a rate in doubt, its logged charges of the last span.
        late_ms: when an ask for it was last answered without the store, whose call may have charged later.
        limit, burst: of the last ask.
    """

    bucket: Bucket
    is_seen: bool = False
    doubt: Cause | None = None
    doubt_ms: int = 0
    began_ms: int = 0
    charges: deque[tuple[int, float]] = field(default_factory=deque)
    late_ms: float = -math.inf
    limit: float = 0.0
    burst: float = 0.0


class FollowedQuota:
    """The bucket of a logged quota, and the quota's forms."""

    __slots__ = ("followed", "form", "forms", "shadow")

    def __init__(self, followed: FollowedBucket, quota: Quota) -> None:
        self.followed = followed
        self.shadow = quota.shadow
        forms = QuotaForms(quota)
        self.forms, self.form = forms.forms, forms.form


@dataclass(slots=True)
class Reproduction:
    """What came of replaying a log under its own quotas.

    Attributes:
        decisions: all decisions that were compared.
        reproduced: the replay gave the same answer, and the buckets showed the same.
        causes: the others, by cause.
        new_ids: how many look-ups were of new ids.
        falsely_seen: how many of them the filter took as seen.
        seen_at_once: of asks with several such ids, how many these were, and the number of its new ids.
        examples: the first ones without a known cause.
    """

    decisions: int = 0
    reproduced: int = 0
    causes: Counter[Cause] = field(default_factory=Counter)
    new_ids: int = 0
    falsely_seen: int = 0
    seen_at_once: list[tuple[int, int]] = field(default_factory=list)
    examples: list[Example] = field(default_factory=list)

    @property
    def other(self) -> int:
        """How many decisions differ for no known cause."""
        return self.causes["other"]

    def take_as_seen(self, passed: int, new_ids: int) -> None:
        """Count new ids of an ask that the filter took as seen."""
        self.falsely_seen += passed
        if passed > 1:
            self.seen_at_once.append((passed, new_ids))

    @property
    def is_implausible(self) -> bool:
        """Whether a filter within its bound takes so many new ids as seen in less than 1 of 10^6 logs."""
        return improbable(self.falsely_seen, self.new_ids) or any(
            unlikely(passed, new_ids, self.decisions) for passed, new_ids in self.seen_at_once
        )


@dataclass(slots=True)
class ReproductionCheck:
    """Replays rows in the store's order under the quotas of their verdicts.

    Attributes:
        is_whole: the log has the first batch of every node, so all buckets were empty before it.
        sequential: request delays are measured after byte delays (``QUOTAGATE_COMBINE_DELAYS``).
    """

    max_ids: int = 1_000_000
    is_whole: bool = False
    sequential: bool = False
    found: Reproduction = field(default_factory=Reproduction)
    buckets: dict[tuple[str, str], dict[tuple[object, ...], FollowedBucket]] = field(default_factory=dict)
    began_ms: int | None = None
    quotas_ms: dict[str, int] = field(default_factory=dict)
    factor_ms: dict[str, int] = field(default_factory=dict)
    has_admitted: bool = False
    has_charges: bool = False

    def change(self, row: LoggedChange) -> None:
        """Apply a row that is no ask.

        Raises:
            PartialLogError: the row says that decisions are missing.
        """
        what = row.change.get("what") or ""
        if row.kind == "quota":
            self.quotas_ms[what] = row.at_ms
        elif row.kind == "factor":
            self.factor_ms[row.node] = row.at_ms
        elif row.kind in {"reset", "load"}:
            for key in _quotas_of(row):
                for followed in self.buckets.get((key, what), {}).values():
                    if row.kind == "load":
                        self._doubt(followed, "load", row.at_ms)
                    else:
                        followed.bucket = _emptied(followed.bucket, self.max_ids)
                        followed.doubt, followed.is_seen = "reset", True
                        followed.doubt_ms = followed.began_ms = row.at_ms

    def follow(self, ask: LoggedAsk, *, counts: bool = True) -> None:
        """Judge an ask, compare, and write what the log says that was written.

        Args:
            counts: whether the ask is among those that are compared; one of the lead-in is only followed.

        Raises:
            PartialLogError: the row says that decisions are missing.
        """
        if self.began_ms is None:
            self.began_ms = ask.at_ms
        if ask.kind != "decision":
            self._follow_other(ask)
            return
        if not self.has_admitted and ask.source == "store":
            self.has_admitted = ask.rank == 0
            self.has_charges = self.has_charges or any((each.observed or 0) > 0 for each in ask.verdicts)
        cause = self._decision(ask)
        if not counts:
            return
        found = self.found
        found.decisions += 1
        if cause is None:
            found.reproduced += 1
        else:
            found.causes[cause] += 1

    def finish(self) -> None:
        """Judge the log as a whole, after its last row.

        Raises:
            PartialLogError: no ask was admitted, although a bucket has charges that no row explains.
        """
        found = self.found
        if self.has_charges and not self.has_admitted and (found.other or found.causes["older"]):
            raise PartialLogError("it leaves out admitted asks, as QUOTAGATE_LOG=denied does")
        if found.is_implausible:
            found.causes["other"] += found.causes.pop("false_positive", 0)

    def target(self, logged: VerdictQuota) -> FollowedQuota:
        """The bucket of a logged quota, and the quota's forms."""
        applied = logged.applied
        by_identity = self.buckets.setdefault((applied.quota.key, applied.bucket), {})
        identity = (*applied.quota.identity, applied.quota.epoch)
        followed = by_identity.get(identity)
        if followed is None:
            followed = by_identity[identity] = FollowedBucket(new_bucket(applied.quota, self.max_ids))
        target = logged.target = FollowedQuota(followed, applied.quota)
        return target

    def _decision(self, ask: LoggedAsk) -> Cause | None:
        """Compare a decision and follow it; return why it differs, or None."""
        at_ms, mode, ids = ask.at_ms, ask.mode, ask.ids
        manner = manner_of(ask)
        is_plain = ask.has_order and ask.source == "store" and not ask.replayed
        differing: list[tuple[VerdictOfAsk, int]] | None = None
        worst = longest = 0
        if mode != "refund":
            answers = self._sequential(ask, manner) if self.sequential else None
            for place, verdict in enumerate(ask.verdicts):
                target = verdict.quota.target or self.target(verdict.quota)
                form = target.forms[manner] or target.form(manner)
                bucket = target.followed.bucket
                if at_ms < bucket.newest_ms - form.clock_window_ms:
                    self._set_back(target.followed, at_ms, mode)
                answer = bucket.ask(form, verdict.usage, at_ms, ids) if answers is None else answers[place]
                if answer > 0:
                    rank, wait = form.rank, answer
                elif answer == 0:
                    rank = wait = 0
                else:
                    rank, wait = REFUSED, 0
                if rank != verdict.rank or wait != verdict.wait_ms:
                    differing = differing or []
                    differing.append((verdict, answer))
                if rank and not target.shadow and (rank > worst or (rank == worst and wait > longest)):
                    worst, longest = rank, wait
            if self.sequential and worst == DELAY:
                longest = _summed(ask.verdicts, answers or [])
        causes: list[Cause] = []
        if differing:
            causes = [self._cause(ask, verdict, answer, manner) for verdict, answer in differing]
        elif (worst, longest) != (ask.rank, ask.wait_ms):
            causes = [self._of_row(ask) or "other"]
            if causes == ["other"]:
                self._note(ask, None, _said(ask.rank, ask.wait_ms), _said(worst, longest))
        if is_plain:
            self._effects(ask, manner, causes)
        else:
            self._without_store(ask, manner, causes)
        if not causes:
            return None
        return "other" if "other" in causes else causes[0]

    def _effects(self, ask: LoggedAsk, manner: int, causes: list[Cause]) -> None:
        """Write what the store wrote for an ask, and compare what its buckets showed."""
        at_ms, mode, ids = ask.at_ms, ask.mode, ask.ids
        refused = ask.rank >= THROTTLE
        for verdict in ask.verdicts:
            target = verdict.quota.target or self.target(verdict.quota)
            followed, form = target.followed, target.form(manner)
            bucket = followed.bucket
            if type(bucket) is Rate:
                if mode in ("admit", "record"):
                    if not refused:
                        bucket.charge(form, verdict.usage, at_ms)
                        if followed.doubt is not None:
                            followed.charges.append((at_ms, verdict.usage))
                elif mode == "refund":
                    bucket.refund(form, verdict.usage, at_ms)
                if verdict.observed is None:
                    continue
                shown = bucket.shows(form, at_ms)[0] if bucket.holds else bucket.shown(form, at_ms)
                expected = verdict.observed
            elif type(bucket) is Ids:
                if verdict.observed is None:  # the node answered for it from known ids
                    continue
                if mode == "peek":
                    pass
                elif refused:
                    bucket.touch(form, at_ms, ids)
                elif ids and (verdict.charged_ids or not bucket.are_open(form, at_ms, ids)):
                    self._charge_ids(ask, verdict, followed, form, causes)
                now_ms = at_ms if at_ms >= bucket.newest_ms else bucket.newest_ms  # noqa: FURB136
                shown = bucket.exact.charged(now_ms, form.quota.window_ms)
                expected = verdict.observed
            else:
                if mode == "refund":
                    bucket.refund(form, verdict.usage, at_ms)
                elif mode != "peek" and refused:
                    bucket.touch(form, at_ms, ids)
                elif mode != "peek":
                    bucket.charge(form, verdict.usage, at_ms, ids)
                if verdict.remaining is None:
                    continue
                shown, expected = bucket.shows(form, at_ms)[1], verdict.remaining
            if shown == expected or abs(shown - expected) <= EQUAL * max(1.0, abs(expected)):
                if followed.doubt is not None:
                    self._settle(followed, form, at_ms)
            elif mode == "peek" and at_ms < bucket.newest_ms - form.clock_window_ms:
                pass  # only the copy that was looked at moved with the clock
            else:
                self._differs(ask, verdict, followed, form, shown, expected, causes)
            followed.is_seen = True
            followed.limit, followed.burst = form.limit, form.quota.burst

    def _charge_ids(
        self,
        ask: LoggedAsk,
        verdict: VerdictOfAsk,
        followed: FollowedBucket,
        form: QuotaForm,
        causes: list[Cause],
    ) -> None:
        """Charge the ids that the store charged, and remember the others as it does."""
        bucket, at_ms = followed.bucket, ask.at_ms
        assert isinstance(bucket, Ids)
        unseen = bucket.unseen(form, at_ms, ask.ids)
        if unseen or verdict.charged_ids:
            charged = set(verdict.charged_ids)
            self.found.new_ids += len(unseen)
            now_ms = max(at_ms, bucket.newest_ms)
            if taken_as_seen := [each for each in unseen if each not in charged]:
                cause = self._excuse(ask, verdict, followed, form) or "false_positive"
                causes.append(cause)
                if cause == "false_positive":
                    self.found.take_as_seen(len(taken_as_seen), len(unseen))
                for each in taken_as_seen:
                    bucket.exact.adopt(each, now_ms, form.quota.layers)
            if lost := charged.difference(unseen):
                causes.append(self._excuse(ask, verdict, followed, form) or "other")
                if causes[-1] == "other":
                    self._note(ask, verdict, f"{len(lost)} known ids charged", "known ids are not charged")
                for each in lost:
                    bucket.exact.forget(each)
            bucket.note()
        bucket.charge(form, verdict.usage, at_ms, ask.ids)

    def _without_store(self, ask: LoggedAsk, manner: int, causes: list[Cause]) -> None:
        """Follow an ask that the store did not decide, or decided only in part."""
        if ask.replayed:
            return
        in_part = ask.failure == "store_full" or any(each.order is not None for each in ask.verdicts)
        for verdict in ask.verdicts:
            target = verdict.quota.target or self.target(verdict.quota)
            followed, form = target.followed, target.form(manner)
            was_asked = verdict.observed is not None and verdict.reason not in {"store_full", "store_failure"}
            if in_part and ask.charged and was_asked and ask.rank < THROTTLE:
                if isinstance(followed.bucket, Ids) and ask.ids:
                    self._charge_ids(ask, verdict, followed, form, causes)
                else:
                    followed.bucket.charge(form, verdict.usage, ask.at_ms, ask.ids)
            elif ask.source == "fallback":
                followed.late_ms = ask.at_ms

    def _follow_other(self, ask: LoggedAsk) -> None:
        """Follow a row with verdicts that is no decision of its own."""
        at_ms, kind = ask.at_ms, ask.kind
        manner = manner_of(ask)
        for verdict in ask.verdicts:
            target = verdict.quota.target or self.target(verdict.quota)
            followed, form = target.followed, target.form(manner)
            bucket = followed.bucket
            if kind in {"lease", "settlement"}:
                follow_lease(ask, bucket, form, verdict.usage)
                followed.doubt, followed.began_ms = followed.doubt or "lease", at_ms
                followed.doubt_ms = at_ms
            elif kind == "undone":
                bucket.charge(form, verdict.usage, at_ms, ask.ids)
                self._doubt(followed, "slots", at_ms)
            elif kind == "undo":
                give_back(bucket, form, verdict.usage, at_ms)
                self._doubt(followed, "slots", at_ms)
            elif kind == "ids" and verdict.charged_ids:
                raise PartialLogError("it has charges of decisions that it leaves out")
            elif kind in {"renewal", "ids"}:
                if isinstance(bucket, Ids):
                    renew(bucket, form, at_ms, ask.ids)
            elif verdict.reason != "store_full":  # late
                if ask.rank >= THROTTLE:
                    bucket.touch(form, at_ms, ask.ids)
                elif isinstance(bucket, Ids):
                    self._charge_ids(ask, verdict, followed, form, [])
                else:
                    bucket.charge(form, verdict.usage, at_ms, ask.ids)
                    if followed.doubt is not None:
                        followed.charges.append((at_ms, verdict.usage))
                if kind == "late":
                    followed.late_ms = -math.inf

    def _cause(self, ask: LoggedAsk, verdict: VerdictOfAsk, answer: int, manner: int) -> Cause:
        """Why a verdict differs from the exact answer."""
        target = verdict.quota.target
        followed, form = target.followed, target.form(manner)
        bucket = followed.bucket
        if cause := self._of_row(ask) or self._excuse(ask, verdict, followed, form):
            return cause
        if isinstance(bucket, Ids):
            if verdict.observed is None:
                return "local"
            unseen = bucket.unseen(form, ask.at_ms, ask.ids)
            for passed in range(1, min(len(unseen), PLAUSIBLE) + 1):
                others = tuple([each for each in ask.ids if each not in unseen[:passed]])
                if bucket.ask(form, len(others), ask.at_ms, others) == _answer_of(verdict):
                    self.found.new_ids += len(unseen)
                    self.found.take_as_seen(passed, len(unseen))
                    return "false_positive"
        rank = 0 if answer == 0 else form.rank if answer > 0 else REFUSED
        exact = _said(rank, max(answer, 0))
        self._note(ask, verdict, _said(verdict.rank, verdict.wait_ms), exact)
        return "other"

    def _of_row(self, ask: LoggedAsk) -> Cause | None:
        """The cause that the row itself names."""
        if ask.replayed:
            return "replayed"
        if ask.failure == "store_full" or any(each.reason == "store_full" for each in ask.verdicts):
            return "store_full"
        if ask.source == "fallback":
            return "fallback"
        if ask.limiting == "throttle_factor":
            return "factor_changed"
        if ask.source == "store" and ask.mode == "peek" and not ask.has_order:
            return "unordered"
        return "local" if ask.source == "local" else None

    def _excuse(
        self, ask: LoggedAsk, verdict: VerdictOfAsk, followed: FollowedBucket, form: QuotaForm
    ) -> Cause | None:
        """The cause that the bucket's own history names."""
        quota = form.quota
        if followed.doubt is not None:
            return followed.doubt
        if verdict.correction:
            return "clock"
        if verdict.order is not None:
            return "slots"
        if not self.is_whole and self.began_ms is not None:
            lasts_ms = max(quota.layers.ttl_ms, quota.window_ms) if form.counts_ids else 0
            if not followed.is_seen or ask.at_ms - self.began_ms < lasts_ms:
                return "older"
        if ask.at_ms - followed.late_ms < (quota.window_ms if form.counts_ids else form.kept_ms):
            return "late"
        changed_ms = self.quotas_ms.get(verdict.quota.applied.entity, -math.inf)
        has_changed = followed.is_seen and (followed.limit, followed.burst) != (form.limit, quota.burst)
        if abs(ask.at_ms - changed_ms) <= GRACE_MS or (has_changed and quota.key != PRODUCER_BYTE_RATE):
            return "quotas_changed"
        factor_ms = self.factor_ms.get(ask.node, -math.inf)
        if quota.key == PRODUCER_BYTE_RATE and (has_changed or abs(ask.at_ms - factor_ms) <= GRACE_MS):
            return "factor_changed"
        return None

    def _differs(
        self,
        ask: LoggedAsk,
        verdict: VerdictOfAsk,
        followed: FollowedBucket,
        form: QuotaForm,
        shown: float,
        expected: float,
        causes: list[Cause],
    ) -> None:
        """A bucket showed something else: find the cause, and go on from what it showed."""
        cause = self._of_row(ask) or self._excuse(ask, verdict, followed, form)
        if cause == "older" and isinstance(followed.bucket, Level) and expected > shown:
            cause = None  # older charges can only take tokens
        if cause is None:
            cause = "other"
            self._note(ask, verdict, f"shows {expected:.12g}", f"shows {shown:.12g}")
        if not causes:
            causes.append(cause)
        self._doubt(followed, cause, ask.at_ms)
        bucket, at_ms = followed.bucket, ask.at_ms
        if isinstance(bucket, Level):
            bucket.tokens, bucket.newest_ms = expected, max(at_ms, bucket.newest_ms)
        elif isinstance(bucket, Ids):
            surplus = round(expected - shown)
            if surplus > 0:
                bucket.exact.charges.extend([max(at_ms, bucket.newest_ms)] * surplus)
            else:
                bucket.exact.uncharge(-surplus)
            bucket.note()
        else:
            _resume_rate(followed, bucket, form, verdict, at_ms)

    def _doubt(self, followed: FollowedBucket, cause: Cause, at_ms: int) -> None:
        if followed.doubt is None:
            followed.doubt, followed.began_ms = cause, at_ms
            followed.charges.clear()
        followed.doubt_ms = at_ms

    def _settle(self, followed: FollowedBucket, form: QuotaForm, at_ms: int) -> None:
        """A bucket in doubt showed what was expected: end the doubt once it has done so long enough."""
        if form.counts_ids:
            lasts_ms = max(form.quota.layers.ttl_ms, form.quota.window_ms)
            if at_ms - followed.doubt_ms >= lasts_ms:
                followed.doubt = None
            return
        assert not isinstance(followed.bucket, Ids)
        is_over = isinstance(followed.bucket, Level) or at_ms - followed.doubt_ms >= form.kept_ms
        if is_over and not followed.bucket.holds:
            followed.doubt = None
            followed.charges.clear()

    def _set_back(self, followed: FollowedBucket, at_ms: int, mode: str) -> None:
        """Follow a clock that was set back by more than a window."""
        if mode not in {"peek", "refund"}:
            followed.bucket.move_to(at_ms)
        self._doubt(followed, "clock", at_ms)

    def _sequential(self, ask: LoggedAsk, manner: int) -> list[int]:
        """The answers where request delays are measured after byte delays."""
        targets = [each.quota.target or self.target(each.quota) for each in ask.verdicts]
        return sequential_answers(
            [
                (each.followed.bucket, each.form(manner), verdict.usage, each.shadow)
                for each, verdict in zip(targets, ask.verdicts, strict=True)
            ],
            ask.at_ms,
            ask.ids,
            [each.reason != "store_full" for each in ask.verdicts],
        )

    def _note(self, ask: LoggedAsk, verdict: VerdictOfAsk | None, logged: str, exact: str) -> None:
        if len(self.found.examples) < EXAMPLES:
            applied = verdict.quota.applied if verdict is not None else None
            self.found.examples.append(
                Example(
                    ask.identity,
                    ask.at_ms,
                    ask.caller.principal,
                    None if applied is None else applied.quota.key,
                    None if applied is None else applied.bucket,
                    logged,
                    exact,
                )
            )


Part = tuple[Bucket, QuotaForm, float, bool]
"""A bucket, the quota's form, the usage, and whether the quota is in shadow."""


def sequential_answers(
    parts: list[Part], at_ms: int, ids: tuple[bytes, ...], measured: list[bool] | None = None
) -> list[int]:
    """The answers of buckets where request delays are measured after byte delays (KIP-124)."""
    answers = [bucket.ask(form, usage, at_ms, ids) for bucket, form, usage, _ in parts]
    byte_delay = max(
        (
            answer
            for place, (answer, (_, form, _, shadow)) in enumerate(zip(answers, parts, strict=True))
            if form.rank == DELAY and form.quota.key in BYTE_RATES and not shadow
            if measured is None or measured[place]
        ),
        default=0,
    )
    if byte_delay > 0:
        for place, (bucket, form, usage, _) in enumerate(parts):
            if form.quota.key in REQUEST_RATES:
                answers[place] = bucket.ask(form, usage, at_ms, ids, byte_delay)
    return answers


def summed_delay(delays: list[tuple[str, int]]) -> int:
    """The delay that KIP-124 gives, from the delays by quota key."""
    parts = [
        max((wait for key, wait in delays if key in keys), default=0) for keys in (BYTE_RATES, REQUEST_RATES)
    ]
    others = [wait for key, wait in delays if key not in BYTE_RATES + REQUEST_RATES]
    return max(min(sum(parts), MAX_THROTTLE_MS), *others, 0)


def follow_lease(ask: LoggedAsk, bucket: Bucket, form: QuotaForm, usage: float) -> None:
    """Hold the units of a lease that was granted, or charge the spent units of a settled one."""
    if isinstance(bucket, Ids):
        return
    named = (ask.change or {}).get("what") or ""
    lease_ms = json.loads((ask.change or {}).get("after") or "{}").get("lease_ms", 0)
    name = bytes.fromhex(named) if _is_hex(named) else named.encode()
    found, now_ms = bucket.domain(), max(ask.at_ms, bucket.newest_ms)
    charge = form.charge(usage, now_ms, ask.at_ms)
    found.reckon(charge)
    is_refused = ask.rank >= THROTTLE or ask.source == "fallback"
    if ask.kind == "settlement":
        if ask.rank != REFUSED:
            found.settle(charge, name)
    elif not is_refused and usage > 0 and len(found.holds) < MOST_HOLDS:
        found.hold(charge, name, lease_ms)
    else:
        found.touch(charge)
    bucket.adopt(found)  # type: ignore[arg-type]  # the bucket's own


def give_back(bucket: Bucket, form: QuotaForm, units: float, at_ms: int) -> None:
    """Take back a charge that was made at a time, in a slot of a cluster."""
    if isinstance(bucket, Rate):
        state, _ = give_back_sample(bucket.state(), Stamp(0, at_ms, units, b""))
        bucket.take(state)
    elif isinstance(bucket, Level) and bucket.tokens is not None:
        bucket.tokens = min(bucket.tokens + units, form.quota.burst)


def renew(bucket: Ids, form: QuotaForm, at_ms: int, ids: tuple[bytes, ...]) -> None:
    """Write known ids to the open layer, uncharged."""
    now_ms = max(at_ms, bucket.newest_ms)
    for each in bucket.unseen(form, at_ms, ids):
        bucket.exact.adopt(each, now_ms, form.quota.layers)
    bucket.note()
    bucket.touch(form, at_ms, ids)


def _resume_rate(
    followed: FollowedBucket, bucket: Rate, form: QuotaForm, verdict: VerdictOfAsk, at_ms: int
) -> None:
    """Go on from the sum and the window that a rate showed.

    If the logged charges since the doubt began explain them, the state is known again. Otherwise the surplus
    is one charge in the oldest sample, and what is missing is taken from the newest ones.
    """
    window_ms = _window(form, verdict)
    now_ms = max(at_ms, bucket.newest_ms)
    charges = followed.charges
    while charges and now_ms - charges[0][0] > form.kept_ms + 2 * form.sample_ms:
        charges.popleft()
    if window_ms is None or verdict.observed is None:
        return
    for missing in range(form.samples):
        start_ms = now_ms - (window_ms - missing * form.sample_ms)
        if not any(charge_ms == start_ms for charge_ms, _ in charges):
            continue
        other = Rate()
        for charge_ms, usage in charges:
            if charge_ms >= start_ms:
                other.charge(form, usage, charge_ms)
        if abs(other.shown(form, at_ms) - verdict.observed) <= EQUAL * max(1.0, verdict.observed):
            bucket.take(other.state())
            followed.doubt = None
            return
    surplus = verdict.observed * (window_ms / 1000) - bucket.shown(form, at_ms) * (
        _our_window(bucket, form, now_ms) / 1000
    )
    state = sampled_rate.live_samples(bucket.state(), now_ms, form.samples, form.sample_ms)
    if surplus < 0:
        bucket.take(sampled_rate.refund(state, -surplus))
    elif state:
        oldest = state[0]
        start_ms = min(oldest.start_ms, max(now_ms - window_ms, now_ms - form.span_ms + 1))
        bucket.take((oldest._replace(value=oldest.value + surplus, start_ms=start_ms), *state[1:]))
    elif surplus > 0:
        start_ms = max(now_ms - window_ms, now_ms - form.span_ms + 1)
        bucket.take((sampled_rate.Sample(surplus, start_ms, start_ms),))


def _our_window(bucket: Rate, form: QuotaForm, now_ms: int) -> int:
    return sampled_rate.measure(bucket.state(), now_ms, form.samples, form.sample_ms)[1]


def _window(form: QuotaForm, verdict: VerdictOfAsk) -> int | None:
    """The window over which a rate was measured; None if it does not follow from the shown numbers."""
    if verdict.observed is None or verdict.remaining is None:
        return None
    spare = form.limit - verdict.observed
    if abs(spare) <= EQUAL * form.limit:
        return None
    return round(verdict.remaining * 1000 / spare)


def _emptied(bucket: Bucket, max_ids: int) -> Bucket:
    if isinstance(bucket, Ids):
        return Ids(max_ids)
    return Rate() if isinstance(bucket, Rate) else Level()


def _quotas_of(row: LoggedChange) -> list[str]:
    """The quota keys whose buckets a reset emptied or a load filled."""
    text = row.change.get("before" if row.kind == "reset" else "after")
    try:
        found = json.loads(text or "{}").get("quotas", [])
    except (ValueError, AttributeError):
        return []
    return [each for each in found if isinstance(each, str)]


def _answer_of(verdict: VerdictOfAsk) -> int:
    return REJECT if verdict.rank == REFUSED else verdict.wait_ms


def _said(rank: int, wait_ms: int) -> str:
    return f"{OUTCOMES[rank]} {wait_ms} ms" if wait_ms else OUTCOMES[rank]


def _summed(verdicts: list[VerdictOfAsk], answers: list[int]) -> int:
    return summed_delay(
        [
            (verdict.quota.applied.quota.key, answer)
            for verdict, answer in zip(verdicts, answers, strict=True)
            if answer > 0 and not verdict.quota.applied.quota.shadow
        ]
    )


def _is_hex(text: str) -> bool:
    return len(text) % 2 == 0 and all(each in "0123456789abcdef" for each in text)
