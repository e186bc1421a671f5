"""Runs every bucket's rows, as they stream by in order, through the judge of its algorithm."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Final, Protocol

import pyarrow as pa

from workers.spark.audit.found import SCHEMA, Found
from workers.spark.audit.ids import Ids
from workers.spark.audit.levels import Levels
from workers.spark.buckets import Asked, asked

ROWS_AT_ONCE: Final = 5_000


@dataclass(frozen=True, slots=True)
class Rules:
    """What the deployment decides, as its settings say.

    Attributes:
        judge_from_ms: earlier rows only say how the buckets stood.
        is_whole: no bucket held anything before the log begins.
        log_from_ms: when that is; None if it is not known.
        resets, loads: when buckets were emptied, or something was put into them, as places in the store's
            order, by the bucket's name and the quota.
    """

    max_ids: int = 1_000_000
    sequential: bool = False
    judge_from_ms: int | None = None
    is_whole: bool = True
    resets: Mapping[tuple[str, str], Sequence[int]] = field(default_factory=dict)
    loads: Mapping[tuple[str, str], Sequence[int]] = field(default_factory=dict)
    log_from_ms: int | None = None


class Judge(Protocol):
    """One bucket, row by row."""

    def see(self, row: Asked, found: Found) -> None:
        """Replay one ask, and note what is not as it should be."""

    def reset(self) -> None:
        """Begin anew: the bucket was emptied on purpose."""

    def load(self) -> None:
        """Something was put into the bucket that the log does not tell of."""


def judging(rules: Rules) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For ``mapInArrow`` over ``by_bucket``: the rows of ``found.SCHEMA``; in memory stands one bucket."""

    def judge(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _in_batches(_judged(asked(batches), rules))

    return judge


def _judged(rows: Iterable[Asked], rules: Rules) -> Iterator[dict[str, Any]]:
    for _, mine in groupby(rows, key=lambda row: row.key):
        first = next(mine)
        judge = _judge_of(first, rules)
        events = _events(rules, first)
        found, before = Found(first.quota, first.bucket), Found(first.quota, first.bucket)
        before_this = -1
        for row in chain((first,), mine):
            while events and events[0][0] < row.order:
                events.popleft()[1](judge)
            if rules.judge_from_ms is None or row.at_ms >= rules.judge_from_ms:
                judge.see(row, found)
                if row.order == before_this:
                    found.of(row).same_order += 1
                    found.note("same_order", row, "the only row in its place of the store's order")
            else:
                judge.see(row, before)
                before.forget()
            before_this = row.order
            if found.is_large:
                yield from found.taken()
        yield from found.taken()


def _events(rules: Rules, row: Asked) -> deque[tuple[int, Callable[[Judge], None]]]:
    """What happened to a bucket beside its asks, in order."""
    bucket = (row.bucket, row.quota)
    resets = [(order, _reset) for order in rules.resets.get(bucket, ())]
    loads = [(order, _load) for order in rules.loads.get(bucket, ())]
    return deque(sorted([*resets, *loads], key=itemgetter(0)))


def _reset(judge: Judge) -> None:
    judge.reset()


def _load(judge: Judge) -> None:
    judge.load()


def _judge_of(row: Asked, rules: Rules) -> Judge:
    if row.algorithm == "producer_ids":
        return Ids(rules.max_ids, -math.inf if rules.is_whole else rules.log_from_ms)
    return Levels(rules.sequential, rules.is_whole)


def _in_batches(rows: Iterable[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    gathered: list[dict[str, Any]] = []
    for row in rows:
        gathered.append(row)
        if len(gathered) >= ROWS_AT_ONCE:
            yield pa.RecordBatch.from_pylist(gathered, SCHEMA)
            gathered = []
    if gathered:
        yield pa.RecordBatch.from_pylist(gathered, SCHEMA)
