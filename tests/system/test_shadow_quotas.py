"""Shadow quotas of a real deployment: counts over its nodes, `quotas watch` and `quotas promote`."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Command, Ran, quotagate
from tests.service import STOP_WITHIN_S, Service, eventually
from tests.system.test_overview import follows, nodes
from tests.terminals import terminal

__all__ = ["quotagate"]

BURST = 10
DENY = {"limit": 1e-6, "algorithm": "token_bucket", "burst": BURST, "enforcement": "deny"}
SHADOW = {**DENY, "shadow": True}
VERDICTS = ("admit", "delay", "throttle", "reject")
Verdicts = Counter[str]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Service]]:
    """Two nodes of a deployment; each test has an entity of its own."""
    with nodes(tmp_path_factory.mktemp("deployment"), 2) as (made, _):
        yield made


def asked(node: Service, *principals: str, **more: object) -> Verdicts:
    """Ask a node, and count the verdicts of shadow quotas on the asks that went ahead."""
    asks = [{"principal": each, "usage": {"requests": 1}, "detail": True, **more} for each in principals]
    return Counter(
        quota["verdict"]
        for decision in node.batch(asks)
        if decision["decision"] in ("admit", "delay")
        for quota in decision["quotas"]
        if quota["shadow"]
    )


def shadows(node: Service, entity: str) -> dict[str, Any]:
    answer = node.http.get("/v1/quotas:shadow", params={"entity": entity})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def counted(node: Service, entity: str) -> Verdicts:
    """The counts of the only shadow quota of an entity."""
    (shadow,) = shadows(node, entity)["shadows"]
    return +Counter({verdict: shadow[verdict] for verdict in VERDICTS})


def run(quotagate: Command, node: Service, *words: str) -> Ran:
    return quotagate(*words, "--url", node.url, "--key", node.admin_key)


def test_counts_are_those_of_the_deployment_over_a_stop_and_a_start(tmp_path: Path) -> None:
    with nodes(tmp_path, 2) as ((first, second), start):
        count_over_a_stop_and_a_start(first, second, start)


def count_over_a_stop_and_a_start(first: Service, second: Service, start: Callable[[], Any]) -> None:
    first.put("user=*", request_rate=SHADOW)
    eventually(lambda: follows(second, "user=a"))
    verdicts = asked(first, *12 * ["a"], *5 * ["b"]) + asked(second, *12 * ["a"], *5 * ["c"])
    assert verdicts == {"admit": 20, "throttle": 14}
    asked(first, *5 * ["a"], mode="peek")  # charges nothing, and does not count
    eventually(lambda: counted(first, "user=*") == verdicts)
    verdicts += asked(second, "d", "d")
    second.process.terminate()
    assert second.process.wait(STOP_WITHIN_S) == 0
    assert counted(first, "user=*") == verdicts, "a process that stops sends its counts"
    with start() as again:
        verdicts += asked(again, "a")
        eventually(lambda: counted(again, "user=*") == verdicts)
        assert shadows(first, "user=*")["shadows"] == shadows(again, "user=*")["shadows"]


def test_asks_that_another_quota_refuses_do_not_count(pair: list[Service]) -> None:
    node, _ = pair
    node.put("user=refused", request_rate={**SHADOW, "burst": 1}, producer_byte_rate=0)
    refused = [{"principal": "refused", "usage": {"requests": 1, "produce_bytes": 1}}] * 5
    assert {each["decision"] for each in node.batch(refused)} == {"reject"}
    verdicts = asked(node, *4 * ["refused"])
    assert verdicts == {"admit": 1, "throttle": 3}
    eventually(lambda: counted(node, "user=refused") == verdicts)


def test_counts_begin_anew_when_the_definition_changes_and_only_then(pair: list[Service]) -> None:
    first, second = pair
    first.put("user=anew", request_rate=SHADOW)
    verdicts = asked(first, *15 * ["anew"])
    eventually(lambda: counted(second, "user=anew") == verdicts)
    since_ms = shadows(first, "user=anew")["shadows"][0]["since_ms"]
    first.put("user=anew", request_rate=SHADOW, producer_byte_rate=5)  # the same, with another quota
    verdicts += asked(first, "anew")
    eventually(lambda: counted(second, "user=anew") == verdicts)
    assert shadows(first, "user=anew")["shadows"][0]["since_ms"] == since_ms
    for burst in (BURST + 1, BURST):  # there and back
        first.put("user=anew", request_rate={**SHADOW, "burst": burst})
    assert counted(second, "user=anew") == {}
    verdicts = asked(first, "anew")
    eventually(lambda: counted(second, "user=anew") == verdicts)
    assert shadows(second, "user=anew")["shadows"][0]["since_ms"] > since_ms


def test_known_ids_that_a_node_answers_for_count_too(pair: list[Service]) -> None:
    node, _ = pair
    node.put("user=ids", producer_ids_rate={"limit": 2, "shadow": True})

    def ask(*ids: int) -> str:
        source: str = node.ask(principal="ids", usage={"producer_ids": [*ids]})["source"]
        return source

    assert [ask(each) for each in (1, 2, 3)] == ["store"] * 3
    asks = 3
    while ask(1) != "local":
        asks += 1
    eventually(lambda: counted(node, "user=ids") == {"admit": asks, "throttle": 1})


def test_promote_makes_a_shadow_quota_live_and_says_what_it_would_have_refused(
    pair: list[Service], quotagate: Command
) -> None:
    first, second = pair
    first.put("user=promoted", request_rate=SHADOW, producer_byte_rate=5)
    verdicts = asked(first, *12 * ["promoted"])
    eventually(lambda: counted(first, "user=promoted") == verdicts)
    version = shadows(first, "user=promoted")["version"]
    stale = run(quotagate, first, "quotas", "promote", "user=promoted", "--if-match", str(version - 1))
    assert (stale.code, "412" in stale.err) == (1, True)
    assert asked(first, "promoted") == {"throttle": 1}, "it is still in shadow"
    eventually(lambda: counted(first, "user=promoted")["throttle"] == 3)
    ran = run(quotagate, second, "quotas", "promote", "user=promoted", "request_rate", "-o", "json")
    assert ran.code == 0, ran.err
    assert "shorter than its window" in ran.err
    made = json.loads(ran.out)
    assert [shadow["quota"] for shadow in made["promoted"]] == ["request_rate"]
    assert made["promoted"][0]["throttle"] == 3
    assert made["quotas"]["request_rate"] == DENY
    (change, *_) = second.http.get("/v1/quotas:history", params={"entity": "user=promoted"}).json()["changes"]
    assert change["before"]["request_rate"]["shadow"] is True
    assert change["reason"].startswith(
        "promoted from shadow: request_rate would have refused 3 and delayed 0 of 13 asks in "
    )
    assert second.ask(principal="promoted", usage={"requests": 1})["decision"] == "throttle"
    again = run(quotagate, second, "quotas", "promote", "user=promoted")
    assert (again.code, again.err) == (1, "quotagate: user=promoted has no shadow quota\n")


def test_promote_warns_only_of_a_period_shorter_than_a_window(
    pair: list[Service], quotagate: Command
) -> None:
    node, _ = pair
    short = {"limit": 5, "shadow": True, "samples": 2, "sample_ms": 100, "enforcement": "deny"}
    node.put("user=brief", request_rate=short)
    (shadow,) = shadows(node, "user=brief")["shadows"]
    eventually(lambda: shadows(node, "user=brief")["now_ms"] > shadow["since_ms"] + shadow["window_ms"])
    ran = run(quotagate, node, "quotas", "promote", "user=brief", "--reason", "trial is over")
    assert ran.code == 0
    assert "warning" not in ran.err
    (change, *_) = node.http.get("/v1/quotas:history").json()["changes"]
    assert change["reason"] == "trial is over"


def test_watch_follows_the_deployment_until_ctrl_c(pair: list[Service]) -> None:
    first, second = pair
    first.put("user=watched", request_rate=SHADOW)
    eventually(lambda: follows(second, "user=watched"))
    with terminal(second, "quotas", "watch", "user=watched") as shown:
        eventually(lambda: shown.shows(r"request_rate +1e-06 +.* 0 +0 +0\s"))
        verdicts = asked(first, *15 * ["watched"]) + asked(second, "watched")
        assert verdicts == {"admit": 10, "throttle": 6}
        eventually(lambda: shown.shows(r"request_rate +1e-06 +.* 16 +0 +6 \(37.50%\)(?s:.*)[▁▂▃▄▅▆▇█]"))
        shown.process.send_signal(signal.SIGINT)
        assert shown.process.wait(60) == 0
        assert "Traceback" not in shown.said


def test_undo_takes_the_last_change_back_and_then_itself(pair: list[Service], quotagate: Command) -> None:
    node, _ = pair
    place = "/v1/quotas/user=undone"

    def undo(*more: str) -> Ran:
        return run(quotagate, node, "quotas", "undo", "user=undone", *more)

    def quotas() -> Any:
        found = node.http.get(place)
        return found.json()["quotas"] if found.status_code == 200 else None

    assert undo().code == 1, "there is no change yet"
    five, six = {"request_rate": {"limit": 5}}, {"request_rate": {"limit": 6, "shadow": True}}
    node.put("user=undone", **five)
    node.put("user=undone", **six, producer_byte_rate=7)
    after = quotas()
    states = []
    for _ in range(2):
        assert undo().code == 0
        states.append(quotas())
    assert states == [five, after]
    assert node.http.delete(place).status_code == 204
    assert (undo().code, quotas()) == (0, after)
    version = node.http.get(place).json()["version"]
    assert (undo("--if-match", str(version - 1)).code, quotas()) == (1, after)
    assert (undo().code, quotas()) == (0, None)
    (newest, *_) = node.http.get("/v1/quotas:history", params={"entity": "user=undone"}).json()["changes"]
    assert (newest["before"], newest["after"]) == (after, None)
    assert newest["reason"].startswith("undo of the change of ")
