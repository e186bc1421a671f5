"""TLS to the API, a real Redis and a real PostgreSQL: untrusted peers are refused."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from sqlalchemy import make_url

from app.catalog import schema
from app.catalog.errors import CatalogUnavailableError
from app.store.port import StoreError
from app.store.redis import RedisStore
from tests import stores, tls_postgres
from tests.authority import Authority, Certificate
from tests.fuzz.messages import ONE as ONE_ASK
from tests.fuzz.messages import message
from tests.ports import free_port
from tests.postgres import Postgres, started
from tests.programs import end
from tests.service import Service, running
from tests.tools import need

LOOPBACK = "DNS:localhost,IP:127.0.0.1"
ONE = {"limit": 0.001, "burst": 1, "algorithm": "token_bucket", "enforcement": "deny"}
ASK = {"principal": "alice", "usage": {"requests": 1}}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Another authority, which no peer trusts."""
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


@pytest.fixture(scope="module")
def server(authority: Authority) -> Certificate:
    return authority.certify("server", san=LOOPBACK)


@pytest.fixture(scope="module")
def backend(authority: Authority) -> Certificate:
    """The certificate of a store or a database, valid for this name only."""
    return authority.certify("backend", san="DNS:localhost")


def over_tls(server: Certificate, ca: Path | None = None) -> dict[str, str]:
    """The settings of an API over TLS, optionally with a CA for client certificates."""
    settings = {"QUOTAGATE_TLS_CERT": str(server.cert), "QUOTAGATE_TLS_KEY": str(server.key)}
    return settings | ({"QUOTAGATE_TLS_CLIENT_CA": str(ca)} if ca else {})


# The API


def test_api_over_tls(authority: Authority, stranger: Authority, server: Certificate):
    with running(environment=over_tls(server), trust=authority.trusted()) as node:
        assert node.url.startswith("https://")
        node.put("user=alice", request_rate=ONE)
        assert node.ask(**ASK)["source"] == "store"
        with (
            httpx.Client(verify=stranger.trusted(), trust_env=False, timeout=60) as mistrustful,
            pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"),
        ):
            mistrustful.get(f"{node.url}/health/live")
        with httpx.Client(trust_env=False, timeout=60) as plain, pytest.raises(httpx.HTTPError):
            plain.get(f"{node.url}/health/live".replace("https", "http"))


ASKED = json.dumps(ASK).encode()
SENT = {
    "ask": message("POST", ONE_ASK, (), ASKED),
    "large ask": message("POST", ONE_ASK, (), ASKED.ljust(500_000)),
    "live": message("GET", "/health/live"),
}


def test_connection_over_tls_is_handed_over_with_all_that_came(authority: Authority, server: Certificate):
    """Pipelined requests to hot and other routes are answered in order, however TLS splits them."""
    with running(environment=over_tls(server), trust=authority.trusted()) as node:
        before = handed_over(node)
        for names in (
            ["ask"] * 3 + ["live", "ask"],
            ["large ask", "ask", "live", "large ask"],
            ["live", "ask"],
        ):
            with (
                socket.create_connection(node.address, timeout=60) as plain,
                authority.trusted().wrap_socket(plain, server_hostname="localhost") as caller,
            ):
                caller.sendall(b"".join([SENT[name] for name in names]))
                received = b""
                while received.count(b"}") < len(names):  # there is one in each body
                    part = caller.recv(65_536)
                    assert part, received
                    received += part
            bodies = received.split(b"HTTP/1.1 200 OK")[1:]
            assert [b'"live"' in body for body in bodies] == [name == "live" for name in names]
        assert handed_over(node) == before + 3


def handed_over(node: Service) -> float:
    """How many connections the node has handed over to uvicorn's protocol."""
    lines = node.http.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith("quotagate_connections_handed_over_total ")]
    return float(line.split()[1])


