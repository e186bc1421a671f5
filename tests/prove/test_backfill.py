"""The job `backfill` over ten million decisions: its time, its memory, and the cost of twice the data."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow.compute as pc
import pytest

from app.backfill.assertions import AssertionFolder
from tests import proofs
from workers.generate.traffic import Traffic
from workers.generate.write_log import Order, write_log
from workers.jobs.files import row_groups
from workers.jobs.period import Period

EVENTS: Final = int(os.environ.get("QUOTAGATE_PROVE_EVENTS", "10000000"))
RATE: Final = 500.0
MOST_TIMES: Final = 2.2
MOST_US: Final = 8.0
"""The most processor time for each verdict, of all processes."""

MOST_RESIDENT_MB: Final = 1_500
"""The most memory of one process."""


class Measured(NamedTuple):
    """One run of the job. ``processor_s`` is of all its processes, ``resident_mb`` of the largest."""

    events: int
    verdicts: int
    seconds: float
    processor_s: float
    assertions: int
    resident_mb: int


@pytest.mark.prove
@pytest.mark.timeout(7200)
def test_twice_the_decisions_take_twice_the_time(tmp_path: Path):
    half, whole = (measured(tmp_path, events) for events in (EVENTS // 2, EVENTS))
    proofs.print_table(
        f"`quotagate backfill run` over {EVENTS:,} decisions",
        "make prove T=tests/prove/test_backfill.py",
        [
            "decisions",
            "verdicts",
            "seconds",
            "processor s",
            "us a verdict",
            "assertions",
            "memory at most, MB",
        ],
        [
            [
                f"{each.events:,}",
                f"{each.verdicts:,}",
                f"{each.seconds:.1f}",
                f"{each.processor_s:.1f}",
                f"{each.processor_s / each.verdicts * 1e6:.1f}",
                f"{each.assertions:,}",
                each.resident_mb,
            ]
            for each in (half, whole)
        ],
    )
    assert whole.processor_s <= MOST_TIMES * half.processor_s
    assert whole.processor_s * 1e6 <= MOST_US * whole.verdicts
    assert whole.resident_mb <= MOST_RESIDENT_MB


def measured(folder: Path, events: int) -> Measured:
    """Make a log of this many decisions, and run the job over it."""
    log, out = folder / f"log-{events}", folder / f"out-{events}"
    traffic = Traffic(seed=events, events=events, rate=RATE)
    write_log(
        Order(traffic, 1_767_225_600_000, bytes(32), os.cpu_count() or 1), log, folder / f"truth-{events}"
    )
    tables = (table for task in row_groups(str(log), Period()) for table in task.tables(["verdicts"]))
    verdicts = sum(pc.sum(pc.list_value_length(table.column("verdicts"))).as_py() for table in tables)
    began = time.monotonic()
    job = subprocess.Popen(
        [sys.executable, "-m", "workers.jobs", "backfill", "--log", str(log), "--out", str(out)]
    )
    _, status, used = os.wait4(job.pid, 0)
    job.returncode = os.waitstatus_to_exitcode(status)
    assert job.returncode == 0
    return Measured(
        events,
        verdicts,
        time.monotonic() - began,
        used.ru_utime + used.ru_stime,
        AssertionFolder.open(str(out)).rows,
        used.ru_maxrss // 1024,
    )
