"""The peers of the benchmark work as described: they admit, they refuse, and they use a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.bench.arena import Arena
from tests.bench.works import ECHO, Subject, Work, selected

LIMITED = {"principal": "user-000001", "usage": {"fetch_bytes": 1}}
GENEROUS = {"principal": "user-000001", "usage": {"requests": 1, "produce_bytes": 1000}}
COSTS = {"fetch_bytes": 1, "produce_bytes": 10**9}
"""For each field, the most that its limit admits at once."""
RUN = (
    "quotagate/one quota/100 callers",
    "quotagate/new id/100 callers",
    "quotagate/refused by a rate",
    "quotagate/one quota/all odd",
    "fastapi/refused by a rate",
    "node/rate and bytes",
    "nginx/refused by a rate",
)
"""A row of each sort."""


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    with ExitStack() as stack:
        yield Arena(stack)


def client(arena: Arena, subject: Subject) -> httpx.Client:
    """A client of a peer; the test is skipped if the peer cannot run here."""
    if not arena.has(Work(subject=subject, kind="one quota")):
        pytest.skip(arena.skipped[subject])
    host, port = arena.address(subject)
    return httpx.Client(base_url=f"http://{host}:{port}", trust_env=False, timeout=60)


def test_echo_sends_back_what_it_got(arena):
    with client(arena, "echo") as http:
        assert http.post("/v1/decisions", content=b'{"any": "thing"}').content == b'{"any": "thing"}'


@pytest.mark.parametrize("subject", ["fastapi", "node"])
def test_a_peer_with_a_store_admits_up_to_its_limits(arena, subject):
    with client(arena, subject) as http:
        asks = [LIMITED, LIMITED, GENEROUS]
        decisions = [http.post("/v1/decisions", json=ask).json() for ask in asks]
        again = http.post("/v1/decisions:batch", json={"asks": asks}).json()["decisions"]
    assert [decision["decision"] for decision in decisions] == ["admit", "throttle", "admit"]
    assert [decision["decision"] for decision in again] == ["throttle", "throttle", "admit"]
    assert decisions[0]["throttle_ms"] == 0
    assert 0 < decisions[1]["throttle_ms"] <= 60_000


def test_nginx_admits_up_to_its_limits(arena):
    with client(arena, "nginx") as http:
        statuses = [http.get(f"/refused?principal={who}").status_code for who in ("a", "a", "b")]
        assert statuses == [200, 429, 200]
        assert http.get("/one?principal=a").status_code == 200


def test_the_gcra_script_charges_all_limits_or_none(arena):
    """One of two limits refuses, so the other is not charged."""
    with client(arena, "fastapi") as http:
        limited, generous = (
            {"principal": "user-000002", "usage": {name: cost}} for name, cost in COSTS.items()
        )
        both = {"principal": "user-000002", "usage": COSTS}
        asks = [limited, both, generous]
        decisions = [http.post("/v1/decisions", json=ask).json()["decision"] for ask in asks]
    assert decisions == ["admit", "throttle", "admit"]


@pytest.mark.parametrize("name", ["echo", *RUN])
def test_a_work_can_be_measured(arena, name):
    (work,) = [ECHO] if name == "echo" else selected(name)
    if not arena.has(work):
        pytest.skip(arena.skipped[work.subject])
    found, api_ns, store_ns = arena.run(work, warm_s=0.1, seconds=0.2, connections=4)
    assert found.answers
    assert api_ns > 0
    assert (store_ns > 0) == (work.subject not in {"echo", "nginx"})
