"""The debt of a token bucket is limited, and all nodes of a deployment use the same limit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import pytest

from app.domain.quota import MAX_EXACT
from tests.service import ADMIN_KEY, Service, running

HOUR_MS: Final = 3_600_000
README: Final = {"limit": 0.1, "algorithm": "token_bucket", "burst": 3, "enforcement": "delay"}
"""The token bucket of the README."""


@pytest.fixture(scope="module")
def timed() -> Iterator[Service]:
    """A node under the caller's clock."""
    with running(environment={"QUOTAGATE_CLOCK": "caller"}) as node:
        yield node


def ask(node: Service, at_ms: int, user: str, mutations: int, **more: Any) -> dict[str, Any]:
    """Ask for mutations, whose delay has no limit of its own."""
    return node.ask(at_ms=at_ms, principal=user, usage={"mutations": mutations}, detail=True, **more)


def forgiven(node: Service) -> float:
    page = node.http.get("/metrics").text
    (line,) = (line for line in page.splitlines() if line.startswith("quotagate_debt_forgiven_total "))
    return float(line.split()[1])


def test_largest_ask_locks_out_for_at_most_an_hour(timed: Service):
    timed.put("user=carol", controller_mutation_rate=README)
    before = forgiven(timed)
    spent = ask(timed, 0, "carol", MAX_EXACT)
    assert (spent["decision"], spent["throttle_ms"]) == ("delay", HOUR_MS)
    assert spent["quotas"][0]["remaining"] == -360
    assert forgiven(timed) - before == pytest.approx(MAX_EXACT - 363)
    assert ask(timed, HOUR_MS - 10_000, "carol", 0, mode="peek")["throttle_ms"] == 10_000
    assert ask(timed, HOUR_MS, "carol", 0)["decision"] == "admit"


def test_check_reports_the_same_debt(timed: Service):
    timed.put("user=frank", request_rate=README)
    usage, headers = {"requests": MAX_EXACT}, {"X-Quotagate-Principal": "frank"}
    assert timed.ask(at_ms=0, principal="frank", usage=usage)["decision"] == "delay"
    refused = timed.http.get("/v1/check?at_ms=0", headers=headers)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "3610"), "the debt and one token"
    assert timed.http.get(f"/v1/check?at_ms={HOUR_MS + 10_000}", headers=headers).status_code == 200


def test_record_and_refund_stay_within_the_maximum_debt(timed: Service):
    timed.put("user=erin", controller_mutation_rate={**README, "limit": 10, "burst": 20})
    assert ask(timed, 0, "erin", MAX_EXACT, mode="record")["throttle_ms"] == HOUR_MS
    assert ask(timed, 0, "erin", MAX_EXACT, mode="record")["throttle_ms"] == HOUR_MS
    given_back = ask(timed, 0, "erin", 1_000, mode="refund")
    assert given_back["quotas"][0]["remaining"] == 1_000 - 36_000


def test_raised_limit_shortens_a_debt_and_lowered_limit_keeps_its_maximum(timed: Service):
    timed.put("user=dave", controller_mutation_rate=README)
    ask(timed, 0, "dave", MAX_EXACT)
    timed.put("user=dave", controller_mutation_rate={**README, "limit": 1})
    assert ask(timed, 0, "dave", 0, mode="peek")["throttle_ms"] == HOUR_MS / 10
    ask(timed, 0, "dave", MAX_EXACT)
    timed.put("user=dave", controller_mutation_rate=README)
    before = forgiven(timed)
    refused = ask(timed, 0, "dave", 1, enforcement="deny")
    assert (refused["decision"], refused["throttle_ms"]) == ("throttle", HOUR_MS + 10_000)
    assert forgiven(timed) - before == 3_600 - 360
    assert ask(timed, HOUR_MS + 10_000, "dave", 1, enforcement="deny")["decision"] == "admit"


def test_node_with_another_maximum_debt_does_not_start_until_the_deployment_is_migrated():
    with running(environment={"QUOTAGATE_MAX_DEBT": "PT10M"}) as node:
        node.put("user=carol", controller_mutation_rate=README)
        assert node.ask(principal="carol", usage={"mutations": MAX_EXACT})["throttle_ms"] == 600_000
        assert "QUOTAGATE_MAX_DEBT is PT1H here and PT10M in this deployment" in refusal(node)
        environment = environment_of(node)
        command = [sys.executable, "-m", "app.run.cli", "migrate", "--max-debt"]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        with running(store_url=node.store_url, database_url=node.database_url) as other:
            assert other.ask(principal="carol", usage={"mutations": MAX_EXACT})["throttle_ms"] == HOUR_MS
        assert "QUOTAGATE_MAX_DEBT is PT10M here and PT1H in" in refusal(node, QUOTAGATE_MAX_DEBT="PT10M")


def environment_of(node: Service, **more: str) -> dict[str, str]:
    """Return the environment of another node of the deployment, without a maximum debt."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("QUOTAGATE_")}
    own = {
        "QUOTAGATE_REDIS_URL": node.store_url,
        "QUOTAGATE_DATABASE_URL": node.database_url,
        "QUOTAGATE_ADMIN_KEY": ADMIN_KEY,
    }
    return {**bare, **own, **more}


def refusal(node: Service, **more: str) -> str:
    """Return the output of another node of the deployment, which must not start."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = subprocess.run(
            [sys.executable, "-m", "app.run.cli", "serve", "--fd", str(listener.fileno())],
            env=environment_of(node, **more),
            pass_fds=(listener.fileno(),),
            check=False,
            capture_output=True,
            timeout=60,
            text=True,
        )
    assert ended.returncode == 1
    return ended.stdout + ended.stderr
