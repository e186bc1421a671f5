"""After real forks, and in other event loops, the clients share no lease and no connection."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.authority import Authority
from tests.clients.forked import BURST, LEFT, WORKERS
from tests.clients.scripted import ADMITTED, REFUSED, Reply, Request, Script, answer
from tests.programs import end
from tests.service import ADMIN_KEY, Service, eventually, running

ROOT = Path(__file__).parents[2]
IN_ALL: Any = {"limit": 0.001, "algorithm": "token_bucket", "burst": BURST, "enforcement": "deny"}
"""Hardly any token is refilled while a test runs."""


def environment_of(url: str, principal: str = "") -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "clients" / "python")])
    names = {"QUOTAGATE_URL": url, "QUOTAGATE_KEY": ADMIN_KEY, "QUOTAGATE_PRINCIPAL": principal}
    return {**os.environ, **names, "PYTHONPATH": path}


def forked(what: str, url: str, environment: Mapping[str, str] | None = None, module: str = "forked") -> Any:
    """The result of a program that forks; if it prints more before, all in a list."""
    ran = subprocess.run(
        [sys.executable, "-m", f"tests.clients.{module}", what],
        env={**environment_of(url, what), **(environment or {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    return found if len(found) > 1 else found[0]


def left(node: Service, principal: str) -> float:
    usage = {"requests": 0}
    verdict = node.ask(principal=principal, usage=usage, mode="peek", detail=True)["quotas"][0]
    remaining: float = verdict["remaining"]
    return remaining


@pytest.mark.parametrize("how", ["fork", "twice", "thread", "leaving", "pool", "executor", "untold"])
def test_lease_is_spent_once_over_parent_and_children(node: Service, how: str):
    """The first lease is half of the burst. The parent keeps its rest; the children share the other half."""
    node.put(f"user={how}", request_rate=IN_ALL)
    found = forked(how, node.url, module="forked_leases")
    spent = BURST // 2 - LEFT + found["mine"] + found["children"]
    assert found["mine"] >= LEFT, "no child gave the parent's lease back"
    assert spent <= BURST
    assert (found["children"] > 0) == (how != "leaving")
    assert left(node, how) <= BURST - spent + 1


def test_lease_of_a_fork_server_is_not_spent_by_its_children(node: Service):
    node.put("user=forkserver", request_rate=IN_ALL)
    found = forked("forkserver", node.url, module="forked_leases")
    assert 0 < found["children"] <= BURST // 4, "the program and its fork server hold the rest"


@pytest.fixture
def gunicorn(node: Service, tmp_path: Path) -> Iterator[str]:
    """Run gunicorn with `preload_app`: the application is imported once, and each worker is a fork of it."""
    node.put("user=gunicorn", request_rate=IN_ALL)
    address, log = str(tmp_path / "s"), tmp_path / "log"
    command = [
        sys.executable,
        "-m",
        "gunicorn",
        "--preload",
        "--workers",
        str(WORKERS),
        "--no-control-socket",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--bind", f"unix:{address}", "tests.clients.preloaded:app"],
            env=environment_of(node.url, "gunicorn"),
            cwd=ROOT,
            stderr=output,
        )
    try:
        eventually(lambda: process.poll() is not None or log.read_bytes().count(b"Booting worker") == WORKERS)
        assert process.poll() is None, log.read_text()
        yield address
    finally:
        end(process)
    assert b"Traceback" not in log.read_bytes(), log.read_text()


def test_lease_of_a_preloaded_application_is_not_spent_by_its_workers(gunicorn: str, node: Service):
    def ask(_: int) -> int:
        with httpx.Client(transport=httpx.HTTPTransport(uds=gunicorn), timeout=300) as http:
            return int(http.get("http://gunicorn/").text)

    with ThreadPoolExecutor(WORKERS) as threads:
        spent = list(threads.map(ask, range(WORKERS)))
    assert 0 < sum(spent) <= BURST // 2


def test_child_renews_its_leases_by_itself(node: Service):
    node.put("user=renewal", request_rate={"limit": 1_000_000, "algorithm": "token_bucket"})
    assert forked("renewal", node.url) == ["quotagate leases"]


@pytest.fixture(params=["http", "https"])
def peer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Service, dict[str, str]]]:
    """A node without and with TLS, and how the clients trust it."""
    if request.param == "http":
        yield request.getfixturevalue("node"), {}
        return
    authority = Authority(tmp_path)
    server = authority.certify("server", san="DNS:localhost,IP:127.0.0.1")
    settings = {"QUOTAGATE_TLS_CERT": str(server.cert), "QUOTAGATE_TLS_KEY": str(server.key)}
    with running(environment=settings, trust=authority.trusted()) as node:
        yield node, {"SSL_CERT_FILE": str(authority.ca)}


def test_parent_and_children_have_connections_of_their_own(peer: tuple[Service, dict[str, str]]):
    node, trust = peer
    node.put("user=*", request_rate={"limit": 1_000_000})
    try:
        assert forked("connections", node.url, trust) == [True] * 8
    finally:
        node.http.delete("/v1/quotas/user=*")


def test_connection_of_the_parent_outlives_the_child(script: Script):
    script.plays(answer(ADMITTED))
    forked("kept", script.url)
    first, child, last = (request.port for request in script.requests)
    assert first == last != child


def test_http_client_of_the_callers_own_is_not_shared(script: Script):
    script.plays(answer(ADMITTED))
    message, made, unused = forked("lent", script.url)
    assert "pass a function" in message
    assert made == unused == "admit"


def test_child_does_not_draw_the_ids_of_its_parent(node: Service):
    node.put("user=forked", request_rate=IN_ALL)
    assert forked("ids", node.url) == [True, True]
    assert left(node, "forked") == pytest.approx(BURST - 2, abs=0.5), "an equal id would not be charged again"
    node.http.delete("/v1/quotas/user=forked")


def test_child_does_not_wait_for_locks_of_threads_that_it_does_not_have(script: Script):
    """The first answer comes only after the child ended."""
    has_ask, is_over = threading.Event(), threading.Event()
    nothing = {**REFUSED, "decision": "admit", "lease": None, "granted": {}, "lease_ms": 0, "renew_ms": 0}

    def late(request: Request) -> Reply:
        has_ask.set()
        assert is_over.wait(300)
        return answer(nothing)

    def at_once(request: Request) -> Reply:
        return answer(nothing if request.path == "/v1/leases" else ADMITTED)

    script.plays(late, at_once)
    command = [sys.executable, "-m", "tests.clients.forked", "busy"]
    with subprocess.Popen(
        command,
        env=environment_of(script.url),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        try:
            eventually(has_ask.is_set)
            program.stdin.write("the server has the ask\n")
            program.stdin.flush()
            assert program.stdout.readline() == "answer\n"
            is_over.set()
            assert json.loads(program.stdout.readline()) == ["admit"] * 3
        finally:
            is_over.set()
            end(program)


def test_client_works_in_one_event_loop_after_another(node: Service):
    """The lease of a loop that ended is not spent in the next one."""
    node.put("user=loops", request_rate={**IN_ALL, "burst": 100_000})
    assert forked("loops", node.url) == {"said": ["admit"] * 3, "took": [False] * 3}


def test_event_loops_of_two_threads_share_a_client_but_no_lease(node: Service):
    node.put("user=threads", request_rate=IN_ALL)
    admitted = forked("threads", node.url)
    assert 0 < sum(admitted) <= BURST
    assert sum(admitted) + left(node, "threads") == pytest.approx(BURST, abs=1), "the rest was given back"


def test_child_of_a_running_event_loop_has_its_own(node: Service):
    node.put("user=inside", request_rate=IN_ALL)
    child, parent = forked("inside", node.url)
    assert child == [False, "admit", "admit"]
    assert parent == ["admit", "admit"]
