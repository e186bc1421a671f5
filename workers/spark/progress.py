"""A progress bar for a job's stages, on standard error, if that is a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pyspark.sql import SparkSession

from app.terminal import styled

POLL_S: Final = 0.25


@contextmanager
def progress_bar(spark: SparkSession, label: str) -> Iterator[None]:
    """Show the progress of the stages that run within the block."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # a cluster need not have rich
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    done = threading.Event()
    with Progress(*columns, console=Console(file=styled(sys.stderr)), transient=True) as bars:
        bar = bars.add_task(label, total=None)

        def follow() -> None:
            tracker = spark.sparkContext.statusTracker()
            while not done.wait(POLL_S):
                stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
                tasks = sum(stage.numTasks for stage in stages if stage)
                completed = sum(stage.numCompletedTasks for stage in stages if stage)
                bars.update(bar, total=tasks or None, completed=completed)

        follower = threading.Thread(target=follow, name="progress", daemon=True)
        follower.start()
        try:
            yield
        finally:
            done.set()
            follower.join()
