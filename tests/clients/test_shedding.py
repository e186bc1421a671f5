"""The hand-made clients retry a shed ask, a few times."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from quotagate_client import BatchCutShort, Overloaded, Problem, Retries, Unreachable
from tests.clients.both import Caller
from tests.clients.scripted import ADMITTED, LOST, Reply, Script, answer, every, overloaded, throttled

Make = Callable[..., Caller]
ONCE = {"usage": {"requests": 1}, "principal": "alice"}


@pytest.mark.parametrize("seconds", [1, 2, 3])
def test_an_ask_that_was_shed_is_sent_again_when_the_answer_says(make: Make, script: Script, seconds: int):
    script.plays(overloaded(str(seconds)), overloaded(str(seconds)), answer(ADMITTED))
    caller = make(script.url)
    assert caller("decide", **ONCE).decision == "admit"
    assert len(caller.time.slept) == 2
    assert all(seconds <= slept <= 1.1 * seconds for slept in caller.time.slept), "never sooner"
    assert caller.time.slept[0] != caller.time.slept[1], "callers with the same wait must not return at once"
    assert len({request.body["id"] for request in script.requests}) == 1


def test_without_jitter_the_wait_is_what_the_answer_says(make: Make, script: Script):
    script.plays(overloaded("3"), answer(ADMITTED))
    caller = make(script.url, jitter=0)
    caller("decide", **ONCE)
    assert caller.time.slept == [3.0]


@pytest.mark.parametrize("retry_after", [None, "Sun, 22 Nov 2026 12:00:00 GMT", "-1"])
def test_missing_retry_after_means_one_second(make: Make, script: Script, retry_after: str | None):
    script.plays(overloaded(retry_after), answer(ADMITTED))
    caller = make(script.url, jitter=0)
    caller("decide", **ONCE)
    assert caller.time.slept == [1.0]


def test_it_needs_no_id_as_nothing_was_charged(make: Make, script: Script):
    """A check has no id; only after this answer is it sent again."""
    script.plays(overloaded(), answer(ADMITTED))
    assert make(script.url)("check", principal="alice").admitted
    assert len(script.requests) == 2


def test_overload_is_raised_after_the_last_retry(make: Make, script: Script):
    script.plays(overloaded("3"))
    caller = make(script.url, retry=Retries(times=4))
    with pytest.raises(Overloaded) as refused:
        caller("decide", **ONCE)
    assert refused.value.status == 503
    assert refused.value.retry_after_s == 3.0
    assert "more to do" in refused.value.detail
    assert len(script.requests) == 5


def test_overload_is_raised_at_once_without_retries(make: Make, script: Script):
    script.plays(overloaded())
    caller = make(script.url, retry=Retries(times=0))
    with pytest.raises(Overloaded):
        caller("decide", **ONCE)
    assert (len(script.requests), caller.time.slept) == (1, [])


@pytest.mark.parametrize("after", ["3", "86400"])
def test_a_wait_beyond_the_time_for_retries_is_not_waited(make: Make, script: Script, after: str):
    script.plays(overloaded(after))
    caller = make(script.url, retry=Retries(times=100, within_s=7))
    with pytest.raises(Overloaded):
        caller("decide", **ONCE)
    assert sum(caller.time.slept) <= 7
    assert len(script.requests) == (3 if after == "3" else 1)


def test_the_callers_own_deadline_holds(make: Make, script: Script):
    """The client does not begin a sleep that would end after the deadline."""
    script.plays(overloaded("2"))
    caller = make(script.url, retry=Retries(times=100))
    with pytest.raises(Overloaded):
        caller("acquire", within_s=5.0, **ONCE)
    assert len(script.requests) == 3
    assert caller.time.now <= 1_005.0


def test_the_deadline_covers_throttles_and_shedding_together(make: Make, script: Script):
    script.plays(throttled(3_000), overloaded("3"))
    caller = make(script.url, jitter=0)
    with pytest.raises(Overloaded):
        caller("acquire", within_s=5.0, **ONCE)
    assert caller.time.slept == [3.0]


def test_acquire_continues_after_shedding(make: Make, script: Script):
    script.plays(overloaded("1"), throttled(500), overloaded("1"), answer(ADMITTED))
    caller = make(script.url, jitter=0)
    assert caller("acquire", within_s=10, **ONCE).decision == "admit"
    assert caller.time.slept == [1.0, 0.5, 1.0]


def test_the_later_calls_of_a_batch_are_sent_again_too(make: Make, script: Script):
    asks = [{"usage": {"requests": 1}, "principal": str(n)} for n in range(1_500)]
    script.plays(every, overloaded(), every)
    assert [found.applied for found in make(script.url)("decide_batch", asks)] == list(range(1_500))
    script.plays(every, overloaded())
    with pytest.raises(BatchCutShort) as cut:
        make(script.url, retry=Retries(times=1))("decide_batch", asks)
    assert len(cut.value.decided) == 1_000
    assert isinstance(cut.value.__cause__, Overloaded)


def test_a_check_that_was_shed_is_a_refusal(make: Make, script: Script):
    """A shed check is answered as for gateways: 429 with the body of a throttle. It is not sent again."""
    refused = throttled(1_400)
    script.plays(Reply(429, refused.content, refused.type, (("Retry-After", "2"), ("X-Throttle-Ms", "1400"))))
    check = make(script.url)("check", principal="alice")
    assert not check.admitted
    assert check.decision.throttle_ms == 1_400
    assert check.headers == {"Retry-After": "2"}
    assert len(script.requests) == 1


def test_another_503_is_no_promise_that_nothing_was_charged(make: Make, script: Script):
    """A 503 of a load balancer, or with another problem type: without an id the call is not sent again."""
    other = {"type": "about:blank", "title": "Service Unavailable", "status": 503, "detail": "no catalog"}
    for reply in (answer(other, 503), Reply(503, b"<html>", "text/html"), answer([], 503)):
        script.plays(Reply(*reply[:3], (("Retry-After", "1"),)))
        script.requests.clear()
        with pytest.raises(Problem) as refused:
            make(script.url)("check", principal="alice")
        assert not isinstance(refused.value, Overloaded)
        assert len(script.requests) == 1


def test_ask_that_was_shed_first_and_lost_then_may_have_been_charged(make: Make, script: Script):
    script.plays(overloaded(), LOST)
    with pytest.raises(Unreachable) as refused:
        make(script.url, retry=Retries(times=1))("decide", **ONCE)
    assert refused.value.maybe_charged


def test_a_peek_that_was_shed_is_sent_again(make: Make, script: Script):
    script.plays(overloaded(), answer(ADMITTED))
    make(script.url)("decide", mode="peek", **ONCE)
    assert [json.loads(request.content).get("id") for request in script.requests] == [None, None]
