"""The rate-limit service for Envoy, asked over gRPC, on a real node with a real store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.envoy.calls import Client, connected, serving
from tests.service import Service


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[Service, int]]:
    with serving(environment={"QUOTAGATE_LOG": "all"}) as found:
        yield found


@pytest.fixture
def node(started: tuple[Service, int]) -> Iterator[Service]:
    """A node without quotas and counts."""
    service, _ = started
    with redis.Redis.from_url(service.store_url) as store:
        store.flushall()
    yield service
    for each in service.http.get("/v1/quotas").json()["quotas"]:
        service.http.delete(f"/v1/quotas/{each['entity']}").raise_for_status()


@pytest.fixture
def client(started: tuple[Service, int], node: Service) -> Iterator[Client]:
    with connected(started[1]) as found:
        yield found


def a_minute(limit: int, **fields: object) -> dict[str, object]:
    """So many a minute, at once if need be."""
    return {"limit": limit / 60, "samples": 11, "sample_ms": 6_000, "enforcement": "deny", **fields}


def test_limit_is_enforced_with_the_headers_of_a_check(node: Service, client: Client):
    node.put("user=alice", request_rate=a_minute(2))
    first = client.ask({"principal": "alice"})
    assert (first.overall_code, len(first.statuses)) == (1, 1)
    status = first.statuses[0]
    assert (status.current_limit.requests_per_unit, status.current_limit.unit) == (2, 2)
    assert (status.limit_remaining, status.duration_until_reset.seconds) == (1, 60)
    assert not first.response_headers_to_add
    assert client.code({"principal": "alice"}) == "OK"
    refused = client.ask({"principal": "alice"})
    assert (refused.overall_code, refused.statuses[0].code) == (2, 2)
    headers = {header.key: header.value for header in refused.response_headers_to_add}
    assert headers["ratelimit-policy"] == '"request_rate";q=2;w=60'
    wait_s = int(headers["retry-after"])
    assert 0 < wait_s <= 66
    assert headers["ratelimit"] == f'"request_rate";r=0;t={wait_s}'
    assert 0 < int(headers["x-throttle-ms"]) <= wait_s * 1000
    assert refused.statuses[0].duration_until_reset.ToMilliseconds() == int(headers["x-throttle-ms"])
