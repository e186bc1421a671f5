"""The cost of writing: rows per second, processor time and memory of a worker with a large backlog."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests import proofs
from tests.decision_log import worker
from tests.decision_log.batches import Node
from tests.decision_log.conftest import eventually, leave
from tests.decision_log.test_worker import drained, files

BATCHES = 2_000
ROWS = 250
TICKS = os.sysconf("SC_CLK_TCK")


def processor_s(pid: int) -> float:
    """The processor time that a program has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory_mib(pid: int, what: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(rf"{what}:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.bench
def test_cost_of_catching_up(shared, client, folder):
    node = Node(people=1_000)
    with worker.running(shared, folder, limits={"age_s": 0.5}) as child:
        leave(client, [node.batch(1)])
        eventually(lambda: files(folder))
        idle_mib, before_s = memory_mib(child.pid, "VmRSS"), processor_s(child.pid)
        child.send_signal(signal.SIGSTOP)  # it starts once everything is in the stream
        leave(client, node.batches(BATCHES, ROWS))
        child.send_signal(signal.SIGCONT)
        began = time.monotonic()
        eventually(lambda: drained(client))
        took_s, used_s = time.monotonic() - began, processor_s(child.pid) - before_s
        peak_mib = memory_mib(child.pid, "VmHWM")
    rows = BATCHES * ROWS
    size = sum(file.stat().st_size for file in files(folder))
    proofs.print_table(
        "What writing costs",
        "make bench T=tests/decision_log",
        (
            "rows",
            "rows a second",
            "processor: us a row",
            "on disk: bytes a row",
            "memory at first: MiB",
            "at most: MiB",
        ),
        [
            (
                f"{rows:,}",
                f"{rows / took_s:,.0f}",
                f"{used_s / rows * 1e6:.1f}",
                f"{size / rows:.0f}",
                f"{idle_mib:.0f}",
                f"{peak_mib:.0f}",
            )
        ],
    )
    assert peak_mib < 1_024
