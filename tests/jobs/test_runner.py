"""Functions run in this process, or in several, with the same results; no process outlives the job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from tests.programs import lives
from tests.service import eventually
from workers.jobs.errors import JobError, JobUsageError
from workers.jobs.progress import Silent
from workers.jobs.runner import FEW_ROWS, ProcessRunner

MANY = FEW_ROWS + 1
TASKS = range(12)
PARTITIONS = 3
HOLDS = """
import sys
from tests.jobs.test_runner import held_up, meets
from workers.jobs.progress import Silent
from workers.jobs.runner import FEW_ROWS, ProcessRunner
if __name__ == "__main__":
    try:
        with ProcessRunner(Silent(), FEW_ROWS + 1, 2) as runner:
            one, two = sys.argv[1:3]
            list(runner.each(meets, [(one, two), (two, one)], 50))
            list(runner.each(held_up, sys.argv[3:], 50))
    except KeyboardInterrupt:
        sys.exit(130)
"""


FILLS = """
import pyarrow as pa
from workers.jobs.errors import JobError
from workers.jobs.progress import Silent
from workers.jobs.runner import ProcessRunner
def filled(task):
    return 0, [pa.table({"number": pa.array(range(100_000))})]
try:
    with ProcessRunner(Silent(), 0) as runner:
        runner.scatter(filled, [0], 50)
except JobError as error:
    print(error)
"""


class Shares:
    """Remembers the progress."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def advance(self, share: float) -> None:
        self.shares.append(share)


def squared(number: int) -> tuple[int, int]:
    """Later tasks are done sooner."""
    time.sleep(0.01 * (len(TASKS) - number))
    return number * number, os.getpid()


def table_of(numbers: Iterable[int]) -> pa.Table:
    some = list(numbers)
    names = pa.array([str(each) for each in some], pa.string()).dictionary_encode()
    return pa.table({"number": pa.array(some, pa.int64()), "name": names})


def scattered(number: int) -> tuple[str, list[pa.Table]]:
    """Each partition gets the numbers up to a task's that belong to it; those of small tasks are empty."""
    tables = [table_of(each for each in range(number) if each % PARTITIONS == part) for part in range(3)]
    return f"task {number}", tables if number else []


def gathered(base: int, tables: Iterable[pa.Table]) -> tuple[int, list[tuple[int, str]]]:
    rows = [(row["number"], row["name"]) for table in tables for row in table.to_pylist()]
    return base + len(rows), rows


