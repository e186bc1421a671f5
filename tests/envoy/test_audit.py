"""The audit's checks of single rows, on the rows that requests of several descriptors leave in the log."""

from __future__ import annotations

from pathlib import Path

from tests.decision_log import worker
from tests.envoy.calls import connected, descriptor, serving
from tests.envoy.test_service import a_minute
from tests.system.test_log_contents import kinds, until
from workers.decision_log.read import read
from workers.jobs.audit.contradictions import contradictions, decision_rows, wrong_decision

SIX = [("rich", 1), ("poor", 1), ("rich", 3)]


def test_rows_of_requests_contradict_nothing(tmp_path: Path):
    asked = [descriptor({"principal": name, "remote_address": "10.0.0.7"}, hits) for name, hits in SIX]
    with serving(environment={"QUOTAGATE_LOG": "all"}) as (node, port), connected(port) as client:
        node.put("user=*", request_rate=a_minute(5))
        node.put("user=poor", request_rate=a_minute(2, shadow=True))
        node.put("ip=*", request_rate=a_minute(8))
        codes = [client.code(*asked) for _ in range(4)]
        assert codes == ["OK", "OVER_LIMIT", "OVER_LIMIT", "OVER_LIMIT"]
        with worker.inside(node.store_url, tmp_path / "log", limits={"age_s": 0.2}):
            until(tmp_path / "log", lambda rows: kinds(rows).count("decision") == 4 * len(SIX))
    rows = list(decision_rows(read(tmp_path / "log").to_batches()))
    assert len(rows) == 4 * len(SIX)
    for row in rows:
        assert not list(contradictions(row))
        assert wrong_decision(row, sequential=False) is None
