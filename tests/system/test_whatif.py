"""What-ifs over the log of real nodes: with all that happens to a deployment, and next to another one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests import stores
from tests.jobs.test_whatif import halved, text_of
from tests.logged import Logged, settings, two_nodes, workers
from tests.pushing import drill, factor
from tests.service import Service, eventually, running
from tests.stores import Server
from workers.decision_log.read import read
from workers.generate.quotas import DEFINITIONS
from workers.generate.traffic import Traffic

pytestmark = pytest.mark.timeout(900)

TRAFFIC = Traffic(seed=11, events=800)
SLOW = Traffic(seed=2, events=1_500, rate=5.0, principals=30)
BUSY = "team-0001"
START_MS = 1_795_255_200_000
CALL = 20
IN_CALLERS_TIME = {"QUOTAGATE_CLOCK": "caller"}
OUTCOMES = ("admit", "delay", "throttle", "reject")
Answers = Sequence[Mapping[str, Any]]


@pytest.fixture
def store() -> Iterator[Server]:
    with stores.server("valkey") as found:
        yield found


@pytest.fixture
def logged(tmp_path: Path, store: Server) -> Iterator[Logged]:
    with two_nodes(tmp_path / "log", store_url=store.url) as found, workers(found):
        yield found


def test_log_of_real_nodes_reproduces_itself_and_is_tried_under_other_quotas(
    logged: Logged, store: Server, tmp_path: Path
):
    """With changes of quotas, a reset, leases, a drill, and an outage of the store."""
    node, _ = logged.nodes
    logged.drive(TRAFFIC, tmp_path / "truth")
    answer = node.http.post("/v1/buckets:reset", json={"bucket": f"user={BUSY}"})
    assert answer.status_code == 204, answer.text
    node.put(f"user={BUSY}", request_rate=20, producer_byte_rate=400_000)
    others = asks_during_leases(node) + asks_in_drills(logged.nodes)
    others += asks_in_an_outage(logged.nodes, store)
    logged.drive(TRAFFIC, tmp_path / "again")
    rows = logged.until_written(2 * TRAFFIC.events + others)

    exported = logged.run(
        "quotas", "export", "--url", node.url, environment={"QUOTAGATE_KEY": node.admin_key}
    )
    assert exported.returncode == 0, exported.stderr
    file = tmp_path / "quotas.yaml"
    file.write_text(exported.stdout)
    summary = whatif(logged, file, tmp_path / "same")
    causes = summary["causes"]
    assert summary["other"] == 0
    assert summary["reproduced"] + sum(causes.values()) == summary["decisions"] == len(rows)
    assert summary["reproduced"] > 0.9 * 2 * TRAFFIC.events, summary
    assert causes["fallback"] > 0
    assert causes["factor_changed"] > 0
    assert summary["before"]["delay"] > 0
    kinds = set(read(logged.folder)["kind"].to_pylist())
    assert kinds >= {"quota", "reset", "lease", "settlement", "factor"}

    file.write_text("quotas: {user=*: {request_rate: {limit: 0, enforcement: deny}}}")
    summary = whatif(logged, file, tmp_path / "none")
    admitted = [row for row in rows if row["decision"] in {"admit", "delay"} and row["source"] != "fallback"]
    spent = sum(dict(row["usage"]).get("requests", 0) > 0 for row in admitted)
    assert summary["newly_refused"] == spent > 0


def asks_during_leases(node: Service) -> int:
    """Take two leases, ask meanwhile, and settle one; the other one lapses."""
    ask = {"principal": BUSY, "usage": {"requests": 3, "produce_bytes": 500}}
    first, _ = (node.lease({"ask": ask, "lease_ms": 1_000}) for _ in range(2))
    assert first["lease"], first
    for _ in range(5):
        node.ask(**ask)
    spent = {"lease": first["lease"], "usage": {"requests": 1, "produce_bytes": 100}}
    node.lease({"ask": ask, "lease_ms": 50, "settle": [spent]})
    return 5


def asks_in_drills(nodes: Sequence[Service]) -> int:
    """Ask during drills with half of the limits, and with none."""
    for share in (0.5, 0):
        drill(nodes[0], share, 600_000)
        for number in range(20):
            nodes[0].ask(principal=f"team-000{number % 3}", usage={"produce_bytes": 100_000, "requests": 1})
    assert nodes[0].http.delete("/v1/volumes:drill").status_code == 204
    eventually(lambda: [factor(node) for node in nodes] == [1.0, 1.0])
    return 40


def asks_in_an_outage(nodes: Sequence[Service], store: Server) -> int:
    """Ask for a delayed caller while the store hangs, and until it answers both nodes again."""
    ask = {"principal": BUSY, "usage": {"requests": 1, "produce_bytes": 10_000_000}}
    sources = [nodes[0].ask(**ask)["source"]]
    store.hold()
    sources += [nodes[0].ask(**ask)["source"] for _ in range(5)]
    store.go_on()
    for node in nodes:
        eventually(partial(_asked, node, ask, sources))
    assert sources.count("fallback") >= 5
    return len(sources)


def _asked(node: Service, ask: dict[str, Any], sources: list[str]) -> bool:
    """Ask, and note the source of the answer; whether it was the store."""
    sources.append(node.ask(**ask)["source"])
    return sources[-1] == "store"


def whatif(logged: Logged, quotas: Path, out: Path) -> dict[str, Any]:
    ran = logged.run("whatif", "--quotas", str(quotas), "--out", str(out))
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def test_half_of_the_limits_are_decided_as_a_real_service_decides_them(tmp_path: Path):
    """The same asks in the callers' time: the table is that of a service that has half of the limits."""
    file, out = tmp_path / "half.yaml", tmp_path / "out"
    file.write_text(text_of(halved()))
    with running(environment=settings(tmp_path / "log") | IN_CALLERS_TIME) as node:
        logged = Logged((node, node), tmp_path / "log")
        with workers(logged):
            before = driven(node, DEFINITIONS)
            logged.until_written(len(before))
        words = ("--quotas", str(file), "--out", str(out))
        ran = logged.run("whatif", *words, environment=IN_CALLERS_TIME)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    with running(environment=IN_CALLERS_TIME) as node:
        after = driven(node, halved())

    summary = json.loads((out / "summary.json").read_text())
    assert summary["reproduced"] == summary["decisions"] == SLOW.events
    assert {world: summary[world] for world in ("before", "after")} == {
        "before": decisions(before),
        "after": decisions(after),
    }
    both = [(is_refused(then), is_refused(now)) for then, now in zip(before, after, strict=True)]
    assert summary["newly_refused"] == both.count((False, True)) > 0
    assert summary["newly_admitted"] == both.count((True, False))
    asked_by = [event.principal for event in SLOW.stream()]
    for row in pq.read_table(out / "principals").to_pylist():
        for world, answers in (("before", before), ("after", after)):
            mine = [each for name, each in zip(asked_by, answers, strict=True) if name == row["principal"]]
            assert {outcome: row[f"{outcome}_{world}"] for outcome in OUTCOMES} == decisions(mine)
            assert row[f"wait_ms_{world}"] == sum(each["throttle_ms"] for each in mine)


def driven(node: Service, quotas: Mapping[str, Mapping[str, Any]]) -> Answers:
    """The answers of a node with these quotas to the traffic, in the callers' time."""
    for entity, by_key in quotas.items():
        node.put(entity, **by_key)
    asks = [event.ask | {"at_ms": START_MS + event.at_ms} for event in SLOW.stream()]
    answers = [
        answer for first in range(0, len(asks), CALL) for answer in node.batch(asks[first : first + CALL])
    ]
    assert {answer["source"] for answer in answers} == {"store"}
    return answers


def decisions(answers: Answers) -> dict[str, int]:
    found = Counter(each["decision"] for each in answers)
    return {outcome: found[outcome] for outcome in OUTCOMES}


def is_refused(answer: Mapping[str, Any]) -> bool:
    return answer["decision"] in {"throttle", "reject"}