def held_up(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


def meets(paths: tuple[str, str]) -> None:
    """Waits until both tasks have begun, each in a process of its own."""
    mine, other = map(Path, paths)
    mine.touch()
    eventually(other.is_file)


def refuses(number: int) -> int:
    if number == 5:
        raise JobUsageError(f"task {number} cannot be done")
    return number


def fails(number: int) -> int:
    return 1 // (5 - number)


def ends(number: int) -> int:
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.fixture(scope="module", params=[1, 2], ids=["in one process", "in two"])
def runner(request: pytest.FixtureRequest) -> Iterator[ProcessRunner]:
    with ProcessRunner(Silent(), MANY, request.param) as made:
        yield made


def test_results_keep_the_order_of_their_tasks(runner: ProcessRunner):
    results = list(runner.each(squared, TASKS, 100))
    assert [square for square, _ in results] == [number * number for number in TASKS]


@pytest.mark.parametrize(
    ("rows", "processes", "are_own"), [(MANY, 2, True), (FEW_ROWS, 2, False), (MANY, 1, False)]
)
def test_few_rows_are_read_in_this_process(rows: int, processes: int, *, are_own: bool):
    with ProcessRunner(Silent(), rows, processes) as runner:
        used = {process for _, process in runner.each(squared, range(4), 100)}
    assert len(used) <= processes
    assert (os.getpid() not in used) == are_own


def test_partitions_have_the_rows_of_all_tasks_in_their_order(runner: ProcessRunner):
    results, partitions = runner.scatter(scattered, TASKS, 50)
    assert results == [f"task {number}" for number in TASKS]
    for base in (0, 1_000):  # partitions may be read twice
        found = list(partitions.gather(partial(gathered, base), 50))
        rows = [
            [(each, str(each)) for task in TASKS for each in range(task) if each % PARTITIONS == part]
            for part in range(PARTITIONS)
        ]
        assert found == [(base + len(some), some) for some in rows]


def test_partitions_of_two_scatters_are_apart(runner: ProcessRunner):
    _, one = runner.scatter(scattered, [9], 50)
    _, two = runner.scatter(scattered, [3], 50)
    assert [count for count, _ in one.gather(partial(gathered, 0), 50)] == [3, 3, 3]
    assert [count for count, _ in two.gather(partial(gathered, 0), 50)] == [1, 1, 1]


def test_nothing_to_do(runner: ProcessRunner):
    assert list(runner.each(squared, [], 50)) == []
    results, partitions = runner.scatter(scattered, [0], 50)
    assert results == ["task 0"]
    assert list(partitions.gather(partial(gathered, 0), 50)) == []


def test_progress_adds_up_to_the_share_of_the_stage():
    shares = Shares()
    with ProcessRunner(shares, 0) as runner:
        assert len(list(runner.each(refuses, range(4), 30))) == 4
        assert shares.shares == [7.5] * 4


def test_scratch_files_are_removed_even_on_failure():
    with pytest.raises(ZeroDivisionError), ProcessRunner(Silent(), 0) as runner:  # noqa: PT012
        runner.scatter(scattered, TASKS, 50)
        assert list(runner.scratch.iterdir())
        raise ZeroDivisionError
    assert not runner.scratch.exists()


def test_error_of_a_task_ends_the_job_as_it_is(runner: ProcessRunner):
    with pytest.raises(JobUsageError, match=r"^task 5 cannot be done$") as refused:
        list(runner.each(refuses, TASKS, 100))
    assert refused.value.exit_code == 2
    with pytest.raises(ZeroDivisionError):
        list(runner.each(fails, TASKS, 100))


def test_process_that_is_killed_ends_the_job():
    with (
        ProcessRunner(Silent(), MANY, 2) as runner,
        pytest.raises(JobError, match=r"^a process of the job was ended, perhaps because memory ran out$"),
    ):
        list(runner.each(ends, TASKS, 100))


def test_full_scratch_folder_is_named(tmp_path: Path):
    limited = [
        *("bash", "-c", 'ulimit -f 8; exec "$@"', "job"),
        *(sys.executable, "-c", FILLS),
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
    said = subprocess.run(limited, env=environment, capture_output=True, text=True, check=False)
    assert re.fullmatch(rf"{tmp_path}/\S+: .*File too large; TMPDIR names another folder\n", said.stdout), (
        said
    )


def out_of_memory(_: int) -> None:
    raise pa.ArrowMemoryError("malloc of size 2 failed")


def test_lack_of_memory_is_named(runner: ProcessRunner):
    with pytest.raises(JobError, match=r"^memory ran out; --processes 1 needs less$"):
        list(runner.each(out_of_memory, TASKS, 100))


def test_terminated_job_does_not_wait_for_its_tasks(tmp_path: Path):
    """The tasks sleep for ten minutes; more are handed out than run."""
    began = time.monotonic()
    with pytest.raises(SystemExit), ProcessRunner(Silent(), MANY, 2) as runner:  # noqa: PT012
        files = [str(tmp_path / str(number)) for number in range(4)]

        def wait() -> None:
            with suppress(JobError):
                list(runner.each(held_up, files, 100))

        waiting = threading.Thread(target=wait)
        waiting.start()
        eventually(lambda: sum(Path(file).is_file() for file in files) == 2)
        raise SystemExit(143)
    waiting.join()
    assert time.monotonic() - began < 300


@pytest.mark.parametrize(
    ("way", "busy", "code"),
    [
        (signal.SIGKILL, 2, -signal.SIGKILL),
        (signal.SIGTERM, 2, -signal.SIGTERM),
        (signal.SIGINT, 2, 130),
        (signal.SIGINT, 1, 130),
    ],
)
def test_processes_end_with_the_job(way: signal.Signals, busy: int, code: int, tmp_path: Path):
    """A terminal sends Ctrl-C to all of them; one that waits for a task ends as quietly as the others."""
    program = tmp_path / "program.py"
    program.write_text(HOLDS)
    met = [str(tmp_path / name) for name in ("one", "two")]
    files = [tmp_path / str(number) for number in range(busy)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
    job = subprocess.Popen(
        [sys.executable, str(program), *met, *map(str, files)],
        env=environment,
        start_new_session=True,
        stderr=subprocess.PIPE,
    )
    try:
        eventually(lambda: all(file.is_file() and file.read_text() for file in files))
        others = [int(file.read_text()) for file in files]
        assert all(map(lives, others))
        if way == signal.SIGINT:
            os.killpg(job.pid, way)
        else:
            job.send_signal(way)
        _, said = job.communicate(timeout=60)
        assert job.returncode == code
        assert b"Traceback" not in said
        eventually(lambda: not any(map(lives, others)))
    finally:
        if job.poll() is None:
            job.kill()
