"""The audit's sieve: confirms buckets that are exactly as logged, about ten times faster than the judge.

An honest log is the normal case, and needs no explanation. A kernel for each algorithm replays one bucket
over plain columns, and stops at the first row that is not exactly as logged, or is rare. Such a bucket goes
whole to the judge (``workers.jobs.audit.judge``), which explains it.

The kernels repeat arithmetic of ``app.domain`` on purpose, in the same order of operations, since its objects
would cost most of the time. Searches and rare cases still call it. ``tests/jobs/test_sieve.py`` holds the
kernels to the judge: over honest buckets and injected faults, *confirmed* implies that the judge finds
nothing, counts the same, and leaves the same state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import reduce
from itertools import chain
from math import isclose, isfinite, isinf
from operator import add, itemgetter
from typing import Any, Final, NamedTuple

from app.domain import sampled_rate, token_bucket
from app.domain.decision import REQUEST_RATES
from app.domain.exact_ids import ExactIds
from app.domain.quota import CONNECTION_CREATION_RATE, MAX_THROTTLE_MS, RECHECK_MS, Quota
from app.domain.sampled_rate import Sample
from app.domain.shape import LAYERS
from app.domain.token_bucket import Tokens
from workers.jobs.audit.bucket_findings import BucketTally
from workers.jobs.audit.ids import UNNOTICED_MS, IdsJudge
from workers.jobs.audit.judge import AuditRules, BucketJudge, judge_of
from workers.jobs.audit.levels import MODES, LevelJudge
from workers.jobs.audit.uncertain_rate import EQUAL
from workers.jobs.verdicts import DIGEST_BYTES

Exact = tuple[str, int, str | None]
"""The exact outcome, wait in ms, and reason."""

_MANY: Final = 4_096
"""Charges that have left the window are dropped once there are so many."""

NEVER: Final = -(1 << 62)
"""A time before any other."""


class BucketColumns(NamedTuple):
    """The rows of one bucket in the store's order, as lists of equal length; the names are ``BucketRow``'s.

    Attributes:
        principal: any hashable values.
        applied: for each row, the place of its quota in a sequence.
    """

    order: list[int]
    at_ms: list[int]
    principal: list[Any]
    mode: list[str]
    recheck: list[bool]
    is_refused: list[bool]
    byte_delay_ms: list[int]
    ids: list[list[int] | None]
    usage: list[float]
    outcome: list[str]
    throttle_ms: list[int]
    observed: list[float | None]
    remaining: list[float | None]
    reason: list[str | None]
    correction: list[int]
    charged_ids: list[list[int] | None]
    refreshed_ids: list[list[int] | None]
    how: list[str]
    applied: list[int]


Pieces = Iterator[BucketColumns]


class _Tallies(dict[Hashable, BucketTally]):
    """The tallies by principal; rows of the lead-in share one that is not reported."""

    def __init__(self, judge_from_ms: int | None) -> None:
        self.from_ms = NEVER if judge_from_ms is None else judge_from_ms
        self.rows = 0
        self._lead_in = BucketTally()

    def of(self, principal: Hashable, at_ms: int) -> BucketTally:
        if at_ms < self.from_ms:
            return self._lead_in
        tally = self.get(principal)
        if tally is None:
            tally = self[principal] = BucketTally()
        return tally

    def count(self, rows: BucketColumns) -> None:
        """Count every verdict as judged, in addition to the kernel's counts."""
        self.rows += len(rows.order)
        pairs = zip(rows.principal, rows.at_ms, strict=True)
        counted = Counter(principal for principal, at_ms in pairs if at_ms >= self.from_ms)
        for principal, verdicts in counted.items():
            tally = self.of(principal, self.from_ms)
            tally.verdicts, tally.judged = tally.verdicts + verdicts, tally.judged + verdicts


class _OddError(Exception):
    """Rows that the kernels do not replay."""