def test_client_without_a_certificate_of_the_client_ca_is_refused(
    authority: Authority, stranger: Authority, server: Certificate
):
    alice = authority.certify("alice")
    trust = authority.trusted(alice)
    with running(environment=over_tls(server, authority.ca), trust=trust) as node:
        assert node.ask(**ASK)["decision"] == "admit"
        for shown in (None, stranger.certify("eve")):
            context = authority.trusted(shown)
            with (
                httpx.Client(verify=context, trust_env=False, timeout=60) as outside,
                pytest.raises(httpx.HTTPError),
            ):
                outside.get(f"{node.url}/health/live")
        assert node.ask(**ASK)["decision"] == "admit"


def test_name_in_a_certificate_is_the_principal_of_its_asks(authority: Authority, server: Certificate):
    alice, bob = authority.certify("alice"), authority.certify("b", "/O=x", "URI:spiffe://example/bob")
    nobody, admin = authority.certify("n", "/CN=alice/CN=bob"), authority.certify("admin")
    nameless = {"usage": {"requests": 1}}

    @contextmanager
    def calling(node: Service, shown: Certificate, key: str = "") -> Iterator[httpx.Client]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        context = authority.trusted(shown)
        with httpx.Client(
            base_url=node.url, headers=headers, verify=context, trust_env=False, timeout=60
        ) as http:
            yield http

    with running(environment=over_tls(server, authority.ca), trust=authority.trusted(admin)) as node:
        for name in ("alice", "spiffe%3A%2F%2Fexample%2Fbob"):
            node.put(f"user={name}", request_rate=ONE)
        for shown, name in ((alice, "alice"), (bob, "spiffe://example/bob")):
            with calling(node, shown) as http:
                first = http.post("/v1/decisions", json=nameless)
                assert first.json()["decision"] == "admit"
                second = http.post("/v1/decisions", json={"principal": name, **nameless}).json()
                assert second["limited_by"]["bucket"].startswith("user="), "charged to the name"
                checked = http.get("/v1/check")
                assert (checked.status_code, checked.json()["limited_by"]) == (429, second["limited_by"])
                batch = {"asks": [nameless, {"principal": "carol", **nameless}]}
                refused = http.post("/v1/decisions:batch", json=batch)
                assert refused.status_code == 403
                assert refused.json()["errors"][0]["field"] == "/asks/1"
                header = {"X-Quotagate-Principal": "carol"}
                assert http.get("/v1/check", headers=header).status_code == 403
        with calling(node, nobody) as http:
            for ask in (nameless, {"principal": "alice", **nameless}):
                assert http.post("/v1/decisions", json=ask).status_code == 403, "no name, no asks"
        made = node.http.post("/v1/keys", json={"name": "gateway", "scopes": ["decide"]})
        with calling(node, alice, made.json()["key"]) as http:
            other = http.post("/v1/decisions", json={"principal": "carol", **nameless})
            assert other.json()["decision"] == "admit", "with a key it may speak for others"
            own = http.post("/v1/decisions", json=nameless).json()
            assert own["limited_by"]["bucket"] == "user=alice"
    closed = over_tls(server, authority.ca) | {"QUOTAGATE_OPEN_TO": ""}
    with running(environment=closed, trust=authority.trusted(admin)) as node, calling(node, alice) as http:
        assert http.post("/v1/decisions", json=nameless).status_code == 401, "a certificate is no key"


# The store


@contextmanager
def redis_over_tls(authority: Authority, server: Certificate) -> Iterator[int]:
    """Debian's redis-server, with TLS only and client certificates required; yields its port."""
    port = free_port()
    options = {"--tls-port": str(port), **tls_options(authority, server)}
    with stores.server("redis", *(text for option in options.items() for text in option)):
        yield port


def tls_options(authority: Authority, server: Certificate) -> dict[str, str]:
    """The options of a Redis with this certificate, which requires certificates of its clients."""
    return {
        "--tls-cert-file": str(server.cert),
        "--tls-key-file": str(server.key),
        "--tls-ca-cert-file": str(authority.ca),
        "--bind": "127.0.0.1",
    }


