"""Quotagate is killed while clients work: the stated policy, no connection lost, recovery by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests import service, stores
from tests.kafka_proxy import proxy
from tests.kafka_proxy.producing import Worker
from tests.service import eventually

CLIENTS = 20


def connections(between: proxy.Proxy) -> set[int]:
    """The clients' ends of established connections to the brokers, as ports, according to the machine."""
    brokers = range(between.port + 1, between.port + 1 + proxy.NODES)
    found = set()
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        _, local, remote, state, *_ = line.split()
        if state == "01" and int(remote.rpartition(":")[2], 16) in brokers:
            found.add(int(local.rpartition(":")[2], 16))
    return found


@contextmanager
def working(bootstrap: str, topic: str) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        workers = [Worker(f"worker-{number}", bootstrap, topic) for number in range(CLIENTS)]
        for worker in workers:
            stack.callback(worker.close)
        yield workers


def all_go_on(workers: Sequence[Worker]) -> None:
    """Wait until each worker has sent three more records."""
    before = [worker.sent for worker in workers]

    def went_on() -> bool:
        assert [worker.error for worker in workers if worker.error] == []
        return all(worker.sent >= count + 3 for worker, count in zip(workers, before, strict=True))

    eventually(went_on, within_s=120)


def nobody_goes_on(between: proxy.Proxy, workers: Sequence[Worker]) -> None:
    """Wait until the workers are refused again and again; meanwhile nothing was sent."""
    eventually(lambda: refusals(between) >= 2 * CLIENTS)
    before = [worker.sent for worker in workers]
    again = refusals(between) + 2 * CLIENTS
    eventually(lambda: refusals(between) >= again)
    assert [worker.sent for worker in workers] == before
    assert [worker.error for worker in workers if worker.error] == []


def refusals(between: proxy.Proxy) -> float:
    """How often the proxy's policy made a client wait, by the proxy's own metric."""
    return between.counted("quotagate_proxy_decisions_total", decision="throttle", source="failure")


@pytest.mark.parametrize("policy", ["admit", "throttle"])
def test_clients_outlive_quotagate(policy, cluster, topic, tmp_path):
    # Clients and the proxy end before the nodes that they wait for.
    with ExitStack() as nodes, ExitStack() as stack:
        store = nodes.enter_context(stores.running("valkey"))
        catalog = f"sqlite:///{tmp_path / 'catalog.db'}"
        node = nodes.enter_context(service.running(store_url=store, database_url=catalog))
        node.put("user=ANONYMOUS", producer_byte_rate=10_000_000)
        config = {**proxy.settings_for(tmp_path, node), "onFailure": policy, "timeoutMs": 1_000}
        between = stack.enter_context(proxy.running(tmp_path, cluster.bootstrap, config))
        workers = stack.enter_context(working(between.bootstrap, topic))
        all_go_on(workers)
        before = connections(between)
        assert len(before) >= CLIENTS
        address = node.address
        node.process.kill()
        node.process.wait()
        eventually(lambda: "the policy answers" in between.logged())
        if policy == "admit":
            all_go_on(workers)
        else:
            nobody_goes_on(between, workers)
        nodes.enter_context(service.running(store_url=store, database_url=catalog, address=address))
        eventually(lambda: "Quotagate answers again" in between.logged())
        all_go_on(workers)
        assert before <= connections(between), "a connection was lost"