def confirm(
    pieces: Iterable[BucketColumns],
    quotas: Sequence[Quota],
    rules: AuditRules,
    judge: BucketJudge | None = None,
) -> dict[Any, BucketTally] | None:
    """The judge's tallies by principal if the bucket is exactly as logged; None if the judge must decide.

    The caller hands a bucket that was reset or loaded to the judge: its name is not in the rows.

    Args:
        pieces: the rows of the bucket, in any number of pieces: a large bucket need not fit in memory.
        quotas: quotas as rows describe them (``BucketRow.as_quota``); quotas of other buckets are ignored.
        judge: has the state before these rows; by default an empty bucket's. Afterwards it has the
            state that the judge itself would leave, except for ``LevelJudge.before`` and ``written``, which
            only explain losses; after None it is of no use.
    """
    some = iter(pieces)
    if (first := next(some, None)) is None:
        return {}
    tallies = _Tallies(rules.judge_from_ms)
    checked = _checked(chain((first,), some), quotas, tallies)
    try:
        quota = quotas[first.applied[0]]
        kernel = _KERNELS.get(quota.algorithm)
        judge = judge or judge_of(quota.algorithm, rules)
        is_confirmed = kernel is not None and kernel(checked, quota, quotas, judge, tallies)
    except _OddError:
        return None
    return dict(tallies) if is_confirmed else None


def _checked(
    pieces: Iterable[BucketColumns], quotas: Sequence[Quota], tallies: _Tallies
) -> Iterator[BucketColumns]:
    """The pieces, each after it was counted.

    Raises:
        _OddError: rows are corrected, out of order, of an unknown mode, or under a quota of another kind.
    """
    last, kinds, known = -1, set(), set[int]()
    for rows in pieces:
        for place in set(rows.applied) - known:
            known.add(place)
            kinds.add(_kind(quotas[place]))
        in_order = _in_order(rows, last)
        if len(kinds) > 1 or any(rows.correction) or not in_order or not _KNOWN_MODES.issuperset(rows.mode):
            raise _OddError
        last = rows.order[-1]
        tallies.count(rows)
        yield rows


def _kind(quota: Quota) -> tuple[Any, ...]:
    """The fields of a quota that do not change while the kernels replay its bucket."""
    if quota.algorithm == "producer_ids":
        return quota.key, quota.identity, quota.layers, quota.window_ms
    return quota.key, quota.identity, _measured_samples(quota), quota.sample_ms


def _in_order(rows: BucketColumns, last: int) -> bool:
    """Whether each row has its own place after the last one; only answers of nodes alone may share one."""
    places = zip([last, *rows.order], rows.order, rows.how, strict=False)
    return all(before < after or (before == after and how == "alone") for before, after, how in places)


