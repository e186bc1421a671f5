"""Replays a log under its own quotas, and compares: a log that does not reproduce itself is no basis.

The quotas come from the verdicts, not from the logged changes. A verdict names the quota with all its
fields, the entity and the bucket, as the node resolved them; a change holds the definition alone, without the
deployment's defaults, and the log may begin after it.

Each ask is judged on the state that the log's own charges leave, so a wrong answer changes no later one.
After each ask the bucket is compared with the logged state, and goes on from it (``followed_bucket``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from app.domain.decision import OUTCOMES
from workers.jobs.audit.findings import improbable, unlikely
from workers.jobs.verdicts import named_quotas
from workers.jobs.whatif import other_rows
from workers.jobs.whatif.buckets import Ids, Level, Rate, new_bucket
from workers.jobs.whatif.causes import Cause, CauseFinder
from workers.jobs.whatif.followed_bucket import (
    LESS,
    MORE,
    UNEXPLAINED,
    FollowedBucket,
    FollowedQuota,
    Surplus,
    is_equal,
)
from workers.jobs.whatif.quota_form import DELAY, REFUSED, REJECT, THROTTLE, QuotaForm, manner_of
from workers.jobs.whatif.rows import LoggedAsk, LoggedChange, VerdictOfAsk, VerdictQuota
from workers.jobs.whatif.sequential import sequential

PLAUSIBLE: Final = 2
"""How many new ids of one refused ask may have been taken as seen; a third one is no chance."""

EXAMPLES: Final = 10

DOUBTS: Final[Mapping[str, Cause]] = {
    "lease": "lease",
    "settlement": "lease",
    "undone": "slots",
    "undo": "slots",
}
"""Kinds of rows that put a bucket in doubt, and the cause."""


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


@dataclass(slots=True)
class Reproduction:
    """The result of replaying a log under its own quotas.

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


