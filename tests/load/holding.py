"""The promises of a node under any load: answers come from the store, limits are exact, overload is admitted.

Also runs a node with about a tenth of its processor time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.load.generator import Load, Outcome, outcomes
from tests.programs import end
from tests.report import say
from tests.service import Service, eventually

HUNDRED: Final = 100
AMPLE: Final = {"request_rate": 1e9, "producer_ids_rate": 10_000}
"""The quotas of the callers that make the load, so that each ask is charged to buckets."""
RATE: Final = {"limit": 100.5 / 99_000, "samples": 100, "sample_ms": 1_000_000, "enforcement": "deny"}
"""Admits a hundred requests: the rate is measured over 99,000 s and more, so the next passes after 490 s."""
SECRET: Final = {"QUOTAGATE_HASH_SECRET": (b"load" * 8).hex()}
"""The same in every run, so that the filter never takes a new id for a seen one."""

HOT: Final = '{"principal":"hot-$c","usage":{"requests":1}}'
HOT_IDS: Final = '{"principal":"hot-$c","usage":{"requests":1,"producer_ids":["$n"]}}'
COLD: Final = '{"principal":"cold-$n","usage":{"requests":1}}'
LIMITED: Final = {
    "127.0.0.21": '{"principal":"limited","usage":{"requests":1}}',
    "127.0.0.22": '{"principal":"limited","usage":{"producer_ids":["$n"]}}',
}
"""The asks under the limits, by source address: to the node they are callers other than the flood."""


def flood_and_check(node: Service, *, ask: str, connections: int, seconds: float, batch: int = 0) -> Outcome:
    """Flood a node while others ask under a limit of a hundred; check all answers and both limits.

    Returns:
        the outcome of the flood.
    """
    node.put("user=*", **AMPLE)
    node.put("user=limited", request_rate=RATE, producer_ids_rate=HUNDRED)
    eventually(lambda: has_quotas_everywhere(node))
    flood, rate, ids = outcomes(
        Load(address=node.address, ask=ask, batch=batch, connections=connections, seconds=seconds),
        *(
            Load(
                address=node.address, ask=limited, connections=4, seconds=seconds, pause_s=0.05, source=source
            )
            for source, limited in LIMITED.items()
        ),
    )
    say(summary(flood), "rate:", summary(rate), "ids:", summary(ids))
    for each in (flood, rate, ids):
        check_answers(each)
    assert fallbacks_of(node) == 0
    assert admitted(node, rate, lambda _: {"requests": 1}) == HUNDRED
    assert admitted(node, ids, lambda n: {"producer_ids": [f"later-{n}"]}) == HUNDRED
    return flood


def has_quotas_everywhere(node: Service) -> bool:
    """Return whether every process has read the quotas that one process wrote, by many new connections."""
    peek = {"principal": "limited", "usage": {"requests": 0}, "mode": "peek"}
    for _ in range(50):
        with httpx.Client(base_url=node.url, trust_env=False) as http:
            if http.post("/v1/decisions", json=peek).json()["source"] != "store":
                return False
    return True


def admitted(node: Service, outcome: Outcome, usage: Callable[[int], dict[str, object]]) -> int:
    """How many of more than a hundred asks were admitted.

    If a crowded machine answered fewer during the flood, the missing asks follow after it.
    """
    decisions = Counter(outcome.decisions)
    while decisions.total() <= HUNDRED:
        decisions[node.ask(principal="limited", usage=usage(decisions.total()))["decision"]] += 1
    return decisions["admit"]


def check_answers(outcome: Outcome) -> None:
    """Check that every request was answered, by the store or with the error for overload."""
    assert outcome.odd == []
    assert outcome.lost == outcome.unanswered == 0
    assert outcome.statuses.keys() <= {"200", "503"}
    assert outcome.statuses.get("503", 0) == outcome.shed
    assert outcome.sources.keys() == {"store"}


def counted(node: Service, name: str, **labels: str) -> float:
    """Return the sum of a metric over its samples with these labels."""
    families = text_string_to_metric_families(node.http.get("/metrics").text)
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def fallbacks_of(node: Service) -> float:
    """Return how many decisions the node made without its store, by its own metrics."""
    return counted(node, "quotagate_decisions_total", source="fallback")


def summary(outcome: Outcome) -> str:
    """Summarise an outcome in a line."""
    waits = f"median {median(outcome.waits_ms):.1f} ms" if outcome.waits_ms else "no answer"
    return f"{outcome.statuses} {outcome.sources} {outcome.decisions}, {waits};"


# Less processor time


LOOPS: Final = 4
NICENESS: Final = 5
"""With so many busy loops, this leaves a node about a tenth of the processor time of a flood."""


def programs_of(pid: int) -> list[int]:
    """Return the ids of a process and all its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text(encoding="ascii").split():
            found += programs_of(int(child))
    return found


def nicer(pid: int, by: int) -> None:
    """Lower the priority of a process and all its descendants."""
    for program in programs_of(pid):
        for thread in Path(f"/proc/{program}/task").iterdir():
            with suppress(ProcessLookupError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, int(thread.name), by)


def processor_s(pid: int) -> float:
    """Return the processor time of a process and all its descendants, in seconds."""
    ticks = 0
    for program in programs_of(pid):
        after_name = Path(f"/proc/{program}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(after_name[11]) + int(after_name[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def starved(node: Service) -> Iterator[None]:
    """Leave a node about a tenth of its processor time, by lower priority and busy loops."""
    loops: list[subprocess.Popen[bytes]] = []
    nicer(node.pid, NICENESS)
    try:
        loops += [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(LOOPS)]
        yield
    finally:
        for loop in loops:
            end(loop)
