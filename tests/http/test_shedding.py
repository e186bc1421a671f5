"""A shed caller learns when to retry, and that nothing was charged."""

from __future__ import annotations

import pytest

from tests.http.conftest import Node

ASK = {"usage": {"requests": 1}}


@pytest.mark.parametrize(("path", "body"), [("/v1/decisions", ASK), ("/v1/decisions:batch", {"asks": [ASK]})])
async def test_shed_decisions_are_503_with_retry_after(node: Node, path: str, body: object):
    node.admission.overloaded = "age"
    waits = set()
    for _ in range(40):
        answer = await node.ask(body, path)
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["type"] == "urn:quotagate:overloaded"
        assert answer.json()["status"] == 503
        waits.add(answer.headers["retry-after"])
    assert {"1", "2", "3"} >= waits
    assert len(waits) > 1
    assert 'quotagate_shed_total{cause="age"} 40.0' in (await node.http.get("/metrics")).text


@pytest.mark.parametrize(("query", "status"), [("", 429), ("?deny_status=403", 403)])
async def test_a_check_is_refused_as_a_quota_refuses(node: Node, query: str, status: int):
    node.admission.overloaded = "age"
    answer = await node.http.get(f"/v1/check{query}")
    assert answer.status_code == status
    said = answer.json()
    assert (said["decision"], said["charged"], said["limited_by"]) == ("throttle", False, None)
    assert 1_000 <= said["throttle_ms"] <= 3_000
    assert answer.headers["x-throttle-ms"] == str(said["throttle_ms"])
    assert 1 <= int(answer.headers["retry-after"]) <= 3
    assert 'quotagate_shed_total{cause="age"} 1.0' in (await node.http.get("/metrics")).text


async def test_health_is_not_shed(node: Node):
    node.admission.overloaded = "age"
    assert (await node.http.get("/health/live")).status_code == 200
