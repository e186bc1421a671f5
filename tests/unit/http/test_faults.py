"""All faults of a body are named, and nothing else."""

from __future__ import annotations

import gc
import json
import re
from time import thread_time
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.admission.gathering.slices import completed
from app.domain.quota_value import pointer
from app.http.bodies import AskBody, BatchBody, LeaseRequestBody, SpentBody, UsageBody
from app.http.faults import faults_in
from app.http.openapi.keys import NewKeyBody
from app.http.openapi.quotas_lists import ApplicationBody
from app.http.openapi.volumes import PushedVolumesBody
from app.http.problems import MAX_ERRORS

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(["", "a", "deny", "peek", "x" * 513, 0, 1, -1, 1.0, 1.5, 1e400, 2**53, 2**63, 10**320]),
)
USAGE = st.dictionaries(
    st.sampled_from([*UsageBody.__struct_fields__, "odd"]), LEAVES | st.lists(LEAVES, max_size=3), max_size=2
)
ASK = st.builds(
    lambda usage, others: {"usage": usage} | others,
    USAGE,
    st.dictionaries(st.sampled_from([*AskBody.__struct_fields__, "odd"]), LEAVES, max_size=2),
)
BODIES = st.one_of(
    LEAVES,
    ASK,
    st.fixed_dictionaries({"asks": st.lists(ASK, max_size=2) | LEAVES}),
    st.fixed_dictionaries(
        {"ask": ASK},
        optional={
            "lease_ms": LEAVES,
            "settle": st.lists(
                st.fixed_dictionaries({"usage": USAGE}, optional={"lease": LEAVES}), max_size=2
            ),
        },
    ),
)
TYPES: list[type] = [AskBody, BatchBody, LeaseRequestBody, SpentBody, NewKeyBody, PushedVolumesBody]


def named(body: bytes, type_: type) -> list[tuple[str, str]]:
    return [(fault.field, fault.message) for fault in completed(faults_in(body, type_))]


@pytest.mark.parametrize("type_", TYPES)
@given(BODIES)
def test_a_fault_is_found_where_the_decoder_finds_one(type_: type, value: Any):
    body = json.dumps(value).replace("Infinity", "1e999").encode()
    found = named(body, type_)
    try:
        msgspec.convert(json.loads(body), type_)
    except msgspec.ValidationError as error:
        message = str(error)
        path = [
            int(each) if each.isdigit() else each for each in re.findall(r"\w+", message.partition("`$")[2])
        ]
        field = re.search(r"field `(.*?)`", message)
        assert pointer(*path, *([field[1]] if field else [])) in [each for each, _ in found]
    else:
        assert found == []


@settings(max_examples=500)
@given(ASK)
def test_each_field_is_judged_as_the_decoder_judges_it_alone(ask: dict[str, Any]):
    def is_wrong(name: str, value: Any) -> bool:
        try:
            msgspec.convert({"usage": {"requests": 1}, name: value}, AskBody)
        except msgspec.ValidationError:
            return True
        return False

    found = named(json.dumps(ask).replace("Infinity", "1e999").encode(), AskBody)
    wrong = {name for name, value in ask.items() if is_wrong(name, value)}
    assert {field.split("/")[1] for field, _ in found} == wrong


def test_all_faults_are_named_in_the_order_of_the_fields():
    usage = {"requests": -1, "odd": 1, "fetch_bytes": "x", "request_time_ms": 5}
    ask = {"usage": usage, "principal": 7, "mode": "try", "odd": [1]}
    assert named(json.dumps(ask).encode(), AskBody) == [
        ("/odd", f"is unknown: use {', '.join(AskBody.__struct_fields__)}"),
        ("/usage/odd", f"is unknown: use {', '.join(UsageBody.__struct_fields__)}"),
        ("/usage/requests", "must be at least 0"),
        ("/usage/fetch_bytes", "must be a number"),
        ("/principal", "must be a string or null"),
        ("/mode", "must be one of admit, peek, record, refund"),
    ]


