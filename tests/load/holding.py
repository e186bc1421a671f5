"""What holds beside any load: nothing is made up, limits are exact, and who is not answered is told so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from tests.load.generator import Load, Outcome, outcomes
from tests.programs import end
from tests.said import say
from tests.service import Service

HUNDRED: Final = 100
AMPLE: Final = {"request_rate": 1e9, "producer_ids_rate": 10_000}
"""Quotas of who makes the load: each ask is charged to buckets."""
RATE: Final = {"limit": 100.5 / 99_000, "samples": 100, "sample_ms": 1_000_000, "enforcement": "deny"}
"""A hundred requests: the window is measured as 99,000 s and what went by, so the next comes after 490 s."""
SECRET: Final = {"QUOTAGATE_HASH_SECRET": (b"load" * 8).hex()}
"""The same in every run, so that a limit of ids takes the same ids for seen: none."""

HOT: Final = '{"principal":"hot-$c","usage":{"requests":1}}'
HOT_IDS: Final = '{"principal":"hot-$c","usage":{"requests":1,"producer_ids":["$n"]}}'
COLD: Final = '{"principal":"cold-$n","usage":{"requests":1}}'
LIMITED: Final = {
    "127.0.0.21": '{"principal":"limited","usage":{"requests":1}}',
    "127.0.0.22": '{"principal":"limited","usage":{"producer_ids":["$n"]}}',
}
"""The asks under the limits, by the addresses that they come from: the flood is another caller's."""


def held(node: Service, *, ask: str, connections: int, seconds: float, batch: int = 0) -> Outcome:
    """Flood a node while others ask under a limit of a hundred, and hold it to what it promised.

    Gives what came of the flood.
    """
    node.put("user=*", **AMPLE)
    node.put("user=limited", request_rate=RATE, producer_ids_rate=HUNDRED)
    flood, rate, ids = outcomes(
        Load(address=node.address, ask=ask, batch=batch, connections=connections, seconds=seconds),
        *(
            Load(
                address=node.address, ask=limited, connections=4, seconds=seconds, pause_s=0.05, source=source
            )
            for source, limited in LIMITED.items()
        ),
    )
    say(told(flood), "rate:", told(rate), "ids:", told(ids))
    for each in (flood, rate, ids):
        true_and_whole(each)
    assert made_up(node) == 0
    assert rate.decisions["admit"] == HUNDRED < sum(rate.decisions.values())
    assert ids.decisions["admit"] == HUNDRED < sum(ids.decisions.values())
    return flood


def true_and_whole(outcome: Outcome) -> None:
    """Every request was answered, by the store or with the word that the node is overloaded."""
    assert outcome.odd == []
    assert outcome.lost == outcome.unanswered == 0
    assert outcome.statuses.keys() <= {"200", "503"}
    assert outcome.statuses.get("503", 0) == outcome.shed
    assert outcome.sources.keys() == {"store"}


def counted(node: Service, name: str, **labels: str) -> float:
    """The sum of a metric over its samples with these labels."""
    families = text_string_to_metric_families(node.http.get("/metrics").text)
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def made_up(node: Service) -> float:
    """How many decisions a node gave without its store, as it counts them."""
    return counted(node, "quotagate_decisions_total", source="fallback")


def told(outcome: Outcome) -> str:
    """An outcome in a few words."""
    waits = f"median {median(outcome.waits_ms):.1f} ms" if outcome.waits_ms else "no answer"
    return f"{outcome.statuses} {outcome.sources} {outcome.decisions}, {waits};"


# Less processor time


LOOPS: Final = 4
NICENESS: Final = 5
"""Beside so many loops it leaves a node about a tenth of the time that it takes in a flood."""


def programs_of(pid: int) -> list[int]:
    """A program and all that it started."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text(encoding="ascii").split():
            found += programs_of(int(child))
    return found


def nicer(pid: int, by: int) -> None:
    """Let a program, and all that it started, come after others."""
    for program in programs_of(pid):
        for thread in Path(f"/proc/{program}/task").iterdir():
            with suppress(ProcessLookupError):  # it ended since
                os.setpriority(os.PRIO_PROCESS, int(thread.name), by)


def processor_s(pid: int) -> float:
    """The processor time that a program and all that it started have had, in seconds."""
    ticks = 0
    for program in programs_of(pid):
        after_name = Path(f"/proc/{program}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(after_name[11]) + int(after_name[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def starved(node: Service) -> Iterator[None]:
    """A node with about a tenth of its processor time, beside programs that take all that they can get."""
    loops: list[subprocess.Popen[bytes]] = []
    nicer(node.pid, NICENESS)
    try:
        loops += [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(LOOPS)]
        yield
    finally:
        for loop in loops:
            end(loop)
