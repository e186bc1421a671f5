"""Runs a job's functions over its tasks on this machine: in this process, or in one for each processor.

A job has two stages. *Scatter* runs a function over the log's row groups; its result has a part for the job
itself, and verdicts for each partition. *Gather* runs a function over each partition.
``workers.spark.runner`` does the same with Spark; the functions are the same.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Final, Protocol, Self, TypeVar

import pyarrow as pa
from pyarrow import ipc

from workers.jobs.errors import JobError
from workers.jobs.progress import Progress

T = TypeVar("T")
R = TypeVar("R")

FEW_ROWS: Final = 150_000
"""Up to so many rows of the log, one process is cheaper than several, which have to start."""

AHEAD: Final = 2
"""How many tasks each process is given ahead: more would keep their results in memory."""

OPTIONS: Final = ipc.IpcWriteOptions(compression="lz4")

Scatter = Callable[[T], tuple[R, Sequence[pa.Table]]]
"""A function from a task to its result for the job, and a table for each partition."""

Gather = Callable[[Iterable[pa.Table]], R]
"""A function from the tables of one partition to its result."""


class Scattered(Protocol):
    """The partitions that the first stage made."""

    def gather(self, function: Gather[R], share: float) -> Iterator[R]:
        """The result of each partition, in their order."""


class Runner(Protocol):
    """Where the functions of a job run; ``share`` is a stage's share of the whole job, in per cent."""

    def each(self, function: Callable[[T], R], tasks: Sequence[T], share: float) -> Iterator[R]:
        """The result of each task, in their order."""

    def scatter(self, function: Scatter[T, R], tasks: Sequence[T], share: float) -> tuple[list[R], Scattered]:
        """The results of the tasks for the job, in their order, and the partitions."""


class ProcessRunner:
    """Runs functions in the processes of this machine. A context: at its end the processes have ended.

    Args:
        rows: how many rows the job will read; decides between one process and several.
        processes: at most so many.
    """

    def __init__(self, progress: Progress, rows: int, processes: int | None = None) -> None:
        self._progress = progress
        self._processes = 1 if rows <= FEW_ROWS else processes or processors()
        self._kept = ExitStack()
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        self.scratch = Path(self._kept.enter_context(TemporaryDirectory(prefix="quotagate-job-")))
        if self._processes > 1:
            context = get_context("spawn")  # a fork would copy the threads of pyarrow half
            self._pool = ProcessPoolExecutor(self._processes, context, initializer=_end_with_parent)
            self._kept.callback(self._pool.shutdown, cancel_futures=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind is not None and self._pool is not None:
            # The pool would wait for all tasks that it has handed out.
            for process in dict(self._pool._processes or {}).values():  # noqa: SLF001  no public way until 3.14
                process.terminate()
        self._kept.close()

    def each(self, function: Callable[[T], R], tasks: Sequence[T], share: float) -> Iterator[R]:
        """The result of each task, in their order.

        Raises:
            JobError: a process ended, or the function raised it.
        """
        for result in self._results(function, tasks):
            self._progress.advance(share / len(tasks))
            yield result

    def scatter(self, function: Scatter[T, R], tasks: Sequence[T], share: float) -> tuple[list[R], Scattered]:
        """The results of the tasks for the job, in their order, and the partitions, as files.

        Raises:
            JobError: as ``each``.
        """
        folder = Path(mkdtemp(dir=self.scratch))
        files = [folder / f"{number}.arrow" for number in range(len(tasks))]
        run = partial(_scatter, function)
        results = list(self.each(run, list(zip(tasks, files, strict=True)), share))
        partitions = max((count for _, count in results), default=0)
        return [result for result, _ in results], _Files(self, files, partitions)

    def _results(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[R]:
        run = partial(_run, function)
        if self._pool is None:
            yield from map(run, tasks)
            return
        waiting: deque[Future[R]] = deque()
        try:
            for task in tasks:
                if len(waiting) >= AHEAD * self._processes:
                    yield waiting.popleft().result()
                waiting.append(self._pool.submit(run, task))
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise JobError("a process of the job was ended, perhaps because memory ran out") from None


@dataclass(frozen=True, slots=True)
class _Files:
    """Partitions in files: each task has written one, with a record batch for each partition."""

    runner: ProcessRunner
    files: Sequence[Path]
    partitions: int

    def gather(self, function: Gather[R], share: float) -> Iterator[R]:
        run = partial(_gather, function, self.files)
        return self.runner.each(run, range(self.partitions), share)


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable the collector of cycles within the block: jobs have millions of small objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _run(function: Callable[[T], R], task: T) -> R:
    """Run a task without the collector of cycles."""
    try:
        with without_collector():
            return function(task)
    except MemoryError:
        raise JobError("memory ran out; --processes 1 needs less") from None


def _scatter(function: Scatter[Any, R], task: tuple[Any, Path]) -> tuple[R, int]:
    given, file = task
    result, tables = function(given)
    if tables:
        # A file has one dictionary for each column, so all its batches are slices of one.
        whole = pa.concat_tables(tables).unify_dictionaries().combine_chunks()
        [batch] = whole.to_batches() or [empty(whole.schema)]
        begin = 0
        try:
            with ipc.new_file(file, whole.schema, options=OPTIONS) as writer:
                for table in tables:
                    writer.write_batch(batch.slice(begin, table.num_rows))
                    begin += table.num_rows
        except OSError as error:
            raise JobError(f"{file.parent}: {error.strerror or error}; TMPDIR names another folder") from None
    return result, len(tables)


def empty(schema: pa.Schema) -> pa.RecordBatch:
    """A batch without rows."""
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def _gather(function: Gather[R], files: Sequence[Path], partition: int) -> R:
    return function(_partition(file, partition) for file in files if file.exists())


def _partition(file: Path, partition: int) -> pa.Table:
    with pa.memory_map(str(file)) as mapped:
        return compact(pa.Table.from_batches([ipc.open_file(mapped).get_batch(partition)]))


def compact(table: pa.Table) -> pa.Table:
    """The same table with smaller dictionaries: a slice of a table has all values of the table."""
    columns = [_compact(column.combine_chunks()) for column in table.columns]
    return pa.table(columns, schema=table.schema)


def _compact(column: pa.Array) -> pa.Array:
    if not pa.types.is_dictionary(column.type) or len(column.dictionary) <= len(column):
        return column
    return column.cast(column.type.value_type).dictionary_encode()


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _end_with_parent() -> None:
    """End this process when its parent has ended, however that happened, and quietly on Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, name="parent", daemon=True).start()
