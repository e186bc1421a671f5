"""A real node at its limits: too many connections, unread answers, large bodies."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from app.http.problems import MAX_ERRORS
from app.node import open_files
from tests import few_files
from tests.report import say
from tests.service import Service, eventually, running

ASK = {"principal": "alice", "usage": {"requests": 1}}
ALTERNATELY = 300
AT_MOST_TIMES = 10
SMALL = {"QUOTAGATE_MAX_CONNECTIONS": "40", "QUOTAGATE_MAX_CONNECTIONS_PER_ADDRESS": "10"}


@pytest.fixture(scope="module")
def node() -> Iterator[Service]:
    with running() as one:
        yield one


def connected(node: Service, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(node.address, timeout=60, source_address=(source, 0))


def is_closed(one: socket.socket) -> bool:
    """Whether the other end has closed the connection without sending anything."""
    one.settimeout(0)
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def refused(node: Service, reason: str) -> float:
    line = f'quotagate_connections_refused_total{{port="http",reason="{reason}"}} '
    for text in node.http.get("/metrics").text.splitlines():
        if text.startswith(line):
            return float(text.removeprefix(line))
    return 0


def test_connections_above_the_limit_are_closed_and_counted():
    with running(environment=SMALL) as node, ExitStack() as stack:
        mine = [stack.enter_context(connected(node, "127.0.0.2")) for _ in range(12)]
        eventually(lambda: refused(node, "address") == 2)
        eventually(lambda: is_closed(mine[10]) and is_closed(mine[11]))
        assert not any(is_closed(one) for one in mine[:10])
        many = [stack.enter_context(connected(node, f"127.0.1.{n}")) for n in range(1, 39)]
        eventually(lambda: refused(node, "process") >= 9)
        eventually(lambda: is_closed(mine[8]))
        assert not is_closed(mine[9]), "of the address that holds most, the longest idle ones are closed"
        assert not any(is_closed(one) for one in many), "the others are served"
        assert node.ask(**ASK)["decision"] == "admit"


def test_idle_sockets_take_nothing_from_others_under_a_small_limit_of_open_files():
    with running(program="tests.few_files") as node, ExitStack() as stack:
        for _ in range(400):
            stack.enter_context(connected(node, "127.0.0.2"))
        eventually(lambda: refused(node, "address") > 300)
        for _ in range(20):  # each over its own connection
            answer = httpx.post(f"{node.url}/v1/decisions", json=ASK, trust_env=False, timeout=60)
            assert answer.json()["source"] == "local"
        (logged,) = [json.loads(line) for line in node.logged().splitlines() if "limit of open files" in line]
        assert logged["connections"] == few_files.LIMIT // 2
        assert logged["connections_per_address"] == few_files.LIMIT // 8
        assert logged["limit_for_all"] == 8_192 + open_files.RESERVE


def test_limit_of_open_files_is_raised_as_needed(node: Service):
    limit, _ = resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE)
    assert limit >= 8_192 + open_files.RESERVE
    assert "limit of open files" not in node.logged()


def test_unread_answers_neither_delay_others_nor_hold_memory(node: Service):
    """Once, 100 such connections held 382 MiB of the kernel's memory, and a decision took 10 s.

    Another node, which has no such connections, is asked alternately.
    """
    before = kernel_memory()
    with ExitStack() as stack:
        other = stack.enter_context(running())
        lazy = [stack.enter_context(connected(node, "127.0.0.2")) for _ in range(100)]
        for one in lazy:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            one.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        waits: dict[str, list[float]] = {node.url: [], other.url: []}
        for _ in range(ALTERNATELY):
            for each in (node, other):
                asked = time.perf_counter()
                each.ask(**ASK)
                waits[each.url].append(time.perf_counter() - asked)
        times = median(waits[node.url]) / median(waits[other.url])
        say(f"next to unread answers, a decision takes {times:.1f} times as long")
        assert times < AT_MOST_TIMES
        assert kernel_memory() - before < 64 * 2**20
        # Connections on which nothing is read for ten seconds are closed, by the loop or by the kernel.
        eventually(lambda: established(node) < 10)


def kernel_memory() -> int:
    """The number of bytes that the kernel holds for TCP."""
    lines = Path("/proc/net/sockstat").read_text().splitlines()
    line = next(line.split() for line in lines if line.startswith("TCP:"))
    return int(line[line.index("mem") + 1]) * resource.getpagesize()


def established(node: Service) -> int:
    """The number of the node's established connections."""
    port = f":{node.address[1]:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    return sum(1 for row in rows if row[1].endswith(port) and row[3] == "01")


UNKNOWN = {f"k{n}": 1 for n in range(90_000)}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/decisions", UNKNOWN),
        ("POST", "/v1/decisions", {"x" * 900_000: 1}),
        ("POST", "/v1/decisions:batch", {"asks": [{"usage": {}}] * 1_000}),
        ("PUT", "/v1/quotas/user=alice", UNKNOWN),
        ("PUT", "/v1/quotas/user=alice", {"x" * 900_000: 1}),
        ("PATCH", "/v1/quotas/user=alice", {"request_rate": UNKNOWN}),
        ("POST", "/v1/quotas:apply", {"alterations": [{"entity": "user=alice", "quotas": UNKNOWN}]}),
        ("POST", "/v1/quotas:alter", UNKNOWN),
        ("POST", "/v1/quotas:alter", {"alterations": [1] * 1_000}),
        ("POST", "/v1/buckets:reset", UNKNOWN),
        ("POST", "/v1/keys", UNKNOWN),
        ("POST", "/v1/keys", {"name": "x", "scopes": ["x" * 10] * 60_000}),
    ],
)
def test_refusal_is_much_smaller_than_a_large_body(node: Service, method: str, path: str, body: Any):
    """Once, a body of 1 MB got an answer of 16.5 MB."""
    answer = node.http.request(method, path, json=body)
    assert answer.status_code == 422, answer.text[:500]
    assert len(answer.content) < 150_000
    assert 1 <= len(answer.json()["errors"]) <= MAX_ERRORS


def test_configured_host_name_is_accepted_over_loopback():
    with running(environment={"QUOTAGATE_ALLOWED_HOSTS": "localhost, quotagate.internal"}) as node:
        for host, status in (("quotagate.internal:8080", 200), ("localhost", 200), ("evil.example", 403)):
            answer = httpx.post(
                f"{node.url}/v1/decisions", json=ASK, headers={"Host": host}, trust_env=False, timeout=60
            )
            assert answer.status_code == status, host
        failures = 'quotagate_access_failures_total{reason="host"} 1.0'
        assert failures in node.http.get("/metrics").text


def test_log_has_only_the_fingerprint_of_a_refused_key(node: Service):
    key = "qg_nobody-has-this-key-0123456789"
    answer = httpx.get(
        f"{node.url}/v1/quotas", headers={"Authorization": f"Bearer {key}"}, trust_env=False, timeout=60
    )
    assert answer.status_code == 401
    (logged,) = eventually(
        lambda: [json.loads(line) for line in node.logged().splitlines() if "a key was refused" in line]
    )
    assert (logged["reason"], logged["address"], len(logged["fingerprint"])) == ("unknown", "127.0.0.1", 8)
    assert key not in node.logged()
