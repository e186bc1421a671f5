"""Traffic sent to real nodes: their answers and counts agree with the truth that is written."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.clients.scripted import ADMITTED, Reply, Request, answer, overloaded, serving
from tests.service import ADMIN_KEY, Service, running
from workers.generate.__main__ import cli
from workers.generate.drive import SHED_TIMES
from workers.generate.quotas import DEFINITIONS
from workers.generate.traffic import Traffic

EVENTS = 3_000


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Service, Service]]:
    """Two nodes with one store and one catalog."""
    with (
        running() as first,
        running(store_url=first.store_url, database_url=first.database_url) as second,
    ):
        yield first, second


@pytest.fixture(scope="module")
def driven(nodes: tuple[Service, Service], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ground truth of one run over both nodes."""
    truth = tmp_path_factory.mktemp("driven") / "truth"
    urls = [part for node in nodes for part in ("--url", node.url)]
    quotas = ["--set-quotas", "--key", ADMIN_KEY]
    ran = drive(*urls, *quotas, "--events", str(EVENTS), "--seed", "5", "--retries", "1", truth=truth)
    assert ran.exit_code == 0, ran.output
    assert f"truth in {truth}" in ran.stdout
    return truth


def drive(*arguments: str, truth: Path) -> Any:
    return CliRunner().invoke(cli, ["drive", *arguments, "--truth", str(truth)], env={"COLUMNS": "200"})


