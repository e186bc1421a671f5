"""A rolling restart is free: two nodes restart in turn, and no caller gets an error or is charged twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import httpx
import pytest

from tests.deploy.arrangement import Arrangement, arranged
from tests.gateways import gateway as gateways
from tests.gateways.gateway import CADDY, ENVOY, NGINX, PASSWORDS, Kind
from tests.gateways.rolling import DRAIN_MS, KEPT, Answers, Caller, Pair, asked_by, decided_by, is_limited
from tests.gateways.test_envoy_ratelimit import CLOSED, behind_envoy
from tests.ports import free_port
from tests.service import eventually

MANY = 20
SLOWEST_S = 0.5


def rolled(
    caller: Caller,
    restart: Callable[[int], None],
    restarts: int,
    charged: Callable[[], int],
    logged: Callable[[], str] = str,
) -> Answers:
    """Restart nodes in turn while callers ask: each ask is admitted and charged once.

    Args:
        charged: the number of asks that were charged so far.
        logged: the log of the gateway.
    """
    with (
        caller() as ask
    ):  # the first is slow: a gateway reads a password's hash, and learns which nodes are up
        eventually(lambda: ask() == 200)
    before = charged()
    with asked_by(caller) as answers:
        for n in range(restarts):
            restart(n % 2)
    print(f"{restarts} restarts: {answers}")
    assert answers.statuses.keys() == {200}, f"{answers}\n{logged()[-5_000:]}"
    assert charged() - before == answers.statuses[200]
    return answers


# nginx of compose, before the routes themselves


def behind_compose(restarts: int) -> Answers:
    with arranged({"QUOTAGATE_DRAIN_MS": str(DRAIN_MS)}) as both:
        both.http.put("/v1/quotas/user=rolling", json={"controller_mutation_rate": KEPT}).raise_for_status()
        for node in both.replicas:
            eventually(lambda: is_limited(node, "rolling", "mutations"))  # noqa: B023
        charged = partial(both.charged, "rolling")
        return rolled(partial(posting, both), partial(restart, both), restarts, charged)


@contextmanager
def posting(both: Arrangement) -> Iterator[Callable[[], int]]:
    ask = {"principal": "rolling", "usage": {"mutations": 1}}
    with both.client() as http:
        yield lambda: http.post("/v1/decisions", json=ask).status_code


def restart(both: Arrangement, n: int) -> None:
    assert both.replicas[n].stop() == 0
    node = both.revive(n)
    eventually(lambda: decided_by(node))


# Gateways before a site: a request that was not checked is refused


def second_node(kind: Kind, first: int, second: int) -> dict[str, str]:
    """The line of an example that names one node, and the lines for two."""
    if kind is NGINX:
        line = f"server 127.0.0.1:{first} fail_timeout=1s;"
    elif kind is CADDY:
        line = f"forward_auth 127.0.0.1:{first} "
        return {f"\t\t{line}": f"\t\t{line}127.0.0.1:{second} "}
    else:
        place = f"{{socket_address: {{address: 127.0.0.1, port_value: {first}}}}}"
        line = f"              - endpoint: {{address: {place}}}\n"
    return {line: line + line.replace(str(first), str(second))}


def behind_example(kind: Kind, site: int, restarts: int) -> Answers:
    with ExitStack() as stack:
        pair = Pair(stack, [{}, {}])
        pair.limit(kind.entity("alice"), kind.principal.format("alice"))
        first, second = (node.address[1] for node in pair.nodes)
        closed = {kind.open_line: kind.closed_line}
        changes = (second_node(kind, first, second), closed)
        gateway = stack.enter_context(gateways.running(kind, first, site, *changes))
        charged = partial(pair.charged, kind.principal.format("alice"))
        return rolled(gateway.visits, pair.restart, restarts, charged, gateway.logged)


def over_grpc(site: int, restarts: int) -> Answers:
    ports = free_port(), free_port()
    with ExitStack() as stack:
        pair = Pair(stack, [{"QUOTAGATE_ENVOY_PORT": str(port)} for port in ports])
        pair.limit("user=alice", "alice")
        envoy = stack.enter_context(behind_envoy(ports, site, CLOSED))

        @contextmanager
        def visits() -> Iterator[Callable[[], int]]:
            url = f"http://127.0.0.1:{envoy.port}/"
            with httpx.Client(auth=("alice", PASSWORDS["alice"]), timeout=60, trust_env=False) as http:
                yield lambda: http.get(url).status_code

        return rolled(visits, pair.restart, restarts, partial(pair.charged, "alice"), envoy.logged)


def test_restarts_behind_nginx_are_free():
    behind_compose(2)


def test_restarts_behind_envoy_over_grpc_are_free(site: int):
    over_grpc(site, 2)


@pytest.mark.prove
def test_many_restarts_behind_nginx_are_free():
    assert behind_compose(MANY).slowest_s < SLOWEST_S


@pytest.mark.prove
@pytest.mark.parametrize("kind", [NGINX, CADDY, ENVOY], ids=lambda kind: kind.name)
def test_many_restarts_behind_a_gateway_are_free(kind: Kind, site: int):
    assert behind_example(kind, site, MANY).slowest_s < SLOWEST_S


@pytest.mark.prove
def test_many_restarts_behind_envoy_over_grpc_are_free(site: int):
    assert over_grpc(site, MANY).slowest_s < SLOWEST_S
