"""Runs a job's functions on Spark: the same functions as ``workers.jobs.runner``, and nothing else.

Spark hands out tasks and moves bytes. Executors read row groups themselves with pyarrow; verdicts travel
once, as Arrow streams, from the task that read them to their partition.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyarrow import ipc
from pyspark import RDD, StorageLevel
from pyspark.sql import SparkSession

from workers.jobs.errors import JobError
from workers.jobs.progress import Progress
from workers.jobs.runner import OPTIONS, Gather, Scatter, compact

T = TypeVar("T")
R = TypeVar("R")

RESULT: Final = -1
"""The partition of a task's result for the job."""

POLL_S: Final = 0.25


class SparkRunner:
    """Runs functions on the executors of a session."""

    def __init__(self, spark: SparkSession, progress: Progress) -> None:
        self.context = spark.sparkContext
        self._progress = progress

    def mapped(self, function: Callable[[int, T], Iterable[Any]], tasks: Sequence[T]) -> RDD[Any]:
        """The results of a function over each task and its place."""
        numbered = self.context.parallelize(list(enumerate(tasks)), max(1, len(tasks)))
        return numbered.flatMap(partial(_applied, function))

    def each(self, function: Callable[[T], R], tasks: Sequence[T], share: float) -> Iterator[R]:
        """The result of each task, in their order.

        Raises:
            JobError: a function raised it.
        """
        found = self.mapped(partial(_each, function), tasks)
        with self._following(share):
            results = found.collect()
        for _, caught in sorted(results, key=itemgetter(0)):
            yield _result(caught)

    def scatter(
        self, function: Scatter[T, R], tasks: Sequence[T], share: float
    ) -> tuple[list[R], SparkParts]:
        """The results of the tasks for the job, in their order, and the partitions, on the executors' disks.

        Raises:
            JobError: as ``each``.
        """
        parts = self.mapped(partial(_scattered, function), tasks).persist(StorageLevel.DISK_ONLY)
        with self._following(share):
            results = parts.filter(_is_result).values().collect()
        found = [_result(caught) for _, caught in sorted(results, key=itemgetter(0))]
        partitions = max((count for _, count in found), default=0)
        return [result for result, _ in found], SparkParts(self, parts.filter(_is_part), partitions)

    @contextmanager
    def _following(self, share: float) -> Iterator[None]:
        """Show the progress of the stages that run within the block."""
        done = threading.Event()
        shown = 0.0

        def follow() -> None:
            nonlocal shown
            tracker = self.context.statusTracker()
            while not done.wait(POLL_S):
                stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
                tasks = sum(stage.numTasks for stage in stages if stage)
                completed = sum(stage.numCompletedTasks for stage in stages if stage)
                if tasks and (now := share * completed / tasks) > shown:
                    self._progress.advance(now - shown)
                    shown = now

        follower = threading.Thread(target=follow, name="progress", daemon=True)
        follower.start()
        try:
            yield
        finally:
            done.set()
            follower.join()
            self._progress.advance(share - shown)


class SparkParts:
    """Partitions as bytes on the executors' disks."""

    def __init__(self, runner: SparkRunner, parts: RDD[tuple[int, bytes]], partitions: int) -> None:
        self._runner, self._partitions = runner, partitions
        self._placed = parts.partitionBy(max(1, partitions), _same)

    def gather(self, function: Gather[R], share: float) -> Iterator[R]:
        """The result of each partition, in their order.

        Raises:
            JobError: the function raised it.
        """
        if not self._partitions:
            return
        gathered = self._placed.mapPartitions(partial(_gathered, function))
        with self._runner._following(share):  # noqa: SLF001  one module, two classes
            results = gathered.collect()
        yield from map(_result, results)


def _caught(function: Callable[[T], R], task: T) -> tuple[R | None, JobError | None]:
    """A task's result, or the error for the person who started the job: Spark would wrap it in Java's."""
    try:
        return function(task), None
    except JobError as error:
        return None, error


def _result(caught: tuple[R | None, JobError | None]) -> R:
    result, error = caught
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # one of both is there


def _applied(function: Callable[[int, T], Iterable[Any]], task: tuple[int, T]) -> Iterable[Any]:
    return function(*task)


def _each(function: Callable[[T], R], place: int, task: T) -> Iterator[tuple[int, Any]]:
    yield place, _caught(function, task)


def _scattered(function: Scatter[T, R], place: int, task: T) -> Iterator[tuple[int, Any]]:
    caught, error = _caught(function, task)
    result, tables = (None, ()) if caught is None else caught
    yield RESULT, (place, ((result, len(tables)) if error is None else None, error))
    for partition, table in enumerate(tables):
        if table.num_rows:
            yield partition, _packed(table)


def _gathered(function: Gather[R], parts: Iterable[tuple[int, bytes]]) -> Iterator[Any]:
    yield _caught(function, (_unpacked(packed) for _, packed in parts))


def _packed(table: pa.Table) -> bytes:
    """A table as an Arrow stream, with the values of its dictionaries that it has."""
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, table.schema, options=OPTIONS) as writer:
        writer.write_table(compact(table))
    return bytes(sink.getvalue())


def _unpacked(packed: bytes) -> pa.Table:
    return ipc.open_stream(packed).read_all()


def _is_result(part: tuple[int, Any]) -> bool:
    return part[0] == RESULT


def _is_part(part: tuple[int, Any]) -> bool:
    return part[0] != RESULT


def _same(partition: int) -> int:
    return partition
