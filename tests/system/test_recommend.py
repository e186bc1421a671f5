"""Limits that are recommended from the log of a real node, and applied to it, for the same traffic again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.abuse import AbusedTraffic, is_abuser
from tests.logged import Logged, settings, workers
from tests.service import Service, running
from workers.generate.traffic import Event

pytestmark = pytest.mark.timeout(900)

TRAFFIC = AbusedTraffic(seed=91, events=6_000, rate=50, principals=80, zipf=0.9, abuse=0.06, loop_ms=1_500)
BEGIN_MS = 1_795_255_200_000
DAY_MS = 86_400_000
BATCH = 100


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[Logged]:
    """A node without quotas; the callers' clock decides, so that the traffic has its own time."""
    folder = tmp_path / "log"
    clock = {"QUOTAGATE_CLOCK": "caller"}
    with running(environment=settings(folder) | clock) as node:
        found = Logged((node, node), folder)
        with workers(found, clock):
            yield found


def drive(node: Service, begin_ms: int) -> Iterator[tuple[Event, str]]:
    """Send the traffic in order; yields each event with its decision."""
    events = list(TRAFFIC.stream())
    for batch in (events[first : first + BATCH] for first in range(0, len(events), BATCH)):
        asks = [event.ask | {"at_ms": begin_ms + event.at_ms} for event in batch]
        answer = node.http.post("/v1/decisions:batch", json={"asks": asks})
        assert answer.is_success, answer.text
        decided = answer.json()["decisions"]
        yield from zip(batch, (each["decision"] for each in decided), strict=True)


def test_recommended_limits_refuse_abusers_and_hardly_anybody_else(logged: Logged, tmp_path: Path):
    node, _ = logged.nodes
    assert {decision for _, decision in drive(node, BEGIN_MS)} == {"admit"}
    logged.until_written(TRAFFIC.events)
    out, key = tmp_path / "recommended", {"QUOTAGATE_KEY": node.admin_key, "QUOTAGATE_CLOCK": "caller"}
    ran = logged.run("recommend", "--out", str(out), environment=key)
    print(ran.stdout)
    assert ran.returncode == 0, ran.stderr
    file, summary = str(out / "quotas.yaml"), json.loads((out / "summary.json").read_text())
    planned = logged.run("quotas", "plan", "-f", file, "--url", node.url, environment=key)
    assert planned.returncode == 0, planned.stderr
    assert "user=*" in planned.stdout
    applied = logged.run("quotas", "apply", "-f", file, "--yes", "--url", node.url, environment=key)
    assert applied.returncode == 0, applied.stderr

    asked, refused, held = Counter[str](), Counter[str](), Counter[str]()
    for event, decision in drive(node, BEGIN_MS + DAY_MS):
        name = event.principal or event.ip or ""
        asked[name] += 1
        refused[name] += decision in {"throttle", "reject"}
        held[name] += decision != "admit"
    abusers = {name for name in asked if is_abuser(name)}
    others = asked.keys() - abusers
    assert len(abusers) == 3
    assert all(refused[name] > 0.5 * asked[name] for name in abusers), (refused, asked)
    assert sum(held[name] for name in others) <= 0.001 * sum(asked[name] for name in others)
    assert refused.total() == pytest.approx(summary["refused_asks"], rel=0.01), "as it was foretold"
    assert summary["outliers"] == 3
