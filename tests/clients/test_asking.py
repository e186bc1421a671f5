"""Requests and answers of the hand-made clients: typed answers, batches, problems, checks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from quotagate_client import (
    BatchCutShort,
    Check,
    CheckHeaders,
    Decision,
    FieldError,
    LimitedBy,
    NotUnderstood,
    Problem,
)
from tests.clients.both import Caller
from tests.clients.scripted import ADMITTED, Reply, Request, Script, answer, every
from tests.service import Service

Make = Callable[..., Caller]
DENY = {"limit": 0.001, "algorithm": "token_bucket", "enforcement": "deny"}


def test_an_answer_is_typed_and_frozen(make: Make, node: Service):
    node.put("user=typed", request_rate={**DENY, "burst": 5})
    caller = make(node.url)
    decision = caller("decide", principal="typed", usage={"requests": 7}, detail=True)
    assert isinstance(decision, Decision)
    assert (decision.decision, decision.may_go_ahead, decision.source) == ("reject", False, "store")
    assert decision.limited_by == LimitedBy("request_rate", "user=typed", "user=typed", "too_large", 5)
    [verdict] = decision.quotas
    assert (verdict.quota, verdict.verdict, verdict.limit) == ("request_rate", "reject", 0.001)
    with pytest.raises(FrozenInstanceError):
        decision.decision = "admit"  # type: ignore[misc]


def test_fields_of_a_newer_service_are_ignored(make: Make, script: Script):
    by = {"quota": "request_rate", "entity": "user=*", "bucket": "user=a", "colour": "red"}
    script.plays(answer({**ADMITTED, "limited_by": by, "mood": "good"}))
    decision = make(script.url)("decide", usage={"requests": 1})
    assert decision.limited_by == LimitedBy("request_rate", "user=*", "user=a")


@pytest.mark.parametrize(
    "content",
    [b"<html>", b"[]", b"{}", b'{"decision": "maybe"}', json.dumps({**ADMITTED, "decision": "no"}).encode()],
)
def test_malformed_decision_is_reported(make: Make, script: Script, content: bytes):
    script.plays(Reply(200, content))
    with pytest.raises(NotUnderstood):
        make(script.url)("decide", usage={"requests": 1})


def test_batch_answer_with_too_few_decisions_is_malformed(make: Make, script: Script):
    script.plays(answer({"decisions": [ADMITTED]}))
    with pytest.raises(NotUnderstood, match="2 decisions"):
        make(script.url)("decide_batch", [{"usage": {"requests": 1}}] * 2)


def test_a_bad_ask_is_a_problem_with_its_fields(make: Make, node: Service):
    with pytest.raises(Problem) as refused:
        make(node.url)("decide", principal="alice", usage={"requests": 1.5})
    problem = refused.value
    assert problem.status == 422
    assert FieldError("/usage/requests", "must be an integer") in problem.errors
    assert "/usage/requests: must be an integer" in str(problem)


def test_a_wrong_key_is_a_problem(make: Make, node: Service):
    with pytest.raises(Problem) as refused:
        make(node.url, key="wrong")("decide", usage={"requests": 1})
    assert refused.value.status == 401


def test_a_page_of_a_balancer_is_a_problem_too(make: Make, script: Script):
    script.plays(Reply(500, b"<h1>Oops</h1>", "text/html"))
    with pytest.raises(Problem) as refused:
        make(script.url)("decide", usage={"requests": 1})
    assert (refused.value.title, refused.value.detail) == ("Internal Server Error", "<h1>Oops</h1>")


def test_asks_with_ids_go_through_to_a_real_node(make: Make, node: Service):
    caller = make(node.url)
    node.put(f"user=ids-{caller.kind}", producer_ids_rate=100_000)
    asks = [
        {"principal": f"ids-{caller.kind}", "usage": {"producer_ids": range(i * 1_000, (i + 1) * 1_000)}}
        for i in range(25)
    ]
    decisions = caller("decide_batch", asks)
    assert [(d.decision, d.charged, d.source) for d in decisions] == [("admit", True, "store")] * 25


def test_more_asks_than_a_call_takes_keep_their_order(make: Make, node: Service):
    caller = make(node.url)
    node.put(f"user=many-{caller.kind}", request_rate={**DENY, "burst": 1_500})
    asks = [{"principal": f"many-{caller.kind}", "usage": {"requests": 1}} for _ in range(2_100)]
    decisions = caller("decide_batch", iter(asks))
    assert [d.decision for d in decisions[:1_500]] == ["admit"] * 1_500
    assert {d.decision for d in decisions[1_510:]} == {"throttle"}
    assert caller("decide_batch", []) == []


@pytest.mark.parametrize(
    ("ask", "of", "calls"),
    [
        ({"usage": {"requests": 1}}, 2_001, [1_000, 1_000, 1]),
        ({"usage": {"producer_ids": [1, 2, 3] * 333}}, 11, [10, 1]),
        ({"usage": {"requests": 1}, "client_id": "é" * 256, "broker": "b" * 512}, 1_500, None),
    ],
)
def test_batches_stay_within_the_wires_bounds(make: Make, script: Script, ask: Any, of: int, calls: Any):
    script.plays(every)
    decisions = make(script.url)("decide_batch", [{**ask, "principal": str(i)} for i in range(of)])
    assert [decision.applied for decision in decisions] == list(range(of))
    sent = [request.body["asks"] for request in script.requests]
    assert calls is None or [len(asks) for asks in sent] == calls
    for request, asks in zip(script.requests, sent, strict=True):
        assert len(request.content) <= 1_048_576
        assert len(asks) <= 1_000
        assert sum(len(ask["usage"].get("producer_ids", [])) for ask in asks) <= 10_000


def test_failed_later_part_reports_earlier_decisions(make: Make, node: Service):
    asks: list[Any] = [{"principal": "cut", "usage": {"requests": 1}} for _ in range(1_100)]
    asks[1_050] = {"principal": "cut", "usage": {"request": 1}}
    with pytest.raises(BatchCutShort) as refused:
        make(node.url)("decide_batch", asks)
    assert len(refused.value.decided) == 1_000
    problem = refused.value.__cause__
    assert isinstance(problem, Problem)
    assert problem.errors[0].field == "/asks/1050/usage/request"


def test_failed_first_part_raises_its_problem(make: Make, node: Service):
    with pytest.raises(Problem) as refused:
        make(node.url)("decide_batch", [{"usage": {"requests": 1}}, {"usage": {}}])
    assert refused.value.errors[0].field == "/asks/1/usage"


def test_check_is_read_as_a_gateway_reads_it(make: Make, node: Service):
    caller = make(node.url)
    node.put(f"user=zo%C3%AB-{caller.kind}", request_rate={**DENY, "burst": 3})
    admitted = caller("check", principal=f"zoë-{caller.kind}", client_id="", ip="10.0.0.7", requests=3)
    assert isinstance(admitted, Check)
    assert admitted.admitted
    assert admitted.headers["RateLimit-Policy"].startswith('"request_rate";q=3;')
    refused = caller("check", principal=f"zoë-{caller.kind}")
    assert not refused.admitted
    assert refused.decision.decision == "throttle"
    assert int(refused.headers["Retry-After"]) * 1000 >= refused.decision.throttle_ms
    assert caller.client.throttle_time_max == refused.decision.throttle_ms


def test_a_check_that_cannot_be_understood_is_a_problem(make: Make, node: Service):
    with pytest.raises(Problem) as refused:
        make(node.url)("check", principal="alice", requests="many")
    assert refused.value.errors == (FieldError("/requests", "must be an integer"),)


def test_the_headers_of_a_check_may_have_other_names(make: Make, script: Script):
    script.plays(answer(ADMITTED))
    caller = make(script.url, check_headers=CheckHeaders(principal="X-User"))
    caller("check", principal="alice", produce_bytes=1.5, broker="1")
    [request] = script.requests
    assert isinstance(request, Request)
    assert (request.method, request.path) == ("GET", "/v1/check?produce_bytes=1.5&broker=1")
    assert request.headers["X-User"] == "alice"
    assert "X-Quotagate-IP" not in request.headers