def _confirms_rate(
    pieces: Pieces, quota: Quota, quotas: Sequence[Quota], judge: BucketJudge, tallies: _Tallies
) -> bool:
    """Replay a sampled rate: the live samples, and ``older``, the sum of all but the newest.

    Expired samples are ``gone``; the bucket itself drops them when a sample begins.
    """
    if not isinstance(judge, LevelJudge) or not _is_plain(judge):
        return False
    samples, sample_ms = _measured_samples(quota), quota.sample_ms
    life_ms, span_s = samples * sample_ms, (samples - 1) * sample_ms / 1000
    kept_ms = sampled_rate.kept_samples(quota.samples) * sample_ms
    state: sampled_rate.Samples = judge.state or ()  # type: ignore[assignment]  # of a rate
    values, starts, lasts = (list(map(itemgetter(place), state)) for place in range(3))
    gone: list[Sample] = []
    older, admitted = _total(values[:-1]), judge.admitted
    newest_ms, current = lasts[-1] if lasts else NEVER, -1
    for (
        at_ms, principal, mode, recheck, is_refused, later_ms, usage,
        outcome, throttle_ms, observed, remaining, reason, place,
    ) in _levels(pieces):  # fmt: skip
        if place != current:
            current, quota = place, quotas[place]
            limit, is_deny, is_bound, longest_ms, most_ms, adds_delays = _facts(
                quota, sequential=judge.sequential
            )
        if at_ms < newest_ms:
            return False
        newest_ms = at_ms
        while lasts and at_ms - lasts[0] >= life_ms:
            gone.append(Sample(values.pop(0), starts.pop(0), lasts.pop(0)))
            older = _total(values[:-1])
        if lasts:
            newest, elapsed_ms, is_young = values[-1], at_ms - starts[0], at_ms - starts[-1] < sample_ms
        else:
            newest, elapsed_ms, is_young = 0.0, 0, False
        missing = samples - 1 - elapsed_ms // sample_ms
        window_ms = max(elapsed_ms + missing * sample_ms if missing > 0 else elapsed_ms, 1)
        window_s = window_ms / 1000
        with_usage = older + (newest + usage) if is_young else older + newest + usage
        exact = _ADMIT
        if mode == "refund":
            pass
        elif limit == 0 and usage > 0:
            exact = ("delay", longest_ms, None) if mode == "record" else _TOO_LARGE
        elif not is_deny:
            rate, over_ms = with_usage / window_s, window_ms
            if adds_delays and later_ms:
                then = sampled_rate.record(_state(values, starts, lasts), usage, at_ms, samples, sample_ms)
                rate, over_ms = sampled_rate.measure(then, at_ms + later_ms, samples, sample_ms)
            if rate > limit:
                exact = "delay", sampled_rate.delay_ms(rate, limit, over_ms, longest_ms), None
        elif usage and usage / span_s > limit:
            exact = _TOO_LARGE
        elif usage and with_usage / window_s > limit:
            state = _state(values, starts, lasts)
            wait_ms = sampled_rate.wait_ms(state, usage, at_ms, limit, samples, sample_ms)
            exact = (
                _REJECT if recheck and most_ms == RECHECK_MS else ("throttle", min(wait_ms, most_ms), None)
            )
        if exact != (outcome, throttle_ms, reason):
            return False
        if mode == "refund":
            state = sampled_rate.refund((*gone, *_state(values, starts, lasts)), usage)
            values = [sample.value for sample in state[len(gone) :]]
            gone = list(state[: len(gone)])
            older, used = _total(values[:-1]), _total(values)
            admitted.refund(usage)
        elif is_refused or mode == "peek":
            used = older + newest
        else:
            used = with_usage
            if is_young:
                values[-1], lasts[-1] = newest + usage, at_ms
            else:
                older += newest
                if gone:
                    gone = [sample for sample in gone if at_ms - sample.last_ms < kept_ms]
                values.append(float(usage))
                starts.append(at_ms)
                lasts.append(at_ms)
            if is_bound and mode == "admit":
                admitted.add(quota, usage, at_ms, tallies.of(principal, at_ms))
        if _differ(used / window_s, limit * window_s - used, observed, remaining):
            return False
    judge.state = (*gone, *_state(values, starts, lasts))
    judge.rows += tallies.rows
    return True


def _confirms_tokens(
    pieces: Pieces, quota: Quota, quotas: Sequence[Quota], judge: BucketJudge, tallies: _Tallies
) -> bool:
    """Replay a token bucket: the tokens at the last write, and the ``level`` that they are refilled to."""
    if not isinstance(judge, LevelJudge) or not _is_plain(judge):
        return False
    tokens, written_ms = judge.state if isinstance(judge.state, Tokens) else (0.0, NEVER)
    newest_ms, current, admitted = written_ms, -1, judge.admitted
    for (
        at_ms, principal, mode, recheck, is_refused, later_ms, usage,
        outcome, throttle_ms, observed, remaining, reason, place,
    ) in _levels(pieces):  # fmt: skip
        if place != current:
            current, quota = place, quotas[place]
            limit, is_deny, is_bound, longest_ms, most_ms, adds_delays = _facts(
                quota, sequential=judge.sequential
            )
            burst, deepest = quota.burst, -quota.max_debt
        if at_ms < newest_ms:
            return False
        newest_ms, is_absent = at_ms, written_ms == NEVER
        level = burst if is_absent else min(burst, tokens + limit * ((at_ms - written_ms) / 1000))
        is_forgiven = level < deepest
        if is_forgiven:
            level = deepest
        spent = max(level - usage, deepest)
        exact = _ADMIT
        if mode == "refund":
            pass
        elif limit == 0 and usage > 0:
            exact = ("delay", longest_ms, None) if mode == "record" else _TOO_LARGE
        elif not is_deny:
            then = min(burst, spent + limit * ((later_ms if adds_delays else 0) / 1000))
            if then < 0:
                exact = "delay", token_bucket.delay_ms(then, limit, longest_ms), None
        elif usage > burst:
            exact = _TOO_LARGE
        elif usage and level < usage:
            exact = _REJECT
            if not recheck or most_ms != RECHECK_MS:
                # tokens only grow: the least wait is enough, and one of 1 ms less is not
                then, then_ms = (level, at_ms) if is_forgiven else (tokens, written_ms)
                is_enough, was_enough = (
                    min(burst, then + limit * ((at_ms + wait_ms - then_ms) / 1000)) >= usage
                    for wait_ms in (throttle_ms, throttle_ms - 1)
                )
                if not 1 <= throttle_ms <= most_ms or not (is_enough or throttle_ms == most_ms):
                    return False
                if was_enough and throttle_ms > 1:
                    return False
                exact = "throttle", throttle_ms, None
        if exact != (outcome, throttle_ms, reason):
            return False
        if mode != "peek":
            is_charged = mode != "refund" and not is_refused
            if is_charged:
                tokens, written_ms = spent, at_ms
                level = min(burst, spent)
            elif is_forgiven:
                tokens, written_ms = level, at_ms
            if mode == "refund":
                if not is_absent:
                    tokens = min(burst, tokens + usage)
                    level = max(min(burst, tokens + limit * ((at_ms - written_ms) / 1000)), deepest)
                admitted.refund(usage)
            elif is_charged and is_bound and mode == "admit":
                admitted.add(quota, usage, at_ms, tallies.of(principal, at_ms))
        if _differ(burst - level, level, observed, remaining):
            return False
    judge.state = None if written_ms == NEVER else Tokens(tokens, written_ms)
    judge.rows += tallies.rows
    return True