async def test_decisions_through_redis_over_tls(
    authority: Authority, stranger: Authority, backend: Certificate
):
    ours, theirs = authority.certify("node"), stranger.certify("thief")

    def url(port: int, shown: Certificate, ca: Path, host: str = "localhost") -> str:
        files = f"ssl_ca_certs={ca}&ssl_certfile={shown.cert}&ssl_keyfile={shown.key}"
        return f"rediss://{host}:{port}/0?{files}"

    with redis_over_tls(authority, backend) as port:
        with running(store_url=url(port, ours, authority.ca)) as node:
            node.put("user=alice", request_rate=ONE)
            first, second = node.ask(**ASK), node.ask(**ASK)
            assert (first["source"], first["decision"]) == ("store", "admit")
            assert (second["source"], second["decision"]) == ("store", "throttle")
        await examine(url(port, ours, authority.ca))
        for refused in (
            url(port, ours, stranger.ca),  # we do not trust the store
            url(port, theirs, authority.ca),  # it does not trust us
            f"rediss://localhost:{port}/0",  # neither
            url(port, ours, authority.ca, host="127.0.0.1"),  # not the name in its certificate
            f"redis://localhost:{port}/0",  # no TLS at all
        ):
            with pytest.raises(StoreError):
                await examine(refused)


def test_sentinels_and_the_primary_are_asked_over_tls(
    authority: Authority, stranger: Authority, server: Certificate, tmp_path: Path
):
    ours = authority.certify("node")
    files = f"ssl_ca_certs={authority.ca}&ssl_certfile={ours.cert}&ssl_keyfile={ours.key}"
    place = free_port()
    with redis_over_tls(authority, server) as port:
        configuration = tmp_path / "sentinel"
        configuration.write_text(
            f"sentinel monitor quotas 127.0.0.1 {port} 1\ntls-replication yes\n", encoding="utf-8"
        )
        options = {**tls_options(authority, server), "--tls-port": str(place), "--port": "0"}
        command = [str(need("redis-server")), str(configuration), "--sentinel"]
        with subprocess.Popen(
            [*command, *(text for option in options.items() for text in option)], stdout=subprocess.DEVNULL
        ) as sentinel:
            try:
                asyncio.run(_until_examined(f"rediss+sentinel://127.0.0.1:{place}/quotas?{files}"))
                for refused in (
                    f"redis+sentinel://127.0.0.1:{place}/quotas",
                    f"rediss+sentinel://127.0.0.1:{place}/quotas?ssl_ca_certs={stranger.ca}",
                    f"rediss+sentinel://127.0.0.1:{place}/quotas?{files}&sentinel_ssl_ca_certs={stranger.ca}",
                ):
                    with pytest.raises(StoreError):
                        asyncio.run(examine(refused))
            finally:
                end(sentinel)


async def _until_examined(url: str) -> None:
    """Wait until a sentinel has begun to watch the store."""
    async with asyncio.timeout(120):
        while True:
            try:
                await examine(url)
            except StoreError:
                await asyncio.sleep(0.05)  # between two looks at the condition that is waited for
            else:
                return


async def examine(url: str) -> None:
    store = RedisStore(url)
    try:
        await store.examine()
    finally:
        await store.close()


# The catalog


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    database = started()
    yield database
    database.remove()


def test_catalog_in_postgresql_over_tls(
    postgres: Postgres, authority: Authority, stranger: Authority, backend: Certificate
):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(backend.cert, backend.key)
    name = make_url(postgres.database()).database
    with tls_postgres.before(postgres.home / ".s.PGSQL.5432", context) as port:

        def url(ca: Path, host: str = "localhost") -> str:
            return (
                f"postgresql://postgres@{host}:{port}/{name}?sslmode=verify-full&sslrootcert={ca}"
                "&gssencmode=disable"
            )

        with running(database_url=url(authority.ca)) as node:
            node.put("user=alice", request_rate=5)
            assert node.http.get("/v1/quotas/user=alice").json()["quotas"] == {"request_rate": {"limit": 5}}
            assert node.http.get("/health/ready").json()["catalog"] == "ok"
        for mistrusted in (url(stranger.ca), url(authority.ca, host="127.0.0.1")):
            with pytest.raises(CatalogUnavailableError, match="certificate"):
                schema.upgrade(mistrusted)
        with pytest.raises(CatalogUnavailableError):
            schema.upgrade(url(authority.ca).replace("verify-full", "disable"))
