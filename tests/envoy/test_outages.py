"""The rate-limit service while the store is held, beyond a deadline, under too much load, and over TLS."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest

from app.admission.answers import ADMITTED
from app.admission.errors import OverloadedError
from app.admission.metrics.metrics import Metrics
from app.admission.plan import PlannedAsk
from app.domain.ask import Ask
from app.domain.caller import Caller
from app.envoy.protos.health_pb2 import HealthCheckRequest, HealthCheckResponse
from app.envoy.protos.ratelimit_pb2 import RateLimitResponse
from app.envoy.server import HEALTH, METHOD, WITHIN_S
from app.node.errors import ListenError
from app.node.settings import Settings
from app.run.listening import Listeners
from tests import stores
from tests.authority import P256, Authority
from tests.envoy.calls import Client, connected, request, serving
from tests.envoy.in_process import channel_to, opened
from tests.ports import free_port
from tests.service import eventually

ONE_A_MINUTE = {"limit": 1 / 60, "samples": 11, "sample_ms": 6_000, "enforcement": "deny"}


class StubAdmission:
    """Admits everything, or sheds it; keeps how long each ask may wait."""

    def __init__(self) -> None:
        self.sheds = False
        self.within_s: list[float] = []
        self.gone = 0
        self.waits = asyncio.Event()
        self.waits.set()

    async def decide(self, asks: Sequence[Ask], caller: Caller, within_s: float) -> list[PlannedAsk]:
        self.within_s.append(within_s)
        if self.sheds:
            raise OverloadedError("age")
        try:
            await self.waits.wait()
        except asyncio.CancelledError:
            self.gone += 1
            raise
        return [PlannedAsk(ask, (), None, decision=ADMITTED[0]) for ask in asks]


@asynccontextmanager
async def in_process(admission: Any, metrics: Metrics, ready: Sequence[bool] = (True,)) -> AsyncIterator[Any]:
    """A channel to a service in this process."""
    async with opened(admission, metrics, lambda: ready[-1]) as (_, port), channel_to(port) as channel:
        yield channel


BODY = request({"principal": "alice"}).SerializeToString()


async def test_shedding_is_unavailable_and_counted():
    admission, metrics = StubAdmission(), Metrics()
    admission.sheds = True
    async with in_process(admission, metrics) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(METHOD)(BODY)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    page = (await metrics.text()).decode()
    assert 'quotagate_shed_total{cause="age"} 1.0' in page
    assert 'quotagate_envoy_requests_total{outcome="unavailable"} 1.0' in page


async def test_an_ask_waits_no_longer_than_its_caller():
    admission = StubAdmission()
    async with in_process(admission, Metrics()) as channel:
        call = channel.unary_unary(METHOD)
        await call(BODY)
        await call(BODY, timeout=60)
        admission.waits.clear()
        while len(admission.within_s) < 3:  # on a crowded machine a call may end before it arrives
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(BODY, timeout=WITHIN_S / 2)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        while not admission.gone:  # noqa: ASYNC110  then it is not sent to the store any more
            await asyncio.sleep(0.01)
    unbounded, long, short = admission.within_s
    assert unbounded == long == WITHIN_S
    assert 0 <= short < WITHIN_S


async def test_an_error_of_ours_says_nothing_of_its_cause():
    class Broken:
        async def decide(self, *_: object) -> list[PlannedAsk]:
            raise RuntimeError("the secret is 42")

    async with in_process(Broken(), Metrics()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(METHOD)(BODY)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "42" not in caught.value.details()


async def test_who_watches_health_learns_of_a_change_and_of_the_end():
    ready = [True]
    async with (
        opened(StubAdmission(), Metrics(), lambda: ready[-1]) as (port, number),
        channel_to(number) as channel,
    ):
        watch = channel.unary_stream(
            f"/{HEALTH}/Watch",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )(HealthCheckRequest())
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        ready.append(False)
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        ready.append(True)
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        port.drain()
        assert (await watch.read()).status == HealthCheckResponse.NOT_SERVING
        await port.stop(60.0)
        assert await watch.read() is grpc.aio.EOF
        assert await watch.code() is grpc.StatusCode.OK


async def test_a_port_that_is_taken_is_an_error(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(ListenError, match=str(number)):
            Listeners.of(Settings(home=tmp_path, port=free_port(), envoy_port=number))


def test_while_the_store_is_held_each_quota_follows_its_policy():
    with (
        stores.server("valkey") as store,
        serving(store_url=store.url) as (node, port),
        connected(port) as client,
    ):
        node.put("user=open", request_rate=ONE_A_MINUTE)
        node.put("user=shut", request_rate={**ONE_A_MINUTE, "on_store_failure": "throttle"})
        assert client.code({"principal": "open"}) == "OK"
        assert client.code({"principal": "open"}) == "OVER_LIMIT"
        store.hold()
        assert client.code({"principal": "open"}) == "OK"
        refused = client.ask({"principal": "shut"})
        assert refused.overall_code == 2
        headers = {header.key: header.value for header in refused.response_headers_to_add}
        assert (headers["x-throttle-ms"], headers["retry-after"]) == ("1000", "1")
        assert client.codes({"principal": "open"}, {"principal": "shut"}) == ["OK", "OVER_LIMIT"]
        assert client.health() == "SERVING"
        page = node.http.get("/metrics").text
        fallbacks = [line for line in page.splitlines() if line.startswith("quotagate_fallback_total{")]
        assert sum(float(line.rpartition(" ")[2]) for line in fallbacks) >= 3
        store.go_on()
        eventually(lambda: client.code({"principal": "open"}) == "OVER_LIMIT")


def test_two_processes_share_the_port():
    names = (f"caller-{n}" for n in count())
    with serving(processes=2) as (node, port):
        node.put("user=*", request_rate={**ONE_A_MINUTE, "limit": 10 / 60})
        codes = eventually(lambda: store_codes(port, next(names), 12))
        assert codes == ["OK"] * 10 + ["OVER_LIMIT"] * 2


def store_codes(port: int, principal: str, asks: int) -> list[str]:
    """Return the codes of asks on a connection each; none unless the store decided all by the limit of ten.

    A status names no limit without the store's answer, or from a process that knows no quota yet.
    """
    statuses: list[RateLimitResponse.DescriptorStatus] = []
    for _ in range(asks):
        with connected(port) as client:
            statuses += client.ask({"principal": principal}).statuses
    if not all(status.current_limit.requests_per_unit == 10 for status in statuses):
        return []
    return [RateLimitResponse.Code.Name(status.code) for status in statuses]


def test_tls_and_client_certificates_are_those_of_the_api(tmp_path: Path):
    authority = Authority(tmp_path, algorithm=P256)  # grpcio takes no Ed25519
    names = "DNS:localhost,IP:127.0.0.1"
    server, alice = authority.certify("server", san=names), authority.certify("alice")
    own = authority.certify("own", subject="/O=x", san="URI:spiffe://example/a")
    settings = {
        "QUOTAGATE_TLS_CERT": str(server.cert),
        "QUOTAGATE_TLS_KEY": str(server.key),
        "QUOTAGATE_TLS_CLIENT_CA": str(authority.ca),
    }
    with serving(environment=settings, trust=authority.trusted(alice)) as (node, port):
        node.put("user=alice", request_rate=ONE_A_MINUTE)
        for shown, principal in ((alice, "alice"), (own, "spiffe://example/a")):
            credentials = grpc.ssl_channel_credentials(
                authority.ca.read_bytes(), shown.key.read_bytes(), shown.cert.read_bytes()
            )
            with connected(port, credentials=credentials) as client:
                assert client.code({"principal": principal}) == "OK"
                assert refused(client, "bob") is grpc.StatusCode.PERMISSION_DENIED
                if shown is alice:  # the principal defaults to the certificate's
                    assert client.code({"remote_address": "10.0.0.7"}) == "OVER_LIMIT"
        nobody = grpc.ssl_channel_credentials(authority.ca.read_bytes())
        with connected(port, credentials=nobody) as client:
            assert refused(client, "alice") is grpc.StatusCode.UNAVAILABLE


def refused(client: Client, principal: str) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        client.ask({"principal": principal}, within_s=20)
    code: grpc.StatusCode = caught.value.code()
    return code


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        env={"QUOTAGATE_REDIS_URL": "unix:///nowhere", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


WITHOUT_GRPC = """
import sys
sys.modules["h2"] = sys.modules["grpc"] = sys.modules["google.protobuf"] = None
from app.run import cli
sys.argv = ["quotagate", *sys.argv[1:]]
cli.main()
"""


def test_without_the_extra_the_port_is_refused_by_name(tmp_path: Path):
    settings = {"QUOTAGATE_HOME": str(tmp_path), "QUOTAGATE_ENVOY_PORT": str(free_port())}
    for command in ("serve", "up"):
        ended = run(settings, "-c", WITHOUT_GRPC, command)
        assert ended.returncode == 1
        assert "QUOTAGATE_ENVOY_PORT: needs the extra envoy: pip install 'quotagate[envoy]'" in ended.stderr


def test_nothing_else_needs_the_extra():
    imports, _, _ = WITHOUT_GRPC.partition("from app")
    code = f"{imports}import app.run.wiring, app.run.serve, app.run.up\n"
    ended = run({}, "-c", code)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("text", "port", "fault"),
    [
        ("domains: {a: {}}", True, "QUOTAGATE_ENVOY_MAPPING: domains/a: must be a mapping"),
        ("domains: {}", False, "QUOTAGATE_ENVOY_MAPPING: needs QUOTAGATE_ENVOY_PORT"),
    ],
)
def test_a_wrong_mapping_is_refused_by_name(tmp_path: Path, text: str, port: bool, fault: str):
    mapping = tmp_path / "mapping.yaml"
    mapping.write_text(text, encoding="utf-8")
    settings = {"QUOTAGATE_HOME": str(tmp_path), "QUOTAGATE_ENVOY_MAPPING": str(mapping)}
    if port:
        settings["QUOTAGATE_ENVOY_PORT"] = str(free_port())
    ended = run(settings, "-m", "app.run.cli", "serve")
    assert ended.returncode == 1
    assert fault in ended.stderr
