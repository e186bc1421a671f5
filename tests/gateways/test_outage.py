"""Answers to visitors of a site while Quotagate hangs or is gone: one line of each gateway decides."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import httpx
import pytest

from tests.gateways import gateway as gateways
from tests.gateways.gateway import KINDS, Gateway, Kind
from tests.gateways.test_protect import burst, seen
from tests.service import Service, eventually, running

ANSWERED_WITHIN_S = 40.0
"""Far above the one second of the examples, for a busy machine; below nginx's default of 60 s."""


class Outlet(NamedTuple):
    """A gateway, and the value of its line for outages."""

    gateway: Gateway
    is_open: bool


@pytest.fixture(scope="module")
def fragile_node() -> Iterator[Service]:
    with running() as node:
        node.put("user=*", request_rate=burst(1_000_000))
        yield node


@pytest.fixture(scope="module")
def outlets(fragile_node: Service, site: int) -> Iterator[dict[tuple[str, bool], Outlet]]:
    """Each gateway with its short timeout, failing open and failing closed, after one check."""
    with ExitStack() as stack:
        found = {}
        for kind in KINDS:
            for is_open in (True, False):
                line = {kind.open_line: kind.open_line if is_open else kind.closed_line}
                gateway = stack.enter_context(gateways.running(kind, fragile_node.address[1], site, line))
                eventually(partial(is_checked, gateway))
                found[kind.name, is_open] = Outlet(gateway, is_open)
        yield found


@pytest.fixture(
    params=[(kind.name, is_open) for kind in KINDS for is_open in (True, False)],
    ids=lambda p: f"{p[0]}-{'open' if p[1] else 'closed'}",
)
def outlet(request: pytest.FixtureRequest, outlets: dict[tuple[str, bool], Outlet]) -> Outlet:
    return outlets[request.param]


@pytest.fixture(scope="module")
def gone(fragile_node: Service, outlets: dict[tuple[str, bool], Outlet]) -> None:
    fragile_node.stop()


@contextmanager
def hung(node: Service) -> Iterator[None]:
    node.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        node.process.send_signal(signal.SIGCONT)


def is_checked(gateway: Gateway) -> bool:
    """Whether an answer comes from the site after a check."""
    answer = ask(gateway, "alice")
    return answer.status_code == 200 and "ratelimit" in answer.headers


def ask(gateway: Gateway, person: str | None, content: bytes | None = None) -> httpx.Response:
    method = "GET" if content is None else "POST"
    return gateway.ask(person, method=method, content=content, within_s=ANSWERED_WITHIN_S)


def follows_its_line(outlet: Outlet, content: bytes | None = None) -> None:
    answer = ask(outlet.gateway, "alice", content)
    assert "ratelimit" not in answer.headers
    if outlet.is_open:
        assert answer.status_code == 200
        assert answer.headers["x-site"] == "yes"
        assert seen(answer)["sha256"] == hashlib.sha256(content or b"").hexdigest()
        assert not [name for name in seen(answer)["headers"] if name.startswith("x-quotagate")]
    else:
        assert answer.status_code == 503
        assert "x-site" not in answer.headers


def test_hung(outlet: Outlet, fragile_node: Service):
    with hung(fragile_node):
        follows_its_line(outlet)
        follows_its_line(outlet, b"posted" * 100_000)
    eventually(lambda: is_checked(outlet.gateway))


def test_gone(outlet: Outlet, gone: None):
    follows_its_line(outlet)
    follows_its_line(outlet, b"posted" * 100_000)


@pytest.mark.parametrize(
    ("status", "is_open", "met"),
    [(500, True, {200}), (503, False, {503}), (404, True, {404, 503})],
    ids=["500-open", "503-closed", "404-open"],
)
def test_answers_that_are_no_decision(kind: Kind, site: int, status: int, is_open: bool, met: set[int]):
    """A 5xx counts as an outage; any other answer (here the site answers instead) lets nobody in."""
    changes = {
        "/v1/check": f"/status/{status}",
        kind.open_line: kind.open_line if is_open else kind.closed_line,
    }
    with gateways.running(kind, site, site, kind.patience, changes) as gateway:
        answer = ask(gateway, "alice")
        assert answer.status_code in met
        if answer.status_code == 200:
            assert seen(answer)["path"] == "/"


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
def test_overloaded_quotagate_refuses(kind: Kind, site: int, is_open: bool):
    """A refusal that is late and names no quota is still a refusal, so a flood does not open the site."""
    changes = {"/v1/check": "/shed", kind.open_line: kind.open_line if is_open else kind.closed_line}
    with gateways.running(kind, site, site, changes) as gateway:
        answer = ask(gateway, "alice")
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "2"
        assert answer.headers["x-throttle-ms"] == "1700"
        assert "x-site" not in answer.headers
        assert "ratelimit" not in answer.headers


def test_caller_without_a_name_is_refused_during_an_outage(outlet: Outlet, gone: None):
    if outlet.gateway.kind.by_certificate:
        with pytest.raises(httpx.TransportError):
            ask(outlet.gateway, None)
    else:
        answer = ask(outlet.gateway, None)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Basic")
