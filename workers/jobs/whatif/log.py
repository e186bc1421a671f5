"""The log of a period, as replays read it: with hours before that fill the buckets, each row once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

from app.domain.ladder import Quotas
from workers.decision_log.schema import HOUR_MS
from workers.jobs import batches
from workers.jobs.errors import JobError, JobUsageError
from workers.jobs.files import LogPart, location_of
from workers.jobs.period import Period, partial_log
from workers.jobs.progress import Progress
from workers.jobs.runner import Runner, without_collector
from workers.jobs.whatif.causes import EARLY_MS
from workers.jobs.whatif.reproduction import PartialLogError
from workers.jobs.whatif.simulation import Assumptions
from workers.jobs.whatif.slices import RowSlice, in_order
from workers.jobs.whatif.what_if import WhatIf, what_if

LEAD_IN_MS: Final = 3 * HOUR_MS
"""The time before a period that is read to know what the buckets held."""

READ: Final = 1 / 3
"""The part of reading in the time of a replay."""


def around(period: Period) -> Period:
    """The period to read: also hours that fill the buckets, and asks after it that were charged within."""
    return period.widened(LEAD_IN_MS, EARLY_MS)


@dataclass(frozen=True, slots=True)
class ReplayedLog:
    """A log that is replayed, once or several times.

    Attributes:
        name: the log's name.
        overview: its batches and times.
        by_store: times are the store's, not the callers'.
        is_whole: the period has the first batch of every node.
        missing_batches, missing_rows: what the log lacks, by its numbers.
    """

    name: str
    runner: Runner
    progress: Progress
    period: Period
    tasks: Sequence[batches.Task]
    overview: batches.Overview
    by_store: bool
    is_whole: bool
    missing_batches: int
    missing_rows: int

    @classmethod
    def of(
        cls,
        runner: Runner,
        progress: Progress,
        arguments: argparse.Namespace,
        period: Period,
        tasks: Sequence[LogPart],
        whole: Callable[[], Sequence[LogPart]],
        share: float,
    ) -> Self:
        """Look through the batches of a log.

        Args:
            tasks: the row groups of the hours of the period, and of those ``around`` it.
            whole: gives all row groups of the log.
            share: see ``Runner``.

        Raises:
            JobError: the log cannot be read.
        """
        wide = around(period)
        overview = batches.overview(runner, tasks, wide, period, share)
        copies = batches.copies(runner, tasks, overview, 0)
        gaps, faults = batches.gaps_and_faults(runner, whole, overview, period)
        return cls(
            location_of(arguments.log).name,
            runner,
            progress,
            period,
            batches.each_once(tasks, period.widened(LEAD_IN_MS), copies),
            overview,
            arguments.clock == "store",
            period.from_ms is None and not gaps.beginning,
            gaps.batches,
            faults.missing,
        )

    def slices(self, share: float, after_ms: int = 0) -> Iterator[RowSlice]:
        """The rows in the store's order, with progress when they were read, and once each slice was replayed.

        Args:
            share: see ``Runner``.
            after_ms: also the rows of this time after the period.

        Raises:
            JobError: a file cannot be read.
        """
        tasks = [replace(task, period=task.period.widened(0, after_ms)) for task in self.tasks]
        rows = sum(task.rows for task in tasks)
        for each in in_order(self.runner, tasks, READ * share, by_store=self.by_store):
            yield each
            self.progress.advance((1 - READ) * share * each.rows / rows)

    def what_if(self, quotas: Quotas, assumptions: Assumptions, share: float) -> WhatIf:
        """Replay the log under other quotas.

        Raises:
            JobError: the log cannot be read, or has no decision in the period.
            JobUsageError: the log does not have every decision.
        """
        try:
            with without_collector():
                found = what_if(self.slices(share, EARLY_MS), quotas, assumptions, self.period.to_ms)
        except PartialLogError:
            raise JobUsageError(partial_log(f"{self.name}: a replay", self.period)) from None
        if not found.reproduction.decisions:
            raise JobError(f"{self.name}: no decision in the period {self.period}")
        return found
