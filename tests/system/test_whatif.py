"""What-ifs over the log of two real nodes, with a quota that changed and a bucket that was reset."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.logged import Logged, two_nodes, workers
from workers.generate.traffic import Traffic

pytestmark = pytest.mark.timeout(900)

TRAFFIC = Traffic(seed=11, events=800)
BUSY = "team-0001"


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[Logged]:
    with two_nodes(tmp_path / "log") as found, workers(found):
        yield found


def test_log_of_real_nodes_reproduces_itself_and_is_tried_under_other_quotas(logged: Logged, tmp_path: Path):
    node, _ = logged.nodes
    logged.drive(TRAFFIC, tmp_path / "truth")
    answer = node.http.post("/v1/buckets:reset", json={"bucket": f"user={BUSY}"})
    assert answer.status_code == 204, answer.text
    node.put(f"user={BUSY}", request_rate=20, producer_byte_rate=400_000)
    logged.drive(TRAFFIC, tmp_path / "again")
    rows = logged.until_written(2 * TRAFFIC.events)

    exported = logged.run(
        "quotas", "export", "--url", node.url, environment={"QUOTAGATE_KEY": node.admin_key}
    )
    assert exported.returncode == 0, exported.stderr
    file = tmp_path / "quotas.yaml"
    file.write_text(exported.stdout)
    summary = whatif(logged, file, tmp_path / "same")
    assert summary["other"] == 0
    assert summary["reproduced"] + sum(summary["causes"].values()) == summary["decisions"] == len(rows)
    assert summary["reproduced"] > 0.9 * len(rows), summary

    file.write_text("quotas: {user=*: {request_rate: {limit: 0, enforcement: deny}}}")
    summary = whatif(logged, file, tmp_path / "none")
    admitted = [row for row in rows if row["decision"] in {"admit", "delay"}]
    spent = sum(dict(row["usage"]).get("requests", 0) > 0 for row in admitted)
    assert summary["newly_refused"] == spent > 0


def whatif(logged: Logged, quotas: Path, out: Path) -> dict[str, Any]:
    ran = logged.run("whatif", "--quotas", str(quotas), "--out", str(out))
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found
