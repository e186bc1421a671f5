"""A node's HTTP on a real server, with a fake admission that records its asks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Any, ClassVar, cast

import httpx
import pytest
import uvicorn
from fastapi import APIRouter
from httpx import ASGITransport, AsyncClient
from msgspec import structs

from app.admission.atomic_asks import AtomicDecision
from app.admission.errors import OverloadedError
from app.admission.metrics.metrics import Metrics
from app.admission.plan import PlannedAsk
from app.admission.port import Then
from app.admission.throttle_factor.caller_clock import CallerClock
from app.catalog import schema
from app.catalog.catalog import Catalog
from app.domain.ask import Ask
from app.domain.caller import ANYONE, Caller
from app.domain.decision import Decision
from app.domain.quota import Defaults
from app.http.access.access import Access
from app.http.app import create_app
from app.http.check_question import Sources
from app.http.routes.health import Readiness
from app.http.server.connections import Connections
from app.http.server.drain import DrainState
from app.http.server.hot_protocol import HttpPort
from app.http.server.parsing import ParsingTurns
from app.http.server.protocol import PARSING_S
from app.http.server.server import Server
from app.http.wire import Clock
from tests.http.application import KEY, app_of
from tests.postgres import Postgres, started

ADMIN = "the-admin-key"
OPEN_TO = "127.0.0.0/8"
SOURCES = Sources()


class Ways:
    """Whether the connections of a test begin with the hot protocol."""

    hot: ClassVar = True


@dataclass
class Admission:
    """Admits everything.

    Attributes:
        waiting: how many requests wait until ``gate`` is set.
        planned: every ask is planned and decided like this one, if it is set.
    """

    asked: list[Ask] = field(default_factory=list)
    callers: list[Caller] = field(default_factory=list)
    calls: int = 0
    waiting: int = 0
    broken: bool = False
    overloaded: str | None = None
    gate: asyncio.Event | None = None
    planned: PlannedAsk | None = None

    async def decide(
        self, asks: Sequence[Ask], caller: Caller = ANYONE, within_s: float | None = None
    ) -> list[PlannedAsk]:
        if self.broken:
            raise RuntimeError("a secret of the machine room")
        if self.overloaded is not None:
            raise OverloadedError(self.overloaded)
        self.callers.append(caller)
        if self.gate is not None:
            self.waiting += 1
            await self.gate.wait()
            self.waiting -= 1
        self.calls += 1
        self.asked += asks
        return [self._decided(ask, place) for place, ask in enumerate(asks)]

    def begin(self, ask: Ask, caller: Caller, then: Then, within_s: float | None = None) -> None:
        making = self.decide((ask,), caller)
        if self.gate is not None:
            asyncio.ensure_future(making).add_done_callback(lambda done: then(done.result()[0]))
            return
        try:
            making.send(None)
        except StopIteration as done:
            then(done.value[0])
        except Exception as error:  # noqa: BLE001  it is handed on
            then(error)

    async def decide_atomically(
        self, asks: Sequence[Ask], caller: Caller = ANYONE, within_s: float | None = None
    ) -> AtomicDecision:
        raise AssertionError("no route asks this")

    def _decided(self, ask: Ask, place: int) -> PlannedAsk:
        if self.planned is not None:
            return structs.replace(self.planned, ask=ask)
        decision = Decision("admit", 0, True, place, "store", None, () if ask.detail else None)
        return PlannedAsk(ask, (), None, decision=decision)


@dataclass
class Node:
    """A running server, and the parts that it was built from."""

    port: int
    server: Server
    drain: DrainState
    admission: Admission
    metrics: Metrics
    access: Access
    readiness: Readiness
    http: httpx.AsyncClient

    async def ask(self, body: object, path: str = "/v1/decisions", **headers: str) -> httpx.Response:
        """Post a body: bytes unchanged, anything else as JSON."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if isinstance(body, bytes):
            return await self.http.post(path, content=body, headers=named)
        return await self.http.post(path, json=body, headers=named)


async def eventually(look: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait until ``look`` returns something true."""
    async with asyncio.timeout(within_s):
        while not look():  # noqa: ASYNC110  what is looked at tells nobody
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(
    open_to: str = OPEN_TO,
    clock: Clock = "store",
    sources: Sources = SOURCES,
    connections: Connections | None = None,
    drain_s: float = 0.0,
    **parts: Any,
) -> AsyncIterator[Node]:
    """A node that requires no key from some networks.

    Its connections begin with the hot protocol unless ``way`` differs.

    Args:
        parts: further arguments of ``create_app``.
    """
    node: Node
    routes = APIRouter()

    @routes.get("/v1/failing")
    async def failing(count: int = 0) -> None:
        raise RuntimeError("a secret of the machine room")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        admission, metrics = Admission(), Metrics()
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60)
        access = Access(ADMIN, [ip_network(open_to)] if open_to else [], failed=metrics.count_refusal)
        app = create_app(
            admission=CallerClock(admission) if clock == "caller" else admission,
            access=access,
            clock=clock,
            sources=sources,
            routers=[routes],
            ready=lambda: node.readiness,
            metrics=metrics,
            **parts,
        )
        drain, turns = DrainState(), ParsingTurns(PARSING_S)
        hot = HttpPort(app.hot, app.outbox, drain, turns, app.handed_over)
        protocol = hot if Ways.hot else hot.general
        config = uvicorn.Config(
            app,
            http=cast("type[asyncio.Protocol]", protocol),
            log_config=None,
            access_log=False,
            ws="none",
            lifespan="on",
            proxy_headers=False,
            timeout_graceful_shutdown=5,
        )
        server = Server(config, listener, connections or Connections(), drain=drain, drain_s=drain_s)
        node = Node(port, server, drain, admission, metrics, access, Readiness(snapshot=True), client)
        running = asyncio.create_task(server._serve())
        await eventually(lambda: server.started)
        try:
            yield node
        finally:
            await client.aclose()
            server.should_exit = True
            await running


@pytest.fixture(params=["hot", "uvicorn"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The protocol of new connections: the hot one, or uvicorn's, as if each had been handed over."""
    monkeypatch.setattr(Ways, "hot", request.param == "hot")
    return str(request.param)


@pytest.fixture
async def node(way: str) -> AsyncIterator[Node]:
    async with serving() as node:
        yield node


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One PostgreSQL for the whole run; each test makes its own database in it."""
    server = started()
    yield server
    server.remove()


@pytest.fixture(params=["sqlite", "postgresql"])
async def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Catalog]:
    """An empty catalog in each kind of database."""
    url = f"sqlite:///{tmp_path / 'catalog.db'}"
    if request.param == "postgresql":
        server: Postgres = request.getfixturevalue("postgres")
        url = server.database()
    async with opened(url) as catalog:
        yield catalog


@pytest.fixture
async def one_catalog(tmp_path: Path) -> AsyncIterator[Catalog]:
    """An empty catalog, for tests that do not depend on its kind."""
    async with opened(f"sqlite:///{tmp_path / 'catalog.db'}") as catalog:
        yield catalog


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[Catalog]:
    """The catalog of a database."""
    schema.upgrade(url)
    catalog = Catalog(url, Defaults())
    await catalog.open()
    yield catalog
    await catalog.close()


@pytest.fixture
async def http(catalog: Catalog) -> AsyncIterator[AsyncClient]:
    """A client of that catalog's routes, with the admin key."""
    async with AsyncClient(
        transport=ASGITransport(app_of(catalog)),
        base_url="http://quotagate",
        headers={"authorization": f"Bearer {KEY}"},
    ) as client:
        yield client
