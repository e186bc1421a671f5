"""The hand-made clients wait for a throttle or a delay, never too short, and report it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quotagate_client import Ask, Client, DeadlinePassed, Rejected
from quotagate_client.throttle_times import ThrottleTimes
from tests.clients.both import Caller, Time
from tests.clients.scripted import ADMITTED, REFUSED, Script, answer, delayed, throttled
from tests.service import Service

Make = Callable[..., Caller]
ONCE: Any = {"usage": {"requests": 1}, "principal": "alice"}


def test_throttle_is_waited_out_with_positive_jitter(make: Make, script: Script):
    script.plays(throttled(2_000), throttled(500), answer(ADMITTED))
    caller = make(script.url, jitter=0.2)
    assert caller("acquire", **ONCE).decision == "admit"
    first, second = caller.time.slept
    assert 2.0 <= first <= 2.4
    assert 0.5 <= second <= 0.6
    assert (first / 2.0) != (second / 0.5)
    assert len({request.body["id"] for request in script.requests}) == 3, "each ask is a new one"


def test_jitter_is_never_negative(make: Make):
    for wrong in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="jitter"):
            Client("http://127.0.0.1:1", jitter=wrong)


def test_deadline_that_cannot_be_met_fails_at_once(make: Make, script: Script):
    script.plays(throttled(400), throttled(700))
    caller = make(script.url)
    with pytest.raises(DeadlinePassed) as refused:
        caller("acquire", within_s=1.0, **ONCE)
    assert refused.value.decision.throttle_ms == 700
    assert "request_rate of user=*" in str(refused.value)
    assert len(caller.time.slept) == 1
    assert caller.time.now < 1_001.0


def test_a_reject_is_not_asked_again(make: Make, script: Script):
    script.plays(answer({**REFUSED, "decision": "reject"}))
    caller = make(script.url)
    with pytest.raises(Rejected):
        caller("acquire", **ONCE)
    assert len(script.requests) == 1
    assert caller.time.slept == []


def test_a_delay_is_held_after_the_work_from_the_decision_on(make: Make, script: Script):
    script.plays(delayed(1_000))
    caller = make(script.url, jitter=0)

    def work(decision: object) -> str:
        assert caller.time.slept == [], "the work comes first"
        caller.time.now += 0.25
        return "done"

    assert caller.work(work, **ONCE) == "done"
    assert caller.time.slept == [pytest.approx(0.75)]


def test_a_delay_shorter_than_the_work_is_over(make: Make, script: Script):
    script.plays(delayed(1_000))
    caller = make(script.url, jitter=0)

    def work(decision: object) -> None:
        caller.time.now += 5

    caller.work(work, **ONCE)
    assert caller.time.slept == []


def test_failed_work_is_charged_and_held_too(make: Make, script: Script):
    script.plays(delayed(1_000))
    caller = make(script.url, jitter=0)

    def work(decision: object) -> None:
        raise KeyError("of the caller's own")

    with pytest.raises(KeyError, match="own"):
        caller.work(work, **ONCE)
    assert caller.time.slept == [1.0]


def test_a_limited_function_asks_for_each_call(make: Make, script: Script):
    script.plays(answer(ADMITTED), throttled(300), answer(ADMITTED))
    caller = make(script.url)

    def add(one: int, other: int) -> int:
        """Adds."""
        return one + other

    limited = caller.limited(add, ONCE)
    assert limited(1, 2) == 3
    assert limited(3, other=4) == 7
    assert len(caller.time.slept) == 1


def test_a_limited_function_may_name_its_ask_by_its_arguments(make: Make, script: Script):
    def ask(tenant: str, size: int) -> Ask:
        return {"principal": tenant, "usage": {"produce_bytes": size}}

    script.plays(answer(ADMITTED), throttled(60_000))
    limited = make(script.url).limited(lambda tenant, size: size, ask, within_s=5)
    assert limited("acme", 100) == 100
    with pytest.raises(DeadlinePassed):
        limited("other", size=200)
    assert [(request.body["principal"], request.body["usage"]) for request in script.requests] == [
        ("acme", {"produce_bytes": 100}),
        ("other", {"produce_bytes": 200}),
    ]


def test_a_decorated_function_keeps_its_name():
    with Client() as client:

        @client.limited(ONCE)
        def work() -> None:
            """It says what it does."""

    assert work.__name__ == "work"
    assert work.__doc__ == "It says what it does."


def test_client_waits_until_a_real_node_admits(make: Make, node: Service):
    """While the client sleeps, an operator raises the limit."""
    limit = {"limit": 0.01, "algorithm": "token_bucket", "burst": 1, "enforcement": "deny"}
    caller = make(node.url)
    node.put(f"user=waits-{caller.kind}", request_rate=limit)
    caller.time.while_asleep = lambda: node.put(f"user=waits-{caller.kind}", request_rate=1e6)
    ask = {"principal": f"waits-{caller.kind}", "usage": {"requests": 1}}
    assert caller("acquire", **ask).decision == "admit"
    assert caller.time.slept == []
    assert caller("acquire", **ask).decision == "admit"
    [slept] = caller.time.slept
    assert 50 < slept <= 110, "one in a hundred seconds"


def test_throttle_times_are_reported_over_the_last_minute(make: Make, script: Script):
    caller = make(script.url)
    assert caller.client.throttle_time_avg is None
    assert caller.client.throttle_time_max is None
    script.plays(throttled(3_000), delayed(600), answer({"decisions": [ADMITTED, ADMITTED]}))
    caller("decide", **ONCE)
    caller("decide", **ONCE)
    caller("decide_batch", [ONCE, ONCE])
    assert caller.client.throttle_time_avg == pytest.approx(3_600 / 4)
    assert caller.client.throttle_time_max == 3_000


def test_a_peek_is_no_answer_to_work(make: Make, script: Script):
    script.plays(throttled(3_000))
    caller = make(script.url)
    caller("decide", mode="peek", **ONCE)
    assert caller.client.throttle_time_max is None


def test_throttle_samples_expire_a_minute_after_their_last_event():
    time = Time(now=0)
    times = ThrottleTimes(time.clock)
    times.record(100)
    time.now = 29.0
    times.record(300)  # the same sample
    time.now = 31.0
    times.record(20)  # a second one
    assert times.average_ms() == pytest.approx(140)
    assert times.longest_ms() == 300
    time.now = 88.9
    assert times.longest_ms() == 300
    time.now = 89.0
    assert times.longest_ms() == 20
    assert times.average_ms() == 20
    times.record(0)
    assert times.average_ms() == pytest.approx(10)
    time.now = 149.0
    assert times.average_ms() is None
    assert times.longest_ms() is None