def test_the_last_of_duplicated_keys_counts():
    assert named(b'{"usage":5,"usage":{"requests":1}}', AskBody) == []
    assert named(b'{"usage":{"requests":1},"usage":5}', AskBody) == [("/usage", "must be an object")]


IDS: Final = [*range(999)]
ODD: Final = dict.fromkeys(map(str, range(60_000)), 1)
DEAR: Final[dict[str, tuple[type, dict[str, Any]]]] = {
    "a wrong id in each of many lists": (
        BatchBody,
        {"asks": [{"usage": {"producer_ids": [*IDS, ""]}}] * 64},
    ),
    "a wrong id after escaped ones": (
        BatchBody,
        {"asks": [{"usage": {"producer_ids": ["\n" * 30] * 999 + [""]}}] * 14},
    ),
    "unknown fields of an ask": (
        AskBody,
        {"usage": {"requests": 1}} | ODD,
    ),
    "unknown fields of a usage": (AskBody, {"usage": ODD}),
    "a long unknown field": (AskBody, {"usage": {"requests": 1}, "\n~" * 250_000: 1}),
    "unknown fields of each ask": (BatchBody, {"asks": [dict.fromkeys(map(str, range(60)), 1)] * 1_000}),
    "wrong asks": (BatchBody, {"asks": [{"usage": {"requests": "x" * 500}}] * 1_000}),
    "a wrong ask at the end": (BatchBody, {"asks": [{"usage": {"requests": 1}}] * 999 + [{}]}),
    "the same scope": (NewKeyBody, {"name": "a", "scopes": ["read"] * 116_000}),
    "wrong volumes": (
        PushedVolumesBody,
        {
            "volumes": [
                {"broker": "1", "dir": str(n), "total_bytes": 1, "available_bytes": "x"} for n in range(9_000)
            ]
        },
    ),
    "a wrong alteration": (
        ApplicationBody,
        {"alterations": [{"entity": f"user={n}", "quotas": {"request_rate": 1}} for n in IDS * 10] + [{}]},
    ),
}
"""Bodies whose faults may be dear to find; at most 1 MiB each."""


@pytest.mark.parametrize("name", DEAR)
def test_faults_cost_some_parses_of_the_body_at_most_and_no_step_takes_long(name: str):
    """In time of the processor, next to a plain parse of the same body."""
    type_, value = DEAR[name]
    body = json.dumps(value).encode()
    assert len(body) <= 2**20
    parsed_s = min(parse_s(body) for _ in range(5))
    steps_s = min((find_s(body, type_) for _ in range(5)), key=sum)
    assert sum(steps_s) <= 12 * parsed_s + 0.004
    assert max(steps_s) <= parsed_s + 0.003


def parse_s(body: bytes) -> float:
    began = thread_time()
    json.loads(body)
    return thread_time() - began


def find_s(body: bytes, type_: type) -> list[float]:
    """Return the time of a processor that each step takes to find the faults of a body."""
    work, spent = faults_in(body, type_), list[float]()
    gc.disable()  # a node collects seldom, and pytest has much to collect
    try:
        while True:
            began = thread_time()
            try:
                next(work)
            except StopIteration:
                return [*spent, thread_time() - began]
            spent.append(thread_time() - began)
    finally:
        gc.enable()


def test_at_most_as_many_faults_as_an_answer_has_are_named():
    body = json.dumps({"asks": [{"usage": {"producer_ids": [True] * 100}}] * 3}).encode()
    assert len(named(body, BatchBody)) == MAX_ERRORS


def test_fields_of_a_large_object_are_named_together():
    ask = {"usage": {"requests": "x"}, "client_id": 5} | dict.fromkeys(map(str, range(10_000)))
    assert [field for field, _ in named(json.dumps(ask).encode(), AskBody)] == [
        "",
        "/usage/requests",
        "/client_id",
    ]
