"""Four nodes under load: a change is in effect on each within a second, also on one that missed polls."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from app.catalog import schema
from tests import stores
from tests.polls import follows_within_a_second, polls_until
from tests.postgres import Postgres, started
from tests.service import Service, eventually, running

NODES, ROUNDS = 4, 10


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    server = started()
    yield server
    server.remove()


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def nodes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Service]]:
    """Four nodes of one store and one catalog."""
    url = f"sqlite:///{tmp_path_factory.mktemp('nodes') / 'catalog.db'}"
    if request.param == "postgresql":
        server: Postgres = request.getfixturevalue("postgres")
        url = server.database()
    schema.upgrade(url)
    with ExitStack() as stack:
        store = stack.enter_context(stores.running("valkey"))
        nodes = [stack.enter_context(running(store_url=store, database_url=url)) for _ in range(NODES)]
        yield nodes
        for node in nodes:  # all at once; the stack waits for each
            node.process.terminate()


@contextmanager
def load(nodes: list[Service]) -> Iterator[None]:
    """Ask every node continuously until the end, one request after the other."""
    over = threading.Event()
    failed: list[object] = []

    def ask(node: Service) -> None:
        with httpx.Client(base_url=node.url, timeout=60, trust_env=False) as http:
            while not over.is_set():
                answer = http.post(
                    "/v1/decisions",
                    json={"principal": "somebody", "usage": {"requests": 1, "produce_bytes": 9}},
                )
                if answer.status_code != 200:
                    failed.append(answer.text)

    threads = [threading.Thread(target=ask, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failed


def limit_at(node: Service) -> object:
    """The limit that applies to a decision of this node."""
    quotas = node.ask(principal="alice", usage={"requests": 0}, mode="peek", detail=True)["quotas"]
    return quotas[0]["limit"] if quotas else None


def polls_until_all_decide_by(nodes: list[Service], limit: int) -> int:
    """The polls from the answer to a change until the last node decides by it, each watched on its own."""
    nodes[0].put("user=alice", request_rate=limit)
    took: list[int] = []

    def watch(node: Service) -> None:
        took.append(polls_until(lambda: limit_at(node) == limit))

    threads = [threading.Thread(target=watch, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(took) == len(nodes)
    return max(took)


def test_change_is_in_effect_on_four_nodes_under_load_within_a_second(nodes: list[Service]):
    nodes[0].put("user=*", request_rate=10**9, producer_byte_rate=10**9)
    with load(nodes):
        polls_until_all_decide_by(nodes, 1)
        took = [polls_until_all_decide_by(nodes, 2 + number) for number in range(ROUNDS)]
        nodes[1].put("user=alice", request_rate=77)
        assert limit_at(nodes[1]) == 77, "the node that takes a change decides by it before it answers"
    follows_within_a_second(f"in effect on {NODES} nodes", took)


def test_node_that_missed_polls_follows(nodes: list[Service]):
    held, other = nodes[3], nodes[0]
    os.kill(held.pid, signal.SIGSTOP)
    try:
        other.put("user=alice", request_rate=1)
        other.put("user=alice", request_rate=2)
        other.put("user=bob", request_rate=3)
        assert other.http.delete("/v1/quotas/user=bob").status_code == 204
        for node in nodes[1:3]:  # their polls found the change; the paused node missed these polls
            eventually(lambda node=node: limit_at(node) == 2)  # type: ignore[misc]
    finally:
        os.kill(held.pid, signal.SIGCONT)
    eventually(lambda: limit_at(held) == 2)
    bob = held.ask(principal="bob", usage={"requests": 1}, detail=True)
    assert "user=bob" not in [quota["entity"] for quota in bob["quotas"]]
