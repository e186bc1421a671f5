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


def judged(rows: Iterable[BucketRow], rules: AuditRules) -> Iterator[dict[str, object]]:
    """The findings in one bucket, from its rows in the store's order; there is at least one row."""
    each = iter(rows)
    first = next(each)
    judge = _judge_of(first, rules)
    events = _events(rules, first, judge)
    found, lead_in = BucketFindings(first.quota, first.bucket), BucketFindings(first.quota, first.bucket)
    last_order = -1
    for row in chain((first,), each):
        while events and events[0][0] < row.order:
            events.popleft()[1]()
        if rules.judge_from_ms is None or row.at_ms >= rules.judge_from_ms:
            judge.judge(row, found)
            if row.order == last_order and row.how != "alone":
                found.of(row).same_order += 1
                found.note("same_order", row, "the only row in its place of the store's order")
        else:
            judge.judge(row, lead_in)
            lead_in.clear()
        last_order = row.order
        if found.is_large:
            yield from found.flush()
    yield from found.flush()


def _events(rules: AuditRules, row: BucketRow, judge: BucketJudge) -> deque[tuple[int, Callable[[], None]]]:
    """The resets and loads of a bucket, in order."""
    events = ((rules.resets, judge.reset), (rules.loads, judge.load))
    bucket = (row.bucket, row.quota)
    placed = [(order, happen) for orders, happen in events for order in orders.get(bucket, ())]
    return deque(sorted(placed, key=itemgetter(0)))


def _judge_of(row: BucketRow, rules: AuditRules) -> BucketJudge:
    if row.algorithm == "producer_ids":
        return IdsJudge(rules.max_ids, -math.inf if rules.is_whole else rules.log_from_ms)
    return LevelJudge(rules.sequential, rules.is_whole)
