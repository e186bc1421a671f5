"""The job `backfill` over ten million decisions: its time, its memory, and the cost of twice the data."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from pyspark.sql import SparkSession

from tests import proofs
from workers.generate.traffic import Traffic
from workers.generate.write_log import Order, write_log
from workers.spark.__main__ import command_line
from workers.spark.assertions import write_assertions
from workers.spark.folder import OutputFolder
from workers.spark.session import spark_session

EVENTS: Final = int(os.environ.get("QUOTAGATE_PROVE_EVENTS", "10000000"))
RATE: Final = 500.0
MOST_TIMES: Final = 2.2
HEAP: Final = "2g"
MOST_RESIDENT_MB: Final = 3_500
"""The heap, and the other memory of a Java process."""


class Measured(NamedTuple):
    """One run of the job."""

    events: int
    seconds: float
    assertions: int
    resident_mb: int


@pytest.mark.prove
@pytest.mark.timeout(7200)
def test_twice_the_decisions_take_twice_the_time(tmp_path: Path):
    logs = {events: made(tmp_path, events) for events in (EVENTS // 2, EVENTS)}
    with spark_session("backfill", memory=HEAP) as spark:
        run(spark, logs[EVENTS // 2], tmp_path / "warm")  # warm up: the JIT has compiled nothing yet
        half, whole = (measured(spark, events, log, tmp_path) for events, log in logs.items())
    proofs.print_table(
        f"`quotagate spark backfill` over {EVENTS:,} decisions",
        "make prove T=tests/prove/test_backfill.py",
        ["decisions", "seconds", "seconds a million", "assertions", "Java's memory at most, MB"],
        [
            [
                f"{each.events:,}",
                f"{each.seconds:.0f}",
                f"{each.seconds / each.events * 1e6:.1f}",
                f"{each.assertions:,}",
                each.resident_mb,
            ]
            for each in (half, whole)
        ],
    )
    assert whole.seconds <= MOST_TIMES * half.seconds
    assert whole.resident_mb <= MOST_RESIDENT_MB


def made(folder: Path, events: int) -> Path:
    """A log with this many decisions."""
    log = folder / f"log-{events}"
    order = Order(
        Traffic(seed=events, events=events, rate=RATE), 1_767_225_600_000, bytes(32), os.cpu_count() or 1
    )
    write_log(order, log, folder / f"truth-{events}")
    return log


def run(spark: SparkSession, log: Path, out: Path) -> int:
    """Run the job, and return how many assertions it writes."""
    arguments = command_line().parse_args(["backfill", "--log", str(log), "--out", str(out)])
    folder = OutputFolder(spark, str(out))
    with folder:
        return write_assertions(spark, arguments, None, None, folder).assertions


def measured(spark: SparkSession, events: int, log: Path, folder: Path) -> Measured:
    """Return how long a run takes, and the peak memory of its Java."""
    began = time.monotonic()
    assertions = run(spark, log, folder / f"out-{events}")
    seconds = time.monotonic() - began
    java = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]
    status = Path(f"/proc/{java}/status").read_text(encoding="utf-8")
    resident = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return Measured(events, seconds, assertions, int(resident.split()[1]) // 1024)
