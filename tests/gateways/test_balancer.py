"""Gateways behind a load balancer limit the rightmost address in X-Forwarded-For that they do not trust."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateways import gateway as gateways
from tests.gateways.conftest import Limit, limiting
from tests.gateways.gateway import Gateway, Kind
from tests.gateways.test_protect import FORGED, burst, is_throttled
from tests.service import Service, running

BALANCER = "127.0.0.2"
PROXY = "198.51.100.3"
"""A trusted proxy before the balancer."""


@pytest.fixture(scope="session")
def trusting_node() -> Iterator[Service]:
    trusted = {"QUOTAGATE_TRUSTED_PROXIES": f"{BALANCER}/32,198.51.100.0/24"}
    with running(environment=trusted) as node:
        yield node


@pytest.fixture
def limit(trusting_node: Service) -> Iterator[Limit]:
    with limiting(trusting_node) as setting:
        yield setting


@pytest.fixture(scope="module")
def behind(kind: Kind, trusting_node: Service, site: int) -> Iterator[Gateway]:
    """A gateway with the line for load balancers enabled."""
    with gateways.running(
        kind, trusting_node.address[1], site, kind.patience, kind.balancer
    ) as running_gateway:
        yield running_gateway


@pytest.mark.parametrize("person_at", ["203.0.113.7", "2001:db8::7"])
@pytest.mark.parametrize(
    "lines",
    [
        ["{}"],
        [f"{FORGED}, {{}}"],
        [f"{FORGED}, {{}}, {PROXY}"],
        [FORGED, f"{{}}, {PROXY}"],
        [f"no address, {{}}, {PROXY}, {PROXY}"],
    ],
    ids=["one hop", "a forged hop", "a forged hop and a proxy", "two lines", "nonsense and proxies"],
)
def test_the_rightmost_hop_that_is_not_trusted_is_limited(
    behind: Gateway, limit: Limit, lines: list[str], person_at: str
):
    limit(f"ip={person_at.replace(':', '%3A')}", burst(1))
    for other in (FORGED, PROXY, BALANCER):
        limit(f"ip={other}", 0)
    hops = [("X-Forwarded-For", line.format(person_at)) for line in lines]
    assert behind.ask("alice", source=BALANCER, headers=hops).status_code == 200
    assert is_throttled(behind.ask("alice", source=BALANCER, headers=hops))


def test_forwarded_address_from_outside_the_balancer_is_ignored(behind: Gateway, limit: Limit):
    limit("ip=127.0.0.9", burst(1))
    limit(f"ip={FORGED}", 0)
    hops = [("X-Forwarded-For", f"{FORGED}, {PROXY}"), ("X-Quotagate-IP", FORGED)]
    assert behind.ask("alice", source="127.0.0.9", headers=hops).status_code == 200
    assert is_throttled(behind.ask("alice", source="127.0.0.9", headers=hops))


def test_trusted_hops_alone_give_no_address(behind: Gateway, limit: Limit):
    limit("ip=*", 0)
    hops = [("X-Forwarded-For", PROXY)]
    assert behind.ask("alice", source=BALANCER, headers=hops).status_code == 200
