"""A history from another system: each use of a producer id by a principal, in Parquet or JSON.

The content of the producer-id buckets follows from it: a use charges an id that no layer holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple

import mmh3
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from app.domain.ask import NO_PRODUCER_ID
from app.domain.assertion import Assertion
from app.domain.digest import as_id, digest
from app.domain.entity import Entity
from app.domain.quota import PRODUCER_IDS_RATE, Layers, Quota
from workers.jobs.backfill.assertions import Asserted, States, asserted, partitions_for
from workers.jobs.backfill.bucket_state import IdsState
from workers.jobs.backfill.history_files import HistoryFiles
from workers.jobs.backfill.json_history import JsonTask, json_tasks
from workers.jobs.backfill.parquet_history import ParquetTask, parquet_tasks
from workers.jobs.backfill.uses import SCHEMA, HistoryColumns
from workers.jobs.errors import JobError
from workers.jobs.period import Period
from workers.jobs.runner import Runner
from workers.jobs.verdicts import integers, placed

CHARGES: Final = 1_000_000
"""The limit of the replayed quota. It decides nothing: every use in a history is accepted."""

READ, REPLAY = 60.0, 40.0
"""The shares of both stages in the time of the job, in per cent."""

ROWS_AT_ONCE: Final = 16_384
"""How many uses are in memory as Python's values at a time."""


class HistoryRules(NamedTuple):
    """How a history is read: the names of its columns, the period, and the number of partitions."""

    columns: HistoryColumns
    period: Period
    partitions: int


class HistoryReplay(NamedTuple):
    """How a history is replayed.

    Attributes:
        secret: the deployment's, by which ids are hashed.
    """

    at_ms: int
    window_ms: int
    layers: Layers
    max_ids: int
    secret: bytes


@dataclass(frozen=True, slots=True)
class History:
    """A foreign history.

    Attributes:
        name: its URL without secrets.
        tasks: its parts.
        secret: the deployment's, by which ids are hashed.
    """

    name: str
    tasks: Sequence[ParquetTask | JsonTask]
    columns: HistoryColumns
    period: Period
    window_ms: int
    layers: Layers
    secret: bytes

    @property
    def rows(self) -> int:
        """The approximate number of uses in the history."""
        return sum(task.rows for task in self.tasks)

    def states(self, runner: Runner, at_ms: int | None, max_ids: int) -> States:
        """The content of the producer-id buckets at ``at_ms``; if it is None, at the time of the last use.

        Raises:
            JobError: a file or a value is invalid, or no use is in the period.
        """
        rules = HistoryRules(self.columns, self.period, partitions_for(self.rows))
        lasts, uses = runner.scatter(partial(read, rules), self.tasks, READ)
        last_ms = max((last for last in lasts if last is not None), default=None)
        if last_ms is None:
            raise JobError(f"{self.name}: no row in the period {self.period}")
        as_of_ms = last_ms if at_ms is None else at_ms
        replaying = HistoryReplay(as_of_ms, self.window_ms, self.layers, max_ids, self.secret)
        return States(as_of_ms, True, uses.gather(partial(replay, replaying), REPLAY))


def history_tasks(url: str, kind: str, columns: HistoryColumns) -> tuple[str, list[ParquetTask | JsonTask]]:
    """The name of a history, and its parts, after each file's format was checked.

    Args:
        kind: ``parquet`` or ``json``.

    Raises:
        JobError: there is no file, or a file has another format, or lacks a column; the message names it.
    """
    files = HistoryFiles(url)
    tasks_of: Callable[..., Sequence[ParquetTask | JsonTask]] = (
        json_tasks if kind == "json" else parquet_tasks
    )
    found = [task for _, some in files.each(partial(tasks_of, columns=columns)) for task in some]
    if kind == "json" and not found:
        raise JobError(f"{files.name}: is empty: a history has at least one use")
    return files.name, found


def read(rules: HistoryRules, task: ParquetTask | JsonTask) -> tuple[int | None, list[pa.Table]]:
    """The time of the last use of a task, and its uses by partition: all of a principal's are in one.

    Raises:
        JobError: the file or a value is invalid; the message names the file, the field and the row.
    """
    tables = [uses.table(task.file.name, rules.columns, rules.period) for uses in task.uses()]
    found = pa.concat_tables([SCHEMA.empty_table(), *tables]).combine_chunks()
    return pc.max(found.column("at_ms")).as_py(), _by_principal(found, rules.partitions)


def _by_principal(uses: pa.Table, partitions: int) -> list[pa.Table]:
    """The uses of each partition; all uses of one principal are in one of them."""
    if partitions == 1:
        return [uses]
    principal = uses.column("principal").combine_chunks().dictionary_encode()
    homes = [mmh3.hash(name, signed=False) % partitions for name in principal.dictionary.to_pylist()]
    home = np.array(homes, np.int64)[integers(principal.indices)]
    return placed(uses, home, partitions)


def replay(rules: HistoryReplay, pieces: Iterable[pa.Table]) -> Asserted:
    """The content of the buckets of a partition's principals."""
    return asserted(_assertions(rules, pa.concat_tables([SCHEMA.empty_table(), *pieces])))


def _assertions(rules: HistoryReplay, uses: pa.Table) -> Iterator[Assertion]:
    quota = Quota(
        PRODUCER_IDS_RATE, CHARGES, "producer_ids", "deny", window_ms=rules.window_ms, layers=rules.layers
    )
    ordered = uses.sort_by([(name, "ascending") for name in ("principal", "at_ms", "id")])
    rows = (
        row
        for batch in ordered.to_batches(ROWS_AT_ONCE)
        for row in zip(
            *(batch.column(name).to_pylist() for name in ("principal", "id", "at_ms")), strict=True
        )
    )
    for principal, group in groupby(rows, key=itemgetter(0)):
        state = IdsState((PRODUCER_IDS_RATE, str(Entity.of(user=principal)), None), rules.max_ids)
        for _, id_, used_ms in group:
            if (number := as_id(id_)) != NO_PRODUCER_ID:
                state.use(digest(rules.secret, principal, number), used_ms, quota)
        yield from state.assertions(rules.at_ms)
