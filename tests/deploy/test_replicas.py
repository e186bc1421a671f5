"""The nginx of compose in front of two replicas: limits hold over both, and one may die unnoticed."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest

from tests.clients.scripted import overloaded, serving
from tests.deploy.arrangement import Arrangement, arranged, nginx
from tests.service import Service, eventually

CALLERS: Final = 16
BURST: Final = 1_000_000
KEPT: Final = {"limit": 0.001, "algorithm": "token_bucket", "burst": BURST, "enforcement": "deny"}
"""A bucket that keeps its charges: less than half a token is refilled during a test."""

Ask = Callable[[httpx.Client], httpx.Response]


@pytest.fixture(scope="module")
def both() -> Iterator[Arrangement]:
    """Both replicas. A test that ends one must revive it."""
    with arranged() as found:
        yield found


def decide(principal: str, **ask: Any) -> Ask:
    ask = {"principal": principal, "usage": {"mutations": 1}, **ask}
    return lambda http: http.post("/v1/decisions", json=ask)


def check(principal: str, method: str = "GET", **headers: str) -> Ask:
    headers = {"X-Quotagate-Principal": principal, **headers}
    return lambda http: http.request(method, "/v1/check?mutations=1", headers=headers)


def asked(found: Arrangement, asks: list[Ask]) -> list[httpx.Response]:
    """The answers to asks that several callers send at the same time."""

    def one(some: list[Ask]) -> list[httpx.Response]:
        with found.client() as http:
            return [ask(http) for ask in some]

    with ThreadPoolExecutor(CALLERS) as pool:
        parts = pool.map(one, [asks[n::CALLERS] for n in range(CALLERS)])
        return [answer for part in parts for answer in part]


def limit(found: Arrangement, principal: str, **quotas: Any) -> None:
    """Set quotas through nginx, and wait until both replicas decide by them."""
    answer = found.http.put(f"/v1/quotas/user={principal}", json=quotas)
    assert answer.status_code == 201, answer.text
    for node in found.replicas:
        eventually(lambda: applied(node, principal))  # noqa: B023


def applied(node: Service, principal: str) -> int:
    """The number of quotas that a replica would apply."""
    count: int = node.ask(principal=principal, usage={"mutations": 0}, mode="peek")["applied"]
    return count


def decided_by(node: Service) -> int:
    """The number of decisions that a replica has counted."""
    lines = node.http.get("/metrics").text.splitlines()
    return sum(
        int(float(line.split()[-1])) for line in lines if line.startswith("quotagate_decisions_total{")
    )


def test_limit_holds_exactly_over_both_replicas(both):
    """Of 500 asks for 200 tokens, 200 are admitted; both replicas decide, and no ask is decided twice."""
    limit(both, "exact", controller_mutation_rate={**KEPT, "burst": 200})
    before = [decided_by(node) for node in both.replicas]
    answers = asked(both, [decide("exact")] * 250 + [check("exact")] * 250)
    admitted = [answer.json()["decision"] for answer in answers].count("admit")
    assert admitted == 200
    assert {answer.json()["source"] for answer in answers} == {"store"}
    shares = [decided_by(node) - was for node, was in zip(both.replicas, before, strict=True)]
    assert sum(shares) == 500
    assert min(shares) > 100


def test_readiness_finds_no_fault_in_the_servers_of_compose(both):
    ready = both.http.get("/health/ready")
    assert ready.json() == {
        "status": "ready",
        "store": "ok",
        "catalog": "ok",
        "throttle_factor": 1.0,
        "settings": "ok",
    }


def test_names_in_paths_arrive_unchanged(both):
    """`user=%2A` is the user named `*`, and `user=*` is the default for all users."""
    for spelt, quota in (("user=%2A", 7), ("user=*", 8)):
        assert both.http.put(f"/v1/quotas/{spelt}", json={"request_rate": quota}).status_code == 201
    quotas = [both.http.get(f"/v1/quotas/{name}").json()["quotas"] for name in ("user=%2A", "user=*")]
    assert [found["request_rate"]["limit"] for found in quotas] == [7, 8]
    both.http.delete("/v1/quotas/user=*")


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE", "OPTIONS"])
def test_check_passes_through_with_its_headers(both, method):
    """With any method, the first is admitted and the second throttled, each with its headers."""
    limit(both, method, controller_mutation_rate={**KEPT, "burst": 1})
    first, second = (check(method, method)(both.http) for _ in range(2))
    assert (first.status_code, first.headers["RateLimit"][:30]) == (200, '"controller_mutation_rate";r=0')
    assert second.status_code == 429
    assert int(second.headers["Retry-After"]) > 0
    assert (len(first.content) > 0) == (method != "HEAD")


def test_callers_through_nginx_need_a_key(both):
    """The address of nginx is not in an open network, whatever address the caller claims."""
    for ask in (decide("nobody"), check("nobody", **{"X-Forwarded-For": "10.83.41.1"})):
        with both.client() as http:
            del http.headers["Authorization"]
            assert ask(http).status_code == 401


def test_metrics_are_not_available_through_nginx(both):
    """They would be the metrics of a random replica."""
    assert both.http.get("/metrics").status_code == 404


def test_too_large_body_is_refused_by_the_api_itself(both):
    answer = both.http.post("/v1/decisions", content=b" " * (1024 * 1024 + 1))
    assert answer.status_code == 413
    assert answer.headers["Content-Type"] == "application/problem+json"


# A replica fails


def test_replica_that_dies_between_asks_goes_unnoticed(both):
    """The other replica answers all asks and charges each once; then the dead one comes back."""
    limit(both, "survivor", controller_mutation_rate=KEPT)
    both.replicas[0].process.kill()
    both.replicas[0].process.wait()
    answers = asked(both, [decide("survivor"), check("survivor")] * 100)
    assert Counter(answer.status_code for answer in answers) == {200: 200}
    assert {answer.json()["source"] for answer in answers} == {"store"}
    assert both.charged("survivor") == 200

    back = both.revive(0)
    eventually(lambda: asked(both, [decide("survivor")] * 10) and decided_by(back))


def test_replica_that_dies_during_asks_fails_only_those(both):
    """An ask that the replica had is not repeated, so its caller gets an error, and no other caller does."""
    limit(both, "dying", controller_mutation_rate=KEPT)
    answers: list[int | str] = []
    stop = threading.Event()

    def go_on(ask: Ask) -> None:
        with both.client() as http:
            while not stop.is_set():
                try:
                    answers.append(ask(http).status_code)
                except httpx.RemoteProtocolError:
                    answers.append("cut off")  # nginx had sent the head of the answer already

    def more(many: int) -> None:
        wanted = len(answers) + many
        eventually(lambda: len(answers) >= wanted)

    with ThreadPoolExecutor(CALLERS) as pool:
        asking = [pool.submit(go_on, ask("dying")) for ask in [decide, check] * (CALLERS // 2)]
        try:
            more(200)
            both.replicas[0].process.kill()
            more(500)
        finally:
            stop.set()
        for one in asking:
            one.result()
    counts = Counter(answers)
    assert counts.keys() <= {200, 502, "cut off"}
    # Each caller has one ask at that replica, and a dying socket may accept one more.
    assert counts.total() - counts[200] <= 2 * CALLERS
    assert counts[200] <= both.charged("dying") <= counts.total()
    both.revive(0)


@pytest.mark.parametrize("path", ["/v1/decisions", "/v1/decisions:batch"])
def test_overloaded_replica_answers_503_itself(path):
    """Its 503 passes through nginx with Retry-After, and the ask goes to no other replica."""
    with serving() as one, serving() as other:
        replicas = [one, other]
        for replica in replicas:
            replica.plays(overloaded("2"))
        places = [("127.0.0.1", int(replica.url.rpartition(":")[2])) for replica in replicas]
        with (
            nginx(places) as front,
            httpx.Client(transport=httpx.HTTPTransport(uds=str(front)), timeout=60) as http,
        ):
            for asked in range(1, 6):
                answer = http.post(f"http://quotagate{path}", json={})
                assert answer.status_code == 503
                assert answer.headers["Retry-After"] == "2"
                assert answer.json()["type"] == "urn:quotagate:overloaded"
                assert sum(len(replica.requests) for replica in replicas) == asked


def test_asks_at_a_hung_replica_are_not_repeated_at_the_other(both):
    """Its callers get 504, even for a GET, which nginx repeats by default; then nginx skips the replica."""
    limit(both, "hung", controller_mutation_rate=KEPT)
    hung = both.replicas[0]
    before = decided_by(hung)
    answers: list[httpx.Response] = []

    def all_answered() -> bool:
        some = asked(both, [decide("hung"), check("hung")] * CALLERS)
        answers.extend(some)
        return all(answer.status_code == 200 for answer in some)

    hung.process.send_signal(signal.SIGSTOP)
    try:
        assert not all_answered()
        eventually(all_answered, within_s=60)
    finally:
        hung.process.send_signal(signal.SIGCONT)
    statuses = Counter(answer.status_code for answer in answers)
    assert statuses.keys() == {200, 504}
    # It now reads the asks that it was sent while it hung, which no other replica answered.
    eventually(lambda: decided_by(hung) - before == statuses[504])
    assert both.charged("hung") == statuses.total()
