"""Retries of the hand-made clients: the calls that they send again, and the calls that they never repeat."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable

import httpx
import pytest

from quotagate_client import Client, Problem, Retries, Unreachable
from tests.clients.both import Caller
from tests.clients.scripted import ADMITTED, LOST, Lost, Reply, Request, Script, Step, answer
from tests.service import Service

Make = Callable[..., Caller]

FAILURES: list[Step] = [LOST, Reply(502, b"<html>", "text/html"), Reply(503, b""), Reply(504, b"")]
ONCE = {"usage": {"requests": 1}, "principal": "alice"}


@pytest.mark.parametrize("failure", FAILURES)
def test_an_ask_is_sent_again_with_the_id_it_had(make: Make, script: Script, failure: Step):
    script.plays(failure, failure, answer(ADMITTED))
    caller = make(script.url)
    assert caller("decide", **ONCE).decision == "admit"
    ids = [request.body["id"] for request in script.requests]
    assert len(ids) == 3
    assert len(set(ids)) == 1
    assert 1 <= len(ids[0].encode()) <= 64


def test_every_ask_has_an_id_of_its_own(make: Make, script: Script):
    script.plays(answer(ADMITTED))
    caller = make(script.url)
    for _ in range(20):
        caller("decide", **ONCE)
    caller("decide", **ONCE, id="mine")
    ids = [request.body["id"] for request in script.requests]
    assert len(set(ids)) == 21
    assert ids[-1] == "mine"


@pytest.mark.parametrize("failure", FAILURES)
def test_without_retries_nothing_is_sent_twice_and_no_id_made_up(make: Make, script: Script, failure: Step):
    script.plays(failure)
    with pytest.raises((Unreachable, Problem)):
        make(script.url, retry=Retries(times=0))("decide", **ONCE)
    [request] = script.requests
    assert "id" not in request.body


def test_a_check_has_no_id_and_is_not_sent_twice(make: Make, script: Script):
    script.plays(LOST)
    with pytest.raises(Unreachable) as refused:
        make(script.url)("check", principal="alice")
    assert refused.value.maybe_charged
    assert len(script.requests) == 1


def test_a_peek_writes_nothing_and_is_sent_again_without_an_id(make: Make, script: Script):
    script.plays(LOST, answer(ADMITTED))
    make(script.url)("decide", mode="peek", **ONCE)
    assert [request.body.get("id") for request in script.requests] == [None, None]


def test_a_batch_is_sent_again_whole_when_each_ask_has_an_id(make: Make, script: Script):
    script.plays(LOST, answer({"decisions": [ADMITTED, ADMITTED]}))
    assert len(make(script.url)("decide_batch", [ONCE, {**ONCE, "id": "mine"}])) == 2
    first, second = (request.body["asks"] for request in script.requests)
    assert first == second
    assert first[1]["id"] == "mine"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 429, 500])
def test_other_errors_are_answers(make: Make, script: Script, status: int):
    problem = {"type": "about:blank", "title": "No", "status": status, "detail": "no"}
    script.plays(answer(problem, status))
    with pytest.raises(Problem) as refused:
        make(script.url)("decide", **ONCE)
    assert refused.value.status == status
    assert len(script.requests) == 1


def test_a_connection_that_cannot_be_made_is_tried_again_without_an_id_too(make: Make):
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    caller = make(url, retry=Retries(times=3))
    with pytest.raises(Unreachable) as refused:
        caller("check", principal="alice")
    assert not refused.value.maybe_charged
    assert len(caller.time.slept) == 3


def test_the_waits_between_grow_and_end(make: Make, script: Script):
    script.plays(LOST)
    caller = make(script.url, retry=Retries(times=5, first_s=0.1, longest_s=0.5, within_s=30))
    with pytest.raises(Unreachable):
        caller("decide", **ONCE)
    longest = [0.1, 0.2, 0.4, 0.5, 0.5]
    assert len(caller.time.slept) == len(longest)
    for slept, most in zip(caller.time.slept, longest, strict=True):
        assert most / 2 <= slept <= most


def test_no_retry_after_the_id_may_be_forgotten(make: Make, script: Script):
    caller = make(script.url, retry=Retries(times=9, within_s=10))

    def late(request: Request) -> Lost:
        caller.time.now += 4
        return LOST

    script.plays(late)
    with pytest.raises(Unreachable):
        caller("decide", **ONCE)
    assert len(script.requests) == 3
    with pytest.raises(ValueError, match="within_s"):
        Retries(within_s=60)


def test_an_answer_that_was_lost_is_charged_once(make: Make, script: Script, node: Service):
    """A real node charged the first ask, but its answer was lost."""
    limit = {"limit": 1, "algorithm": "token_bucket", "burst": 10_000, "enforcement": "deny"}
    node.put("user=lost", request_rate=limit)

    def pass_on(request: Request) -> Reply:
        said = node.http.post(request.path, content=request.content)
        return Reply(said.status_code, said.content)

    def lose(request: Request) -> Lost:
        pass_on(request)
        return LOST

    script.plays(lose, pass_on)
    decision = make(script.url)("decide", principal="lost", usage={"requests": 7_000}, detail=True)
    assert decision.decision == "admit"
    assert decision.source == "store"
    seen = node.ask(principal="lost", usage={"requests": 0}, mode="peek", detail=True)
    assert 3_000 <= seen["quotas"][0]["remaining"] <= 10_000 - 7_000 + 300  # refilled by 1 a second


def test_ids_come_from_the_systems_randomness_by_default(script: Script):
    script.plays(answer(ADMITTED))
    random.seed(7)
    with Client(script.url) as one:
        one.decide(usage={"requests": 1})
    random.seed(7)
    with Client(script.url) as other:
        other.decide(usage={"requests": 1})
    first, second = script.requests
    assert first.body["id"] != second.body["id"]


def test_a_client_of_the_callers_own_stays_open(script: Script):
    script.plays(answer(ADMITTED))
    with httpx.Client(headers={"X-Own": "yes"}, timeout=60) as http:
        with Client(script.url + "/", key="secret", http=http) as client:
            client.decide(usage={"requests": 1})
        assert not http.is_closed
    [request] = script.requests
    assert request.path == "/v1/decisions"
    assert request.headers["X-Own"] == "yes"
    assert request.headers["Authorization"] == "Bearer secret"
    assert json.loads(request.content)["usage"] == {"requests": 1}
