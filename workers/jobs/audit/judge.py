"""Runs each bucket's rows, in the store's order, through the judge for its algorithm."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter

from workers.jobs.audit.bucket_findings import BucketFindings
from workers.jobs.audit.ids import IdsJudge
from workers.jobs.audit.levels import LevelJudge
from workers.jobs.verdicts import BucketRow


@dataclass(frozen=True, slots=True)
class AuditRules:
    """The settings and events by which buckets are judged.

    Attributes:
        sequential: request delays are measured after byte delays (``QUOTAGATE_COMBINE_DELAYS``).
        judge_from_ms: rows before this time are replayed, but not judged.
        is_whole: no bucket held anything before the log begins.
        resets, loads: when buckets were reset or loaded, as places in the store's order, by bucket and quota.
        log_from_ms: when the log begins, if it has rows of the store.
    """

    max_ids: int = 1_000_000
    sequential: bool = False
    judge_from_ms: int | None = None
    is_whole: bool = True
    resets: Mapping[tuple[str, str], Sequence[int]] = field(default_factory=dict)
    loads: Mapping[tuple[str, str], Sequence[int]] = field(default_factory=dict)
    log_from_ms: int | None = None


BucketJudge = IdsJudge | LevelJudge


@dataclass(slots=True)
class Replay:
    """How far the replay of one bucket has come.

    Attributes:
        judge: the bucket's judge, after the rows so far; None before the first row.
        last_order: the place of the last row in the store's order.
        events: how many resets and loads of the bucket came before that row.
        noted: how many cases of each kind were noted.
    """

    judge: BucketJudge | None = None
    last_order: int = -1
    events: int = 0
    noted: dict[str, int] = field(default_factory=dict)


def judged(
    rows: Iterable[BucketRow], rules: AuditRules, so_far: Replay | None = None
) -> Iterator[dict[str, object]]:
    """The findings in one bucket, from its rows in the store's order; there is at least one row.

    Args:
        so_far: the replay of earlier rows, which goes on.
    """
    each = iter(rows)
    first = next(each)
    replay = so_far or Replay()
    judge = replay.judge = replay.judge or judge_of(first.algorithm, rules)
    events = deque(_events(rules, first, judge)[replay.events :])
    found, lead_in = BucketFindings(first.quota, first.bucket), BucketFindings(first.quota, first.bucket)
    found.noted.update(replay.noted)
    for row in chain((first,), each):
        while events and events[0][0] < row.order:
            replay.events += 1
            events.popleft()[1]()
        if rules.judge_from_ms is None or row.at_ms >= rules.judge_from_ms:
            judge.judge(row, found)
            if row.order == replay.last_order and row.how != "alone":
                found.of(row).same_order += 1
                found.note("same_order", row, "the only row in its place of the store's order")
        else:
            judge.judge(row, lead_in)
            lead_in.clear()
        replay.last_order = row.order
        if found.is_large:
            yield from found.flush()
    replay.noted = dict(found.noted)
    yield from found.flush()


def events_before(rules: AuditRules, quota: str, bucket: str, order: int) -> int:
    """How many resets and loads of a bucket come before a place in the store's order."""
    name = bucket, quota
    return sum(each < order for orders in (rules.resets, rules.loads) for each in orders.get(name, ()))


def _events(rules: AuditRules, row: BucketRow, judge: BucketJudge) -> list[tuple[int, Callable[[], None]]]:
    """The resets and loads of a bucket, in order."""
    events = ((rules.resets, judge.reset), (rules.loads, judge.load))
    bucket = (row.bucket, row.quota)
    placed = [(order, happen) for orders, happen in events for order in orders.get(bucket, ())]
    return sorted(placed, key=itemgetter(0))


def judge_of(algorithm: str, rules: AuditRules) -> BucketJudge:
    """The judge of a bucket before its first row."""
    if algorithm == "producer_ids":
        return IdsJudge(rules.max_ids, -math.inf if rules.is_whole else rules.log_from_ms)
    return LevelJudge(rules.sequential, rules.is_whole)
