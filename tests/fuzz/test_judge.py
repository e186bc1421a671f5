"""The fuzzer's own checks: they refuse wrong answers, and its cases can be repeated."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

import pytest

from tests.fuzz.answers import Answer, Fault, Line
from tests.fuzz.canary import Canary
from tests.fuzz.generate import case

PROBLEM = b'{"type":"about:blank","title":"","status":404,"detail":""}'


def line(*said: bytes) -> Line:
    """A connection that received these bytes and was then closed."""
    reader = asyncio.StreamReader()
    for part in said:
        reader.feed_data(part)
    reader.feed_eof()
    return Line(reader)


def problem(
    body: bytes = PROBLEM, head: str = "404 Not Found", type_: str = "application/problem+json"
) -> bytes:
    return f"HTTP/1.1 {head}\r\ncontent-type: {type_}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def test_answers_are_read_one_after_the_other():
    said = line(b"HTTP/1.1 100 Continue\r\n\r\n", problem(), b"HTTP/1.1 204 No Content\r\n\r\n", problem())
    answers = [await said.next("GET") for _ in range(4)]
    assert [answer and answer.status for answer in answers] == [404, 204, 404, None]
    for answer in answers[:3]:
        assert answer is not None
        answer.check("GET")
    head = await line(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n").next("HEAD")
    assert head == Answer(200, {b"content-length": b"5"}, b"")


@pytest.mark.parametrize(
    "said",
    [
        problem(head="500 Internal Server Error", body=PROBLEM.replace(b"404", b"500")),
        problem(head="503 Service Unavailable", body=PROBLEM.replace(b"404", b"503")),
        problem(type_="text/plain"),
        problem(type_="application/json"),
        problem(body=PROBLEM.replace(b"404", b"400")),
        problem()[:-1],
        problem().replace(b"\r\n", b"\n"),
        problem().replace(b"HTTP/1.1", b"HTTP/1.0"),
        problem().replace(b"content-type", b"content type"),
        problem().replace(b"content-type:", b"content-length: 5\r\ncontent-type:"),
        problem().replace(b"content-type:", b"transfer-encoding: chunked\r\ncontent-type:"),
        problem().replace(b"content-length", b"x-length"),
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\ncontent-length: 1\r\n\r\nx",
        b"HTTP/1.1 200 OK\0\r\ncontent-length: 0\r\n\r\n",
        b"Internal Server Error",
    ],
)
async def test_forbidden_answer_is_a_fault(said: bytes):
    with pytest.raises(Fault):
        await judged(line(said))


async def judged(said: Line) -> None:
    answer = await said.next("GET")
    assert answer is not None
    answer.check("GET")


def answer_to(expected: Any) -> Any:
    """Return the right answer to a canary."""
    if isinstance(expected, list):
        return {
            "quotas": [{"observed": observed, "remaining": remaining} for observed, remaining in expected]
        }
    if "decisions" in expected:
        return {"decisions": [answer_to(decision) for decision in expected["decisions"]]}
    (*_, source) = expected["source"]
    return {**expected, "source": source, "throttle_ms": 0 if expected["decision"] == "admit" else 5}


def wrong(said: Any) -> Any:
    """The same answer with one wrong number or word in it."""
    if "quotas" in said:
        return {
            "quotas": [
                {**said["quotas"][0], "observed": said["quotas"][0]["observed"] + 1},
                *said["quotas"][1:],
            ]
        }
    if "decisions" in said:
        return {"decisions": [*said["decisions"][:-1], wrong(said["decisions"][-1])]}
    return {**said, "charged": not said["charged"]}


def test_a_canary_takes_nothing_but_the_truth():
    canary = Canary("canary", Random(1))
    for _ in range(500):
        _, _, expected = canary.question()
        said = answer_to(expected)
        canary.check(expected, Answer(200, {}, json.dumps(said).encode()))
        with pytest.raises(Fault):
            canary.check(expected, Answer(200, {}, json.dumps(wrong(said)).encode()))
    assert len(canary.known) == 40, "by now some are throttled"


def test_a_case_is_made_again_of_its_seed_and_number():
    cases = [case(3, number) for number in range(2_000)]
    assert cases == [case(3, number) for number in range(2_000)]
    assert cases != [case(4, number) for number in range(2_000)]


async def test_shed_request_is_no_fault_and_charges_no_canary():
    overloaded = b'{"type":"urn:quotagate:overloaded","title":"","status":503,"detail":""}'
    text = problem(overloaded, "503 Service Unavailable").replace(
        b"\r\n\r\n", b"\r\nretry-after: 2\r\n\r\n", 1
    )
    answer = await line(text).next("GET")
    assert answer is not None
    answer.check("GET")
    canary = Canary("canary", Random(1))
    for _ in range(20):
        before = set(canary.known), canary.spent
        _, _, expected = canary.question()
        canary.check(expected, answer)
        assert (canary.known, canary.spent) == before
    assert canary.shed == 20
    silent = await line(text.replace(b"retry-after: 2\r\n", b"")).next("GET")
    assert silent is not None
    with pytest.raises(Fault):
        silent.check("GET")
