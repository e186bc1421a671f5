"""An audit costs a fifteenth of the audit before it, without Java, and a quarter on Spark.

The old audit is `quotagate spark audit` of the commit before, over the same log, one run after the other. The
processor time is that of all programs of a run, Java's and its executors' too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Final

import pytest

from tests.bench.arena import checked_out
from tests.report import say

pytestmark = [pytest.mark.bench, pytest.mark.timeout(7200)]

ROOT: Final = Path(__file__).parents[2]
BEFORE: Final = "6211311be7ad"
"""A commit whose audit was made of Spark's data frames."""

REAPER: Final = """
import ctypes, os, resource, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans become children of this process: PR_SET_CHILD_SUBREAPER
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
try:
    while True:
        os.wait()
except ChildProcessError:
    pass
used = resource.getrusage(resource.RUSAGE_CHILDREN)
sys.stderr.write(done.stderr)
print(used.ru_utime + used.ru_stime)
sys.exit(done.returncode)
"""
"""Runs a program, waits for all that it has started, and prints their processor time in seconds."""

FEW: Final = 20_000
MANY: Final = int(os.environ.get("BENCH_DECISIONS", "1_000_000"))


def processor_s(code: Path, module: str, log: Path, out: Path) -> float:
    """The processor time of an audit by the code in a folder."""
    command = ["-m", module, "audit", "--log", str(log), "--out", str(out), "--overwrite"]
    done = subprocess.run(
        [sys.executable, "-c", REAPER, sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(code)},
        cwd=code,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.parametrize(
    ("decisions", "rounds", "without_java", "on_spark"), [(FEW, 3, 15, 0), (MANY, 1, 12, 4)]
)
def test_audit_costs_a_part_of_the_audit_before(
    decisions: int, rounds: int, without_java: float, on_spark: float, tmp_path: Path
):
    log, before = tmp_path / "log", checked_out(BEFORE)
    generate = ["-m", "workers.generate", "log", "--to", str(log), "--events", str(decisions), "--seed", "1"]
    subprocess.run([sys.executable, *generate], cwd=ROOT, check=True, capture_output=True)
    programs = {
        "before": (before, "workers.spark"),
        "alone": (ROOT, "workers.jobs"),
        "spark": (ROOT, "workers.spark"),
    }
    took: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, (code, module) in programs.items():
            took[name].append(processor_s(code, module, log, tmp_path / name))
    seconds = {name: median(each) for name, each in took.items()}
    shown = ", ".join(f"{name} {each:.1f} s" for name, each in seconds.items())
    say(f"{decisions:,} decisions: {shown} of processor time")
    assert seconds["before"] >= without_java * seconds["alone"]
    assert seconds["before"] >= on_spark * seconds["spark"]