def _is_plain(judge: LevelJudge) -> bool:
    """Whether a level is known exactly, and nothing about it is rare."""
    return judge.uncertain is None and not (judge.is_loaded or judge.is_rounded or judge.holds)


def _confirms_ids(
    pieces: Pieces, quota: Quota, quotas: Sequence[Quota], judge: BucketJudge, tallies: _Tallies
) -> bool:
    """Replay a bucket of ids: for each id the start of its layer (``held``), and the times of the charges."""
    if not isinstance(judge, IdsJudge) or not _has_known_ids(judge, quota):
        return False
    interval_ms, ttl_ms, max_ids = quota.layers.interval_ms, quota.layers.ttl_ms, judge.max_ids
    window_ms = quota.window_ms
    if not interval_ms <= ttl_ms <= LAYERS * interval_ms:
        return False
    held = {
        int.from_bytes(each, "big", signed=True): judge.exact.layers[number]
        for number, ids in judge.exact.held.items()
        for each in ids
        if number in judge.exact.layers
    }
    charges = judge.exact.charges[judge.exact.dead :]
    dead, admitted, added = 0, judge.admitted, (BucketTally(), -1)
    open_ms = max(judge.exact.layers.values(), default=NEVER)
    changed_ms = NEVER if judge.exact.newest_ms is None else judge.exact.newest_ms
    newest_ms = NEVER if judge.layers is None else max(changed_ms, NEVER + 1)
    wrote_ms = NEVER if isinf(judge.wrote_ms) else int(judge.wrote_ms)
    for (
        at_ms, principal, mode, is_refused, asked, outcome, throttle_ms, observed, reason,
        charged_ids, refreshed_ids, how, place,
    ) in _ids(pieces):  # fmt: skip
        ids = asked or ()
        if how == "alone":
            # a node may not have noticed the writes of the last second
            now_ms, is_late = max(at_ms, changed_ms), at_ms < changed_ms - UNNOTICED_MS or newest_ms == NEVER
            starts = [held.get(each, NEVER) for each in ids]
            unseen = sum(now_ms - start >= ttl_ms for start in starts)
            if len(held) + unseen > max_ids:
                return False
            if is_refused:
                exact = _ids_verdict(quotas[place], mode, unseen, charges, now_ms, at_ms, max_ids)
                is_right = exact == (outcome, throttle_ms, reason)
                is_wrong = at_ms - wrote_ms >= UNNOTICED_MS
            else:
                is_right = not unseen
                is_wrong = any(now_ms - UNNOTICED_MS - start >= ttl_ms for start in starts)
            if is_late or not is_right:
                if is_wrong and not is_late:
                    return False
                tally = tallies.of(principal, at_ms)
                tally.judged, tally.unjudged = tally.judged - 1, tally.unjudged + 1
            continue
        if at_ms < newest_ms:
            return False
        newest_ms = at_ms
        is_open = at_ms - open_ms < interval_ms
        written = [each for each in ids if held.get(each) != open_ms] if is_open else ids
        new = [each for each in written if at_ms - held.get(each, NEVER) >= ttl_ms] if written else ()
        tally = tallies.of(principal, at_ms)
        if how == "renewal":
            if new:  # a node may not have noticed for a second that its ids are no longer known
                if any(at_ms - UNNOTICED_MS - held.get(each, NEVER) >= ttl_ms for each in new):
                    return False
                tally.judged, tally.unjudged = tally.judged - 1, tally.unjudged + 1
            wrote_ms = at_ms
        else:
            unseen, said = len(new), len(charged_ids or ())
            dead = bisect_right(charges, at_ms - window_ms, dead)
            if dead > _MANY:
                del charges[:dead]
                dead = 0
            charged = len(charges) - dead
            if observed is not None and round(observed) != charged + said:
                return False
            exact = _ADMIT
            if unseen:
                if max(len(held), charged) + unseen > max_ids:
                    return False
                exact = _ids_verdict(quotas[place], mode, unseen, charges, at_ms, at_ms, max_ids)
            if exact != (outcome, throttle_ms, reason):
                return False
            if is_refused or mode == "peek":
                if said or (refreshed_ids and not set(new).isdisjoint(refreshed_ids)):
                    return False
            elif unseen or said:
                fresh = set(new)
                if not len(fresh) == unseen == said or fresh != set(charged_ids or ()):
                    return False
            if mode == "peek":
                continue
            tally.lookups += unseen
            tally.charged_ids += said
            if refreshed_ids or not is_refused:
                wrote_ms = at_ms
            if is_refused:
                written = [each for each in written if each not in new]
            elif len(written) > unseen:
                stale = set(written).difference(new)
                if not stale.issubset(refreshed_ids or ()):
                    return False  # the open layer began at another time
            if not is_refused and said:
                charges.extend([at_ms] * said)
                changed_ms = at_ms
            is_added = mode == "admit" and not is_refused and not quotas[place].shadow
            # without new ids the sum cannot grow, so only another tally or quota is compared with it
            if is_added and (said or tally is not added[0] or place != added[1]):
                admitted.add(quotas[place], said, at_ms, tally)
                added = tally, place
        if written:
            if not is_open:
                held = {each: start for each, start in held.items() if at_ms - start < ttl_ms}
                open_ms = changed_ms = at_ms
            held.update(dict.fromkeys(written, open_ms))
    if newest_ms != NEVER:
        judge.layers, judge.held = quota.layers, None
        judge.exact = _exact_ids(held, charges, open_ms)
    if wrote_ms != NEVER:
        last_ms = charges[-1] if charges else NEVER
        judge.wrote_ms, judge.under = wrote_ms, quota
        judge.lasts_ms = max(open_ms + ttl_ms, last_ms + window_ms)
    return True


