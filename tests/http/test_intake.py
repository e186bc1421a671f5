"""Waiting bodies are bounded on every route: callers share one intake, administration has its own."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import httpx
import pytest

from app.admission.errors import OverloadedError
from app.admission.gathering.slices import Slices
from app.admission.leases.leases import LeaseAnswer, Settlement
from app.domain.ask import Ask
from app.domain.caller import Caller
from app.http.app import Front
from app.http.openapi.check import METHODS
from app.http.problems import ProblemError
from app.http.server.hot import BodyRoute, HotRoute
from app.http.server.intake import MAX_OF_ALL, MAX_OF_CALLER, Intake
from app.run.document import wired
from tests.http.conftest import ADMIN, serving
from tests.load.heavy_bodies import ANYWHERE

DOCUMENT: Final = json.loads((Path(__file__).parents[2] / "openapi" / "openapi.json").read_text("utf-8"))
OPERATIONS: Final = [
    (method, path) for path, item in DOCUMENT["paths"].items() for method in sorted(item.keys() & METHODS)
]
BY_CALLERS: Final = [
    (method, path)
    for method, path in OPERATIONS
    if {"key": ["decide"]} in DOCUMENT["paths"][path][method]["security"]
    or {"key": ["account"]} in DOCUMENT["paths"][path][method]["security"]
]
"""The operations that need no more than the scope of a caller."""
WITH_BODY: Final = [
    (method, path) for method, path in OPERATIONS if "requestBody" in DOCUMENT["paths"][path][method]
]
NOT_JSON: Final = b"{"


def named(path: str) -> str:
    """A path with a name in place of each parameter."""
    return path.format(entity="user=a", name="a", lease="a")


@pytest.fixture
def front() -> Front:
    """A node that was never opened: a request that reached the store would get an error."""
    front = wired()
    front._access._is_starting = lambda: False
    return front


def intake_of(front: Front, method: str, path: str) -> Intake:
    """The intake that must count the body of an operation."""
    if (method, path) not in BY_CALLERS:
        return front.bodies
    decisions = front.hot["/v1/decisions"]
    assert isinstance(decisions, BodyRoute)
    return decisions.intake


async def sent(front: Front, method: str, path: str) -> httpx.Response:
    """The answer to a body that is not JSON, sent with the admin key."""
    headers = {"Authorization": "Bearer never used", "Content-Type": "application/json"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://node") as http:
        return await http.request(method.upper(), named(path), content=NOT_JSON, headers=headers)


def test_callers_routes_are_listed():
    assert {path for _, path in BY_CALLERS} >= {
        "/v1/decisions",
        "/v1/decisions:batch",
        "/v1/check",
        "/v1/leases",
        "/v1/leases/{lease}",
    }


@pytest.mark.parametrize(("method", "path"), WITH_BODY)
@pytest.mark.parametrize(
    ("turn", "waiting"), [("key admin", MAX_OF_CALLER), ("key other", MAX_OF_ALL)], ids=["caller", "node"]
)
async def test_body_is_refused_while_too_many_bytes_wait(
    front: Front, method: str, path: str, turn: str, waiting: int
):
    intake = intake_of(front, method, path)
    if waiting == MAX_OF_ALL:  # of several callers
        for number in range(waiting // MAX_OF_CALLER):
            intake.take(f"{turn} {number}", MAX_OF_CALLER)
    else:
        intake.take(turn, waiting)
    total = intake.total
    refused = await sent(front, method, path)
    assert refused.status_code == 503, f"{method} {path} does not count its body"
    assert refused.json()["type"] == "urn:quotagate:overloaded"
    assert refused.headers["Retry-After"] in {"1", "2", "3"}
    assert intake.total == total


@pytest.mark.parametrize(("method", "path"), WITH_BODY)
async def test_other_intake_refuses_nothing(front: Front, method: str, path: str):
    """Callers cannot keep administrators out, nor administrators callers."""
    counting = intake_of(front, method, path)
    decisions = intake_of(front, "post", "/v1/decisions")
    for other in {decisions, front.bodies} - {counting}:
        other.take("key admin", MAX_OF_CALLER)
    assert (await sent(front, method, path)).status_code == 400
    assert counting.total == 0


@pytest.mark.parametrize(("method", "path"), BY_CALLERS)
def test_callers_route_is_hot(front: Front, method: str, path: str):
    """Hot routes take fair turns and shed; one without a body has nothing to count."""
    route = front.hot_route(named(path))
    assert isinstance(route, HotRoute), "add it to the routes in app/http/app.py::create_app"
    assert isinstance(route, BodyRoute) is ("requestBody" in DOCUMENT["paths"][path][method])


class SheddingLeases:
    """Leases of a node that is overloaded."""

    asked = 0

    def named(self, text: str, key: str | None, created_ms: int | None = None) -> None:
        """No lease has a valid name."""

    async def take(
        self, wish: Ask, lease_ms: int, settlements: Sequence[Settlement], caller: Caller
    ) -> LeaseAnswer:
        self.asked += 1
        raise OverloadedError("queue")


LEASE: Final[dict[str, Any]] = {"ask": {"principal": "a", "usage": {"requests": 1}}, "lease_ms": 100}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("POST", "/v1/leases", LEASE), ("DELETE", "/v1/leases/x", {"usage": {}})],
)
@pytest.mark.parametrize("cause", ["queue", "caller_bytes"])
async def test_shed_request_for_a_lease_is_503(way: str, method: str, path: str, body: object, cause: str):
    leases, intake = SheddingLeases(), Intake(of_caller=100 if cause == "queue" else 1)
    async with serving(leases=leases, intake=intake) as node:
        headers = {"Authorization": "Bearer the-admin-key"}
        shed = await node.http.request(method, path, json=body, headers=headers)
        assert shed.status_code == 503
        assert shed.json()["type"] == "urn:quotagate:overloaded"
        assert int(shed.headers["Retry-After"]) in {1, 2, 3}
        assert node.metrics._counts.shed == {(cause,): 1}
    assert leases.asked == (cause == "queue"), "a body without room is not even read"
    assert intake.total == 0


GC_KINDS: Final = (ProblemError, OverloadedError, FrameType)


@pytest.mark.parametrize("path", ["/v1/decisions", "/v1/decisions:batch", "/v1/leases"])
@pytest.mark.parametrize(
    "name", ["nested numbers in an unknown field", "escapes", "arrays, nested", "objects"]
)
async def test_refused_body_leaves_nothing_for_the_collector(way: str, path: str, name: str):
    """An error that refers to itself by its traceback would keep the body until a full collection."""
    async with serving(leases=SheddingLeases(), slices=Slices(1e-6)) as node:
        headers = {"Authorization": f"Bearer {ADMIN}"}
        await node.http.post(path, content=ANYWHERE[name], headers=headers)
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                refused = await node.http.post(path, content=ANYWHERE[name], headers=headers)
                assert refused.status_code in {400, 422}
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = [each for each in gc.garbage if isinstance(each, GC_KINDS)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert left == []