class ReproductionCheck:
    """Replays rows in the store's order under the quotas of their verdicts.

    Args:
        is_whole: the log has the first batch of every node, so all buckets were empty before it.
        sequential: request delays are measured after byte delays (``QUOTAGATE_COMBINE_DELAYS``).
    """

    def __init__(self, max_ids: int = 1_000_000, *, is_whole: bool = False, sequential: bool = False) -> None:
        self.found = Reproduction()
        self._max_ids = max_ids
        self._is_sequential = sequential
        self._causes = CauseFinder(is_whole)
        self._buckets: dict[tuple[str, str], dict[tuple[object, ...], FollowedBucket]] = {}
        """Buckets by quota key and name, then by the quota's identity: a new identity has an empty bucket."""
        self._has_admitted = False
        self._has_charges = False
        self._lead_in_differs = False

    def change(self, row: LoggedChange) -> None:
        """Apply a row that is no ask."""
        self._causes.note(row)
        if row.kind in {"reset", "load"}:
            for key in named_quotas(row.change.get("before" if row.kind == "reset" else "after")):
                for followed in self._buckets.get((key, row.change.get("what") or ""), {}).values():
                    if row.kind == "load":
                        followed.begin_doubt("load", row.at_ms)
                    else:
                        followed.reset(row.at_ms)

    def expect(self, ask: LoggedAsk) -> None:
        """Expect the charge of an ask that was answered without the store: it may come before the row."""
        if ask.replayed or ask.mode == "peek":
            return
        manner = manner_of(ask)
        for verdict in ask.verdicts:
            if verdict.reason != "store_full" and not _was_charged(ask, verdict):
                target = verdict.quota.target or self._target(verdict.quota)
                target.followed.expect(target.form(manner), verdict.usage, ask.at_ms, ask.mode)

    def follow(self, ask: LoggedAsk, *, counts: bool = True) -> None:
        """Judge an ask, compare, and write what the log says that was written.

        Args:
            counts: whether the ask is among those that are compared; one of the lead-in is only followed.

        Raises:
            PartialLogError: the row is not of the lead-in, and says that decisions are missing.
        """
        if self._causes.began_ms is None:
            self._causes.began_ms = ask.at_ms
        if counts and self._lead_in_differs:
            self._begin_anew(ask.at_ms)
        if ask.kind != "decision":
            self._follow_other(ask, counts=counts)
            return
        if not self._has_admitted and ask.source == "store":
            self._has_admitted = ask.rank == 0
            self._has_charges = self._has_charges or any((each.observed or 0) > 0 for each in ask.verdicts)
        cause = self._decision(ask)
        if not counts:
            self._lead_in_differs |= cause == "other"
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
        if self._has_charges and not self._has_admitted and (found.other or found.causes["older"]):
            raise PartialLogError("it leaves out admitted asks, as QUOTAGATE_LOG=denied does")
        if found.is_implausible:
            found.causes["other"] += found.causes.pop("false_positive", 0)

    def _begin_anew(self, at_ms: int) -> None:
        """Begin after a lead-in that leaves decisions out as in the middle of a log."""
        self._lead_in_differs = False
        self._causes.began_ms = at_ms
        self.found.examples.clear()
        for by_identity in self._buckets.values():
            for followed in by_identity.values():
                followed.forget()

    def _target(self, logged: VerdictQuota) -> FollowedQuota:
        """The bucket of a logged quota, and the quota's forms."""
        applied = logged.applied
        by_identity = self._buckets.setdefault((applied.quota.key, applied.bucket), {})
        identity = (*applied.quota.identity, applied.quota.epoch)
        followed = by_identity.get(identity)
        if followed is None:
            followed = by_identity[identity] = FollowedBucket(new_bucket(applied.quota, self._max_ids))
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
            answers, summed = self._sequential(ask, manner) if self._is_sequential else (None, 0)
            for place, verdict in enumerate(ask.verdicts):
                target = verdict.quota.target or self._target(verdict.quota)
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
            if self._is_sequential and worst == DELAY:
                longest = summed
        causes: list[Cause] = []
        if differing:
            causes = [self._cause(ask, verdict, answer, manner) for verdict, answer in differing]
        elif (worst, longest) != (ask.rank, ask.wait_ms):
            causes = [self._causes.of_row(ask) or "other"]
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
            target = verdict.quota.target or self._target(verdict.quota)
            followed, form = target.followed, target.form(manner)
            bucket = followed.bucket
            if followed.is_awaited:
                followed.note_answer(at_ms)
            if type(bucket) is Rate:
                if mode in ("admit", "record"):
                    if not refused:
                        bucket.charge(form, verdict.usage, at_ms)
                        followed.note_charge(at_ms, verdict.usage)
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
            if shown == expected or is_equal(shown, expected):
                if followed.doubt is not None:
                    followed.settle(form, at_ms)
            elif mode != "peek" or at_ms >= bucket.newest_ms - form.clock_window_ms:
                self._differs(ask, verdict, followed, form, shown, expected, causes)
            # else only the copy that was looked at moved with the clock
            if not followed.is_seen and self._causes.may_be_older(form, at_ms):
                followed.begin_doubt("older", at_ms)  # samples without usage do not show, but begin a window
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
                cause = self._causes.of_bucket(ask, verdict, followed, form, MORE) or "false_positive"
                causes.append(cause)
                if cause == "false_positive":
                    self.found.take_as_seen(len(taken_as_seen), len(unseen))
                for each in taken_as_seen:
                    bucket.exact.adopt(each, now_ms, form.quota.layers)
            if lost := charged.difference(unseen):
                causes.append(self._causes.of_bucket(ask, verdict, followed, form, UNEXPLAINED) or "other")
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
        for verdict in ask.verdicts:
            target = verdict.quota.target or self._target(verdict.quota)
            followed, form = target.followed, target.form(manner)
            if _was_charged(ask, verdict):
                if isinstance(followed.bucket, Ids) and ask.ids:
                    self._charge_ids(ask, verdict, followed, form, causes)
                else:
                    followed.bucket.charge(form, verdict.usage, ask.at_ms, ask.ids)

    def _follow_other(self, ask: LoggedAsk, *, counts: bool) -> None:
        """Follow a row with verdicts that is no decision of its own."""
        at_ms, kind = ask.at_ms, ask.kind
        manner = manner_of(ask)
        for verdict in ask.verdicts:
            target = verdict.quota.target or self._target(verdict.quota)
            followed, form = target.followed, target.form(manner)
            bucket = followed.bucket
            if kind == "ids" and verdict.charged_ids:
                if counts:
                    raise PartialLogError("it has charges of decisions that it leaves out")
                self._lead_in_differs = True
            if kind != "late":
                other_rows.follow(ask, bucket, form, verdict.usage, is_over=verdict.rank == REFUSED)
                if kind in DOUBTS:
                    followed.begin_doubt(DOUBTS[kind], at_ms)
            elif verdict.reason != "store_full":  # late
                if ask.rank >= THROTTLE:
                    bucket.touch(form, at_ms, ask.ids)
                elif isinstance(bucket, Ids):
                    self._charge_ids(ask, verdict, followed, form, [])
                elif ask.mode == "refund":
                    bucket.refund(form, verdict.usage, at_ms)
                else:
                    bucket.charge(form, verdict.usage, at_ms)
                    followed.note_charge(at_ms, verdict.usage)
                followed.note_late(verdict.usage, ask.mode)

    def _cause(self, ask: LoggedAsk, verdict: VerdictOfAsk, answer: int, manner: int) -> Cause:
        """Why a verdict differs from the exact answer."""
        target = verdict.quota.target
        followed, form = target.followed, target.form(manner)
        bucket = followed.bucket
        rank = 0 if answer == 0 else form.rank if answer > 0 else REFUSED
        surplus = self._surplus(ask, verdict, (rank, max(answer, 0)), followed, form)
        if cause := self._causes.of_row(ask) or self._causes.of_bucket(ask, verdict, followed, form, surplus):
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
        exact = _said(rank, max(answer, 0))
        self._note(ask, verdict, _said(verdict.rank, verdict.wait_ms), exact)
        return "other"

    def _surplus(
        self,
        ask: LoggedAsk,
        verdict: VerdictOfAsk,
        exact: tuple[int, int],
        followed: FollowedBucket,
        form: QuotaForm,
    ) -> Surplus:
        """What the bucket of a verdict that is not the exact one must have held before the ask."""
        bucket = followed.bucket
        if isinstance(bucket, Ids):
            return MORE  # also of a milder verdict, as the ids may be known
        if isinstance(bucket, Level):
            return LESS if (verdict.rank, verdict.wait_ms) < exact else MORE
        if verdict.observed is None:
            return UNEXPLAINED
        own = verdict.usage if ask.mode in {"admit", "record"} and ask.rank < THROTTLE else 0.0
        return followed.surplus(form, verdict, bucket.shown(form, ask.at_ms), ask.at_ms, own)

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
        """The log shows another state of a bucket: find the cause, and go on from that state."""
        surplus = followed.surplus(form, verdict, shown, ask.at_ms)
        cause = self._causes.of_row(ask) or self._causes.of_bucket(ask, verdict, followed, form, surplus)
        if cause == "older" and isinstance(followed.bucket, Level) and expected > shown:
            cause = None  # older charges can only take tokens
        if cause is None:
            cause = "other"
            self._note(ask, verdict, f"shows {expected:.12g}", f"shows {shown:.12g}")
        if not causes or cause == "other":
            causes.append(cause)
        followed.begin_doubt(cause, ask.at_ms)
        followed.resume(form, verdict, shown, ask.at_ms)

    def _set_back(self, followed: FollowedBucket, at_ms: int, mode: str) -> None:
        """Follow a clock that was set back by more than a window."""
        if mode not in {"peek", "refund"}:
            followed.bucket.move_to(at_ms)
        followed.begin_doubt("clock", at_ms)

    def _sequential(self, ask: LoggedAsk, manner: int) -> tuple[list[int], int]:
        """The answers where request delays are measured after byte delays, and the delay of the ask."""
        targets = [each.quota.target or self._target(each.quota) for each in ask.verdicts]
        return sequential(
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


def _was_charged(ask: LoggedAsk, verdict: VerdictOfAsk) -> bool:
    """Whether the store charged a bucket for an ask that it decided only in part."""
    in_part = ask.failure == "store_full" or any(each.order is not None for each in ask.verdicts)
    was_asked = verdict.observed is not None and verdict.reason not in {"store_full", "store_failure"}
    return in_part and ask.charged and was_asked and ask.rank < THROTTLE


def _answer_of(verdict: VerdictOfAsk) -> int:
    return REJECT if verdict.rank == REFUSED else verdict.wait_ms


def _said(rank: int, wait_ms: int) -> str:
    return f"{OUTCOMES[rank]} {wait_ms} ms" if wait_ms else OUTCOMES[rank]