def _has_known_ids(judge: IdsJudge, quota: Quota) -> bool:
    """Whether the ids of a bucket are known exactly, under this quota, and nothing about it is rare."""
    if judge.is_loaded or judge.is_reset or judge.vague or not isinf(judge.noticed_ms):
        return False
    if judge.layers is None:
        return judge.log_from_ms is not None and isinf(judge.log_from_ms)
    same = (quota.layers, quota.window_ms)
    is_same = judge.under is None or (judge.under.layers, judge.under.window_ms) == same
    return is_same and judge.held is None and judge.layers == quota.layers


def _exact_ids(held: dict[int, int], charges: list[int], open_ms: int) -> ExactIds:
    """The ids by their layers."""
    starts = sorted({*held.values(), open_ms} - {NEVER})
    number = {start: place for place, start in enumerate(starts, 1)}
    of_layer: dict[int, set[bytes]] = {}
    for each, start in held.items():
        of_layer.setdefault(number[start], set()).add(each.to_bytes(DIGEST_BYTES, "big", signed=True))
    return ExactIds({place: start for start, place in number.items()}, charges=charges, held=of_layer)


def _ids_verdict(
    quota: Quota, mode: str, unseen: int, charges: list[int], now_ms: int, from_ms: int, max_ids: int
) -> Exact:
    """The exact outcome, wait and reason for a number of unseen ids that the bucket has room for.

    Args:
        charges: the times of charges; the first of them may have left the window.
        from_ms: the time from which the wait counts.
    """
    limit, window_ms = quota.limit, quota.window_ms
    charged = len(charges) - bisect_right(charges, now_ms - window_ms)
    if not unseen:
        return _ADMIT
    if mode == "record":
        if limit == 0:
            return "delay", window_ms, None
        if charged + unseen <= limit:
            return _ADMIT
        leaving = [*charges, *[now_ms] * unseen][-int(limit)]
        return "delay", min(leaving + window_ms - from_ms, MAX_THROTTLE_MS), None
    if unseen > min(limit, max_ids):
        return _TOO_LARGE
    if charged + unseen <= limit:
        return _ADMIT
    leaving = charges[len(charges) + unseen - int(limit) - 1]
    return "throttle", min(leaving + window_ms - from_ms, MAX_THROTTLE_MS), None


