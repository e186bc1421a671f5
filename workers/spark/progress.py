"""The progress of a job's stages, on standard error, at a terminal only."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pyspark.sql import SparkSession

POLL_S: Final = 0.25


@contextmanager
def shown(spark: SparkSession, what: str) -> Iterator[None]:
    """Show how far the stages are that run within the block."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # noqa: PLC0415  a cluster need not have it
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    over = threading.Event()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(what, total=None)

        def follow() -> None:
            tracker = spark.sparkContext.statusTracker()
            while not over.wait(POLL_S):
                stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
                tasks = sum(stage.numTasks for stage in stages if stage)
                done = sum(stage.numCompletedTasks for stage in stages if stage)
                bars.update(bar, total=tasks or None, completed=done)

        follower = threading.Thread(target=follow, name="progress", daemon=True)
        follower.start()
        try:
            yield
        finally:
            over.set()
            follower.join()