def totals_of(truth: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((truth / "totals.json").read_text())
    return found


def test_both_nodes_decided_what_the_truth_counts(nodes, driven):
    totals = totals_of(driven)
    counted = [decided_by(node) for node in nodes]
    assert all(sum(each.values()) > EVENTS / 4 for each in counted)
    overall = totals["overall"]
    assert counted[0] + counted[1] == Counter(
        {o: overall[o] for o in ("admit", "delay", "throttle", "reject")}
    )
    assert overall["asks"] == EVENTS + totals["retries"]
    assert totals["failed"] == 0
    assert totals["sources"] == {"store": overall["asks"]}, "each node knew the quotas from the first ask"
    assert totals["quotas"] == DEFINITIONS
    assert nodes[1].http.get("/v1/quotas/user=*").json()["quotas"] == DEFINITIONS["user=*"]


def decided_by(node: Service) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in node.http.get("/metrics").text.splitlines():
        if line.startswith("quotagate_decisions_total{"):
            labels, count = line.rsplit(" ", 1)
            found[labels.split('decision="')[1].split('"')[0]] += int(float(count))
    return found


def test_each_principal_is_charged_what_the_truth_says(nodes, driven):
    principals = totals_of(driven)["principals"]
    assert len(principals) > 300
    busiest = sorted(principals, key=lambda name: -principals[name]["charged"])[:25]
    assert principals[busiest[0]]["charged"] == 100, "the busiest came to its limit"
    for name in busiest:
        shown = (
            nodes[0]
            .http.get("/v1/buckets", params={"bucket": f"user={name}", "quota": "producer_ids_rate"})
            .json()["buckets"]
        )
        assert shown[0]["charged_ids"] == principals[name]["charged"], name


def test_each_use_is_recorded_with_its_outcome(driven):
    uses = pq.read_table(driven / "uses-0.parquet").to_pylist()
    first: dict[int, set[int]] = {}
    for event in Traffic(5, EVENTS).stream():
        first[event.number] = set(event.ids)
    sent: dict[int, set[int]] = {}
    brought_in: Counter[tuple[str, int]] = Counter()
    for use in uses:
        sent.setdefault(use["event"], set()).add(use["id"])
        brought_in[use["principal"], use["id"]] += use["charged"]
        assert use["charged"] == (use["new"] and use["decision"] in ("admit", "delay"))
        assert use["digest"] is None
    assert sent == {number: ids for number, ids in first.items() if ids}
    assert max(brought_in.values()) == 1
    assert sum(brought_in.values()) == totals_of(driven)["overall"]["charged"]


def test_paced_asks_are_sent_when_their_time_comes(nodes, tmp_path):
    ran = drive(
        *("--url", nodes[0].url, "--events", "40", "--rate", "20", "--batch", "1", "--paced"),
        truth=tmp_path / "truth",
    )
    assert ran.exit_code == 0, ran.output
    totals = totals_of(tmp_path / "truth")
    assert totals["to_ms"] - totals["from_ms"] >= 1_900, "40 asks at 20 a second"


def test_a_throttled_connection_is_asked_again_as_a_recheck(nodes, tmp_path):
    """A connection over its address's rate is throttled; its re-check is rejected."""
    node = nodes[0]
    node.put("ip=*", connection_creation_rate={"limit": 1, "samples": 2, "sample_ms": 5_000})
    storm = ("--url", node.url, "--events", "1600", "--rate", "200", "--principals", "1", "--batch", "100")
    decided = {}
    for retries in (0, 1):
        truth = tmp_path / str(retries)
        ran = drive(*storm, "--retries", str(retries), truth=truth)
        assert ran.exit_code == 0, ran.output
        decided[retries] = totals_of(truth)
    assert decided[0]["retries"] == decided[0]["connections"]["reject"] == 0
    assert decided[0]["connections"]["throttle"] > 100
    assert decided[1]["retries"] >= decided[1]["connections"]["reject"] > 0


def test_unreachable_node_is_reported_and_counted(nodes, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        away = f"http://127.0.0.1:{taken.getsockname()[1]}"
    ran = drive(*("--url", nodes[0].url, "--url", away, "--events", "200"), truth=tmp_path / "truth")
    assert ran.exit_code == 1
    assert "100 asks got no decision" in ran.stderr
    assert away in ran.stderr
    totals = totals_of(tmp_path / "truth")
    assert (totals["failed"], totals["overall"]["asks"]) == (100, 100)


def test_shed_asks_are_sent_again_and_charged_once(tmp_path):
    """A busy node sheds the asks at first; the same asks succeed a second later."""
    with serving() as busy:
        busy.plays(overloaded("1"), overloaded("1"), decided)
        ran = drive("--url", busy.url, "--events", "40", "--at-once", "1", truth=tmp_path / "truth")
    assert ran.exit_code == 0, ran.output
    totals = totals_of(tmp_path / "truth")
    assert (totals["failed"], totals["overall"]["asks"]) == (0, 40)
    first, second, third, fourth = (request.body for request in busy.requests)
    assert first == second == third != fourth


def test_node_that_always_sheds_is_reported_and_counted(tmp_path):
    with serving() as busy:
        busy.plays(overloaded("0"))
        ran = drive("--url", busy.url, "--events", "20", "--at-once", "1", truth=tmp_path / "truth")
    assert ran.exit_code == 1
    assert totals_of(tmp_path / "truth")["failed"] == 20
    assert len(busy.requests) == 1 + SHED_TIMES
    assert "503" in totals_of(tmp_path / "truth")["failures"][0]


def decided(request: Request) -> Reply:
    return answer({"decisions": [ADMITTED] * len(request.body["asks"])})


def test_quotas_that_cannot_be_set_end_the_command_before_any_ask(nodes, tmp_path):
    ran = drive(
        *("--url", nodes[0].url, "--events", "10", "--set-quotas", "--key", "wrong"), truth=tmp_path / "truth"
    )
    assert ran.exit_code == 1
    assert "401" in ran.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--events", "10"], "--url"),
        (["--url", "localhost:8080", "--events", "10"], "--url"),
        (["--url", "http://127.0.0.1:1", "--events", "10", "--batch", "1001"], "--batch"),
        (["--url", "http://127.0.0.1:1", "--events", "10", "--at-once", "0"], "--at-once"),
        (["--url", "http://127.0.0.1:1"], "--events"),
    ],
)
def test_wrong_option_is_named_and_nothing_is_written(tmp_path, arguments, named):
    ran = drive(*arguments, truth=tmp_path / "truth")
    assert ran.exit_code == 2
    assert named in ran.stderr
    assert list(tmp_path.iterdir()) == []