def _facts(quota: Quota, *, sequential: bool) -> tuple[float, bool, bool, int, int, bool]:
    """Facts about a quota for the replay of its levels.

    Returns:
        The limit; whether it denies; whether its admitted amounts are bounded; its longest delay and longest
        wait in ms; and whether its delays are measured after byte delays.
    """
    return (
        quota.limit,
        quota.enforcement == "deny",
        quota.bound[0] is not None,
        quota.longest_delay_ms,
        RECHECK_MS if quota.key == CONNECTION_CREATION_RATE else MAX_THROTTLE_MS,
        sequential and quota.key in REQUEST_RATES,
    )


def _measured_samples(quota: Quota) -> int:
    """The number of samples to measure over: deny decides one sample as two."""
    return max(quota.samples, 2) if quota.enforcement == "deny" else quota.samples


def _levels(pieces: Pieces) -> Iterator[tuple[Any, ...]]:
    """The values of each row by which a rate or a token bucket is replayed."""

    def each(rows: BucketColumns) -> Iterator[tuple[Any, ...]]:
        if any(rows.how) or min(rows.usage) < 0 or not isfinite(sum(rows.usage)):
            raise _OddError
        return zip(
            rows.at_ms, rows.principal, rows.mode, rows.recheck, rows.is_refused, rows.byte_delay_ms,
            rows.usage, rows.outcome, rows.throttle_ms, rows.observed, rows.remaining, rows.reason,
            rows.applied, strict=True,
        )  # fmt: skip

    return chain.from_iterable(map(each, pieces))


def _ids(pieces: Pieces) -> Iterator[tuple[Any, ...]]:
    """The values of each row by which a bucket of ids is replayed."""

    def each(rows: BucketColumns) -> Iterator[tuple[Any, ...]]:
        if "refund" in rows.mode or not _HOWS_OF_IDS.issuperset(rows.how):
            raise _OddError
        return zip(
            rows.at_ms, rows.principal, rows.mode, rows.is_refused, rows.ids, rows.outcome,
            rows.throttle_ms, rows.observed, rows.reason, rows.charged_ids, rows.refreshed_ids, rows.how,
            rows.applied, strict=True,
        )  # fmt: skip

    return chain.from_iterable(map(each, pieces))


def _differ(used: float, left: float, observed: float | None, remaining: float | None) -> bool:
    """Whether the bucket showed other numbers than these."""
    if (used == observed and left == remaining) or observed is None or remaining is None:
        return False
    is_close = isclose(used, observed, rel_tol=EQUAL, abs_tol=EQUAL)
    return not (is_close and isclose(left, remaining, rel_tol=EQUAL, abs_tol=EQUAL))


def _state(values: list[float], starts: list[int], lasts: list[int]) -> sampled_rate.Samples:
    return tuple(map(Sample, values, starts, lasts))


def _total(values: list[float]) -> float:
    """The plain sum, oldest first: ``sum`` adds more exactly from Python 3.12 on."""
    return reduce(add, values, 0.0)


_ADMIT: Final[Exact] = ("admit", 0, None)
_REJECT: Final[Exact] = ("reject", 0, None)
_TOO_LARGE: Final[Exact] = ("reject", 0, "too_large")
_KNOWN_MODES: Final = frozenset(MODES)
_HOWS_OF_IDS: Final = frozenset(("", "alone", "renewal"))
_KERNELS: Final[dict[str, Callable[[Pieces, Quota, Sequence[Quota], BucketJudge, _Tallies], bool]]] = {
    "sampled_rate": _confirms_rate,
    "token_bucket": _confirms_tokens,
    "producer_ids": _confirms_ids,
}
"""Each returns whether the bucket is exactly as logged, and then has counted all but the verdicts."""
