"""WebSockets through real gateways: they reach the site, and each counts as a request."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator

import pytest

from tests import stores
from tests.envoy.calls import serving
from tests.gateways import gateway as gateways
from tests.gateways import sockets
from tests.gateways.conftest import Limit
from tests.gateways.gateway import PASSWORDS, Gateway, Kind
from tests.gateways.sockets import BINARY, CLOSE, Noting, WebSocket
from tests.gateways.test_envoy_ratelimit import PATIENT, Cluster, Site, behind_envoy
from tests.gateways.test_protect import burst
from tests.service import Service, eventually

FORGED = [("X-Quotagate-Principal", "mallory"), ("X-Quotagate-IP", "203.0.113.66")]


@pytest.fixture(scope="module")
def chat() -> Iterator[Noting]:
    with sockets.site() as found:
        yield found


@pytest.fixture(scope="module")
def checks(node: Service) -> Iterator[Noting]:
    """A relay before the node, which keeps the heads of the gateways' checks."""
    with sockets.relay(node.address[1]) as found:
        yield found


@pytest.fixture(scope="module", params=gateways.KINDS, ids=[kind.name for kind in gateways.KINDS])
def gateway(request: pytest.FixtureRequest, checks: Noting, chat: Noting) -> Iterator[Gateway]:
    kind: Kind = request.param
    with gateways.running(kind, checks.port, chat.port, kind.patience) as running_gateway:
        eventually(lambda: running_gateway.ask("bob").status_code == 200)
        checks.heads.clear()
        chat.heads.clear()
        yield running_gateway


def connected(gateway: Gateway, *headers: tuple[str, str], person: str = "alice") -> WebSocket:
    return WebSocket(gateway.dial(person), [*gateway.credentials(person), *headers])


def test_websocket_passes_both_ways_and_its_request_is_charged(gateway: Gateway, limit: Limit):
    limit(gateway.kind.entity("alice"), burst(3))
    with connected(gateway) as one, connected(gateway) as other:
        assert (one.status, one.fields["x-site"]) == (101, "yes")
        assert one.fields["ratelimit"].startswith('"request_rate";r=2')
        assert other.fields["ratelimit"].startswith('"request_rate";r=1')
        for number in range(20):
            assert one.echoed(b"hello %d" % number) == b"hello %d" % number
        large = bytes(range(256)) * 300
        assert other.echoed(large, BINARY) == large
        assert one.echoed(b"\x03\xe8", CLOSE) == b"\x03\xe8"
    answer = gateway.ask("alice")
    assert answer.headers["ratelimit"].startswith('"request_rate";r=0'), "frames are not charged"


def test_websocket_over_the_limit_is_refused_and_does_not_reach_the_site(
    gateway: Gateway, limit: Limit, chat: Noting
):
    limit(gateway.kind.entity("alice"), burst(1))
    with connected(gateway) as admitted:
        assert admitted.status == 101
        before = len(chat.heads)
        for _ in range(3):
            with connected(gateway) as refused:
                assert refused.status == 429
                assert "retry-after" in refused.fields
                assert "x-site" not in refused.fields
        with connected(gateway, person="bob") as other:
            assert other.status == 101
        assert len(chat.heads) == before + 1
        assert admitted.echoed(b"still there") == b"still there"


def test_check_of_a_websocket_is_a_plain_request(
    gateway: Gateway, limit: Limit, checks: Noting, chat: Noting
):
    limit(gateway.kind.entity("alice"), burst(9))
    before = len(checks.heads)
    with connected(gateway, *FORGED, ("Sec-WebSocket-Protocol", "chat")) as one:
        assert one.status == 101
        assert "mallory" not in chat.heads[-1]
        assert "203.0.113.66" not in chat.heads[-1]
    asked = [head.lower() for head in checks.heads[before:] if "/v1/check" in head]
    assert asked
    for head in asked:
        assert "\r\nupgrade:" not in head
        assert "connection: upgrade" not in head
        assert "mallory" not in head


@pytest.mark.parametrize(
    "protocol", ["h2c", "h2c, websocket", "TLS/1.0", "websocket-ish", "h2c\r\nUpgrade: websocket"]
)
def test_nothing_else_is_upgraded(gateway: Gateway, chat: Noting, protocol: str):
    """After an upgrade to h2c, a visitor could send requests that nobody checks."""
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": protocol, "HTTP2-Settings": "AAMAAABkAAQ"}
    before = len(chat.heads)
    with WebSocket(gateway.dial("alice"), gateway.credentials("alice"), upgrade) as one:
        assert one.status in {200, 400, 403, 426, 501}
    for head in chat.heads[before:]:
        assert "\nupgrade:" not in head.lower()


def test_plain_requests_to_the_site_have_no_upgrade(gateway: Gateway, chat: Noting):
    assert gateway.ask("alice").status_code == 200
    assert "\nupgrade:" not in chat.heads[-1].lower()
    assert "connection: upgrade" not in chat.heads[-1].lower()


# Envoy's rate-limit service


@pytest.fixture(scope="module")
def rated(chat: Noting) -> Iterator[tuple[Site, Cluster]]:
    with (
        stores.server("valkey") as store,
        serving(store_url=store.url) as (one, first),
        serving(store_url=store.url, database_url=one.database_url) as (other, second),
        behind_envoy((first, second), chat.port, PATIENT) as found,
    ):
        eventually(lambda: found.get("bob").status_code == 200)
        yield found, Cluster((one, other), (first, second), store)


def test_websocket_through_the_rate_limit_service(rated: tuple[Site, Cluster], chat: Noting):
    site, cluster = rated
    token = b64encode(f"alice:{PASSWORDS['alice']}".encode()).decode()

    def connect(upgrade: dict[str, str] | None = None) -> WebSocket:
        return WebSocket(sockets.dial(site.port), [("Authorization", f"Basic {token}")], upgrade)

    with connect({"Connection": "Upgrade", "Upgrade": "h2c"}) as refused:
        assert refused.status in {200, 403}
    assert not any("upgrade: h2c" in head.lower() for head in chat.heads)
    cluster.put("user=alice", request_rate=burst(2))
    with connect() as one, connect() as other:
        assert (one.status, other.status, one.fields["x-site"]) == (101, 101, "yes")
        assert one.echoed(b"hello") == b"hello"
        assert other.echoed(b"hello") == b"hello"
        before = len(chat.heads)
        with connect() as refused:
            assert refused.status == 429
        assert len(chat.heads) == before
