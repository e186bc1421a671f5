"""Asks and decisions as bytes: accepted bodies, and refused bodies with their errors."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.admission.answers import ADMITTED, ADMITTED_ALONE
from app.admission.gathering.slices import completed
from app.domain.ask import MODES, Ask
from app.domain.decision import OUTCOMES, Decision, LimitedBy, Verdict
from app.domain.quota_value import pointer
from app.http.bodies import AskBody, UsageBody
from app.http.problems import MAX_ERRORS, ProblemError
from app.http.wire import decode_batch, encode_decision, encode_decisions, split_batch
from tests.steps import decode_ask

ONE = '"usage": {"requests": 1}'
USAGE = ", ".join(UsageBody.__struct_fields__)
INT64_MAX = 2**63 - 1


def ask(body: str | bytes, clock: Any = "store") -> Ask:
    return decode_ask(body.encode() if isinstance(body, str) else body, clock)


def asks(*bodies: str) -> list[Ask]:
    return completed(decode_batch(f'{{"asks": [{",".join(bodies)}]}}'.encode(), "store"))


def refusal(body: str | bytes, clock: Any = "store") -> ProblemError:
    with pytest.raises(ProblemError) as raised:
        ask(body, clock)
    return raised.value


def batch_refusal(*bodies: str) -> ProblemError:
    with pytest.raises(ProblemError) as raised:
        asks(*bodies)
    return raised.value


def named(problem: ProblemError) -> list[tuple[str, str]]:
    assert problem.status == 422
    return [(error.field, error.message) for error in problem.errors]


# Accepted bodies


def test_an_ask_says_everything():
    body = """{"usage": {"requests": 1, "produce_bytes": 2.5, "producer_ids": [4711, "a"]},
        "principal": "alice", "client_id": "", "ip": "::ffff:10.0.0.7", "broker": "1", "listener": "EXTERNAL",
        "mode": "record", "enforcement": "deny", "recheck": true, "cluster_action": true, "detail": true,
        "id": "x"}"""
    assert ask(body) == Ask(
        usage={"requests": 1, "produce_bytes": 2.5},
        producer_ids=(4711, "a"),
        principal="alice",
        client_id="",
        ip="10.0.0.7",
        broker="1",
        listener="EXTERNAL",
        mode="record",
        deny=True,
        recheck=True,
        cluster_action=True,
        detail=True,
        id="x",
    )


def test_omitted_fields_have_their_defaults():
    assert ask(f"{{{ONE}}}") == Ask(usage={"requests": 1})


def test_null_is_absent_where_the_contract_says_so():
    nulls = ", ".join(f'"{name}": null' for name in ("principal", "client_id", "ip", "broker", "listener"))
    assert ask(f"{{{ONE}, {nulls}}}") == Ask(usage={"requests": 1})


@pytest.mark.parametrize(
    ("sent", "ids"),
    [
        ("[]", ()),
        ("[3, 1, 3, 2]", (3, 1, 2)),
        ("[-1]", (-1,)),
        ('["7", 7, "-7", "007", "+7", "7.0", " 7", "-0", "0"]', (7, -7, "007", "+7", "7.0", " 7", "-0", 0)),
        (f'["{INT64_MAX}", {INT64_MAX}, "{INT64_MAX + 1}"]', (INT64_MAX, str(INT64_MAX + 1))),
        (f'["{-(2**63)}", "{-(2**63) - 1}"]', (-(2**63), str(-(2**63) - 1))),
        ('["\\u0667", "\\uff17"]', ("\u0667", "\uff17")),
        (json.dumps(["é" * 128]), ("é" * 128,)),
    ],
)
def test_producer_ids_count_once_and_canonical_decimals_are_integers(sent: str, ids: tuple[int | str, ...]):
    assert ask(f'{{"usage": {{"producer_ids": {sent}}}}}').producer_ids == ids


def test_a_thousand_ids_are_counted_as_given():
    assert ask(f'{{"usage": {{"producer_ids": {[1] * 1000}}}}}').producer_ids == (1,)


@pytest.mark.parametrize(
    "body",
    [
        f'{{"principal": 5, {ONE}, "principal": "a"}}',
        '{"usage": {"requests": "x"}, "usage": {"requests": 1}, "principal": "a"}',
        '{"usage": {"requests": 1e999, "requests": 1}, "principal": "a"}',
        f'{{"usage": {{"requests": {"9" * 5000}, "requests": 1}}, "principal": "a"}}',
        '{"usage": {"requests": 7, "requests": 1}, "principal": "a"}',
    ],
)
def test_the_last_of_duplicate_keys_wins(body: str):
    assert ask(body) == Ask(usage={"requests": 1}, principal="a")


def test_escaped_keys_and_surrogate_pairs_are_read():
    assert ask('{"\\u0075sage": {"requests": 1}, "principal": "\\ud83d\\ude00"}').principal == "😀"


def test_names_may_have_512_bytes():
    assert ask(f'{{{ONE}, "principal": "{"é" * 256}"}}').principal == "é" * 256


def test_the_callers_clock():
    assert ask(f'{{{ONE}, "at_ms": 0}}', "caller").at_ms == 0


def test_a_batch_keeps_its_order():
    found = asks(*(f'{{{ONE}, "principal": "{n}"}}' for n in range(1000)))
    assert [found_ask.principal for found_ask in found] == [str(n) for n in range(1000)]


# Bodies that are not JSON


@pytest.mark.parametrize(
    "body",
    [
        "",
        " ",
        "x",
        "{",
        f"{{{ONE}",
        f"{{{ONE}}} x",
        f"{{{ONE},}}",
        '{"usage": {"requests": NaN}}',
        '{"usage": {"requests": Infinity}}',
        '{"usage": {"requests": 01}}',
        '{"usage": {"requests": 1.}}',
        f"{{{ONE}, 'principal': \"a\"}}",
        f'{{{ONE}, "principal": "a\x01"}}',
        b'\xef\xbb\xbf{"usage": {"requests": 1}}',
        b'{"usage": {"requests": 1}, "principal": "\xff"}',
        b'{"usage": {"requests": 1}, "principal": "\xed\xa0\x80"}',
        f'{{{ONE}, "principal": "\\ud800"}}',
        f'{{{ONE}, "principal": "\\udc00\\ud800"}}',
        f'{{{ONE}, "principal": "\\ud800\\\\udc00"}}',
        f'{{{ONE}, "\\ud800": 1}}',
        '{"usage": {"\\udfff": 1}}',
        "[" * 100_000,
        '{"usage": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"usage": {"requests": true}, "principal": nope}',  # wrong and, further on, not JSON
        '{"unknown": 1} x',
        '{"usage": {"requests": 1.5}, "principal": "\\ud800"}',
        f'{{"usage": {{"requests": {"9" * 5000}}}',
    ],
)
def test_invalid_json_is_400(body: str | bytes):
    problem = refusal(body)
    assert problem.status == 400
    assert not problem.errors
    assert "not JSON" in problem.detail


def test_escaped_backslash_before_u_is_not_a_surrogate():
    assert ask(f'{{"principal": 1, {ONE}, "principal": "\\\\ud800"}}').principal == "\\ud800"


# JSON with faults


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ("[]", "", "must be an object"),
        ("null", "", "must be an object"),
        ("{}", "/usage", "is required"),
        ('{"usage": null}', "/usage", "must be an object"),
        ('{"usage": {}}', "/usage", "must not be empty"),
        ('{"usage": {"request": 1}}', "/usage/request", f"is unknown: use {USAGE}"),
        ('{"usage": {"a/b~c": 1}}', "/usage/a~1b~0c", f"is unknown: use {USAGE}"),
        (f'{{{ONE}, "user": "a"}}', "/user", f"is unknown: use {', '.join(AskBody.__struct_fields__)}"),
        ('{"usage": {"requests": 1.0}}', "/usage/requests", "must be an integer"),
        ('{"usage": {"requests": 1e2}}', "/usage/requests", "must be an integer"),
        ('{"usage": {"requests": true}}', "/usage/requests", "must be an integer"),
        ('{"usage": {"requests": "1"}}', "/usage/requests", "must be an integer"),
        ('{"usage": {"requests": null}}', "/usage/requests", "must be an integer"),
        ('{"usage": {"requests": 1e999}}', "/usage/requests", "must be an integer"),
        ('{"usage": {"requests": -1}}', "/usage/requests", "must be at least 0"),
        ('{"usage": {"connections": -1}}', "/usage/connections", "must be at least 0"),
        (
            '{"usage": {"mutations": 9007199254740992}}',
            "/usage/mutations",
            "must be at most 9007199254740991",
        ),
        ('{"usage": {"produce_bytes": -0.5}}', "/usage/produce_bytes", "must be at least 0"),
        ('{"usage": {"produce_bytes": 1e999}}', "/usage/produce_bytes", "must be at most 9007199254740991"),
        ('{"usage": {"produce_bytes": -1e999}}', "/usage/produce_bytes", "must be at least 0"),
        (
            f'{{"usage": {{"fetch_bytes": {"9" * 5000}}}}}',
            "/usage/fetch_bytes",
            "must be at most 9007199254740991",
        ),
        ('{"usage": {"request_time_ms": true}}', "/usage/request_time_ms", "must be a number"),
        ('{"usage": {"producer_ids": 1}}', "/usage/producer_ids", "must be a list"),
        ('{"usage": {"producer_ids": null}}', "/usage/producer_ids", "must be a list"),
        ('{"usage": {"producer_ids": [1, true]}}', "/usage/producer_ids/1", "must be an integer or a string"),
        ('{"usage": {"producer_ids": [1.0]}}', "/usage/producer_ids/0", "must be an integer or a string"),
        (
            f'{{"usage": {{"producer_ids": [{INT64_MAX + 1}]}}}}',
            "/usage/producer_ids/0",
            f"must be at most {INT64_MAX}",
        ),
        (
            f'{{"usage": {{"producer_ids": [{-(2**63) - 1}]}}}}',
            "/usage/producer_ids/0",
            f"must be at least {-(2**63)}",
        ),
        ('{"usage": {"producer_ids": [""]}}', "/usage/producer_ids/0", "must not be empty"),
        (
            f'{{"usage": {{"producer_ids": [1, "{"a" * 257}"]}}}}',
            "/usage/producer_ids/1",
            "must have at most 256 characters",
        ),
        (
            f'{{"usage": {{"producer_ids": [1, "{"é" * 129}"]}}}}',
            "/usage/producer_ids/1",
            "must be at most 256 bytes of UTF-8",
        ),
        (
            f'{{"usage": {{"producer_ids": {[*range(1001)]}}}}}',
            "/usage/producer_ids",
            "must have at most 1000 entries",
        ),
        ('{"usage": {"producer_ids": [1]}, "mode": "refund"}', "/usage/producer_ids", "cannot be refunded"),
        (f'{{{ONE}, "principal": 5}}', "/principal", "must be a string or null"),
        (f'{{{ONE}, "principal": ""}}', "/principal", "must not be empty"),
        (f'{{{ONE}, "broker": ""}}', "/broker", "must not be empty"),
        (f'{{{ONE}, "listener": "{"a" * 513}"}}', "/listener", "must have at most 512 characters"),
        (f'{{{ONE}, "principal": "{"é" * 257}"}}', "/principal", "must be at most 512 bytes of UTF-8"),
        (
            f'{{{ONE}, "client_id": "a\\u0085"}}',
            "/client_id",
            "must not hold control characters (U+0000-001F, U+007F-009F)",
        ),
        (f'{{{ONE}, "ip": ""}}', "/ip", "must be an IPv4 or IPv6 address, not a host name"),
        (f'{{{ONE}, "ip": "localhost"}}', "/ip", "must be an IPv4 or IPv6 address, not a host name"),
        (f'{{{ONE}, "ip": "10.0.0.256"}}', "/ip", "must be an IPv4 or IPv6 address, not a host name"),
        (f'{{{ONE}, "ip": "fe80::1%eth0"}}', "/ip", "must be an address without a zone"),
        (f'{{{ONE}, "ip": 1}}', "/ip", "must be a string or null"),
        (f'{{{ONE}, "mode": "try"}}', "/mode", "must be one of admit, peek, record, refund"),
        (f'{{{ONE}, "mode": null}}', "/mode", "must be a string"),
        (f'{{{ONE}, "enforcement": "delay"}}', "/enforcement", "must be deny"),
        (f'{{{ONE}, "enforcement": null}}', "/enforcement", "must be a string"),
        (f'{{{ONE}, "recheck": 1}}', "/recheck", "must be true or false"),
        (f'{{{ONE}, "cluster_action": null}}', "/cluster_action", "must be true or false"),
        (f'{{{ONE}, "detail": "yes"}}', "/detail", "must be true or false"),
        (f'{{{ONE}, "id": ""}}', "/id", "must not be empty"),
        (f'{{{ONE}, "id": null}}', "/id", "must be a string"),
        (f'{{{ONE}, "id": "{"a" * 65}"}}', "/id", "must have at most 64 characters"),
        (f'{{{ONE}, "id": "{"é" * 33}"}}', "/id", "must be at most 64 bytes of UTF-8"),
        (f'{{{ONE}, "at_ms": 5}}', "/at_ms", "is only for use under the caller's clock"),
    ],
)
def test_invalid_content_is_422_and_named(body: str, field: str, message: str):
    assert named(refusal(body)) == [(field, message)]
    assert named(batch_refusal(f"{{{ONE}}}", body)) == [("/asks/1" + field, message)]


@pytest.mark.parametrize(
    ("at_ms", "message"),
    [
        ("", "is required under the caller's clock"),
        (', "at_ms": -1', "must be at least 0"),
        (', "at_ms": 1.5', "must be an integer"),
        (', "at_ms": null', "must be an integer"),
        (', "at_ms": 9007199254740992', "must be at most 9007199254740991"),
    ],
)
def test_the_callers_clock_needs_its_time(at_ms: str, message: str):
    assert named(refusal(f"{{{ONE}{at_ms}}}", "caller")) == [("/at_ms", message)]


def test_every_error_that_types_cannot_find_is_named():
    assert [
        field for field, _ in named(refusal('{"usage": {}, "principal": "a\\n", "ip": "x", "at_ms": 1}'))
    ] == [
        "/principal",
        "/ip",
        "/usage",
        "/at_ms",
    ]


def test_the_bounds_of_a_batch():
    assert named(batch_refusal()) == [("/asks", "must not be empty")]
    assert named(batch_refusal(*[f"{{{ONE}}}"] * 1001)) == [("/asks", "must have at most 1000 entries")]
    ids = f'{{"usage": {{"producer_ids": {[1] * 1000}}}}}'
    assert len(asks(*[ids] * 10)) == 10
    too_many = [*[ids] * 10, '{"usage": {"producer_ids": [1]}}']
    assert named(batch_refusal(*too_many)) == [("/asks", "must hold at most 10000 producer ids together")]


def test_a_batch_is_an_object_of_asks():
    for body, field in (
        (b"[]", ""),
        (b"{}", "/asks"),
        (b'{"asks": 1}', "/asks"),
        (b'{"asks": [1]}', "/asks/0"),
    ):
        with pytest.raises(ProblemError) as raised:
            completed(decode_batch(body, "store"))
        assert [error.field for error in raised.value.errors] == [field]


def test_batch_names_a_bounded_number_of_errors():
    assert len(batch_refusal(*['{"usage": {}}'] * 1000).errors) == MAX_ERRORS


def test_batch_with_a_part_that_is_not_utf_8_is_not_split():
    body = b'{"asks": [{"principal": "\xff"}], "asks": [{"usage": {"requests": 1}}]}'
    assert split_batch(body) is None
    assert split_batch(body.replace(b"\xff", "\u00ff".encode())) == [b'{"usage": {"requests": 1}}']
    with pytest.raises(ProblemError) as raised:
        completed(decode_batch(body, "store"))
    assert raised.value.status == 400


@given(st.binary() | st.text().map(str.encode))
def test_any_bytes_are_decoded_or_refused(body: bytes):
    for decode in (decode_ask, lambda *given: completed(decode_batch(*given))):
        with pytest.raises(ProblemError) as raised:
            decode(body, "store")
        json.loads(raised.value.body())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["usage", "ip", "id"]), inner)
    ),
)


@given(JSON, st.sampled_from(["store", "caller"]))
def test_any_json_is_decoded_or_refused_with_its_fields(document: Any, clock: Any):
    body = json.dumps({"asks": [{"usage": {"requests": 1}}, document]}).encode()
    try:
        completed(decode_batch(body, clock))
    except ProblemError as refused:
        problem = refused
    else:
        return
    assert problem.status in (400, 422)
    assert (problem.status == 422) == bool(problem.errors)
    assert all(error.field.startswith("/asks/") for error in problem.errors)


names = st.none() | st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=128)
sent_asks = st.fixed_dictionaries(
    {
        "usage": st.fixed_dictionaries(
            {"requests": st.integers(0, 2**53 - 1)},
            optional={
                "produce_bytes": st.floats(0, 2**53 - 1),
                "mutations": st.integers(0, 2**53 - 1),
            },
        )
    },
    optional={
        "principal": names,
        "client_id": names | st.just(""),
        "ip": st.ip_addresses(v=4).map(str),
        "broker": names,
        "listener": names,
        "mode": st.sampled_from(MODES),
        "recheck": st.booleans(),
        "cluster_action": st.booleans(),
        "detail": st.booleans(),
        "id": st.text("abc", min_size=1, max_size=64),
    },
)


@given(sent_asks)
def test_an_ask_arrives_as_it_was_sent(sent: dict[str, Any]):
    assert ask(json.dumps(sent)) == Ask(**sent)


# Answers

LIMITED = LimitedBy("producer_ids_rate", "user=*", "user=alice")
VERDICT = Verdict("request_rate", "user=*", "user=a", 1000.0, "delay", False, "delay", 7, 1000.5, -0.0)


def said(decision: Decision) -> str:
    return encode_decision(decision).decode()


def test_a_decision_that_admits():
    assert said(Decision("admit", 0, True, 1, "store", None)) == (
        '{"decision":"admit","throttle_ms":0,"charged":true,"applied":1,"source":"store","limited_by":null}'
    )


def test_a_decision_names_what_limits_it():
    assert said(Decision("throttle", 36000, False, 1, "store", LIMITED)) == (
        '{"decision":"throttle","throttle_ms":36000,"charged":false,"applied":1,"source":"store",'
        '"limited_by":{"quota":"producer_ids_rate","entity":"user=*","bucket":"user=alice"}}'
    )


def test_the_factor_has_no_bucket():
    limited = LimitedBy("throttle_factor", None, None)
    assert '"limited_by":{"quota":"throttle_factor","entity":null,"bucket":null}' in said(
        Decision("throttle", 1000, False, 0, "local", limited)
    )


@pytest.mark.parametrize(
    ("reason", "largest", "shown"),
    [
        ("capacity", None, '"reason":"capacity"}'),
        ("store_failure", 5.0, '"reason":"store_failure"}'),
        ("too_large", 11.0, '"reason":"too_large","largest":11}'),
        ("too_large", 2.5, '"reason":"too_large","largest":2.5}'),
    ],
)
def test_reason_is_given_when_it_was_not_the_rate(reason: Any, largest: float | None, shown: str):
    limited = LimitedBy("request_rate", "user=a", "user=a", reason, largest)
    assert shown in said(Decision("reject", 0, False, 1, "store", limited))


def test_detail_shows_every_quota_with_whole_numbers_as_integers():
    assert said(Decision("admit", 0, True, 1, "store", None, (VERDICT,))).endswith(
        ',"quotas":[{"quota":"request_rate","entity":"user=*","bucket":"user=a","limit":1000,'
        '"verdict":"delay","throttle_ms":7,"observed":1000.5,"remaining":0,"enforcement":"delay",'
        '"shadow":false}]}'
    )


def test_detail_may_be_empty_or_unknown():
    assert '"quotas":[]' in said(Decision("admit", 0, True, 0, "local", None, ()))
    unknown = Verdict("request_rate", "user=*", "user=a", 10, "delay", False, "admit", 0)
    assert '"observed":null,"remaining":null' in said(
        Decision("admit", 0, False, 1, "fallback", None, (unknown,))
    )


@given(st.lists(st.tuples(st.sampled_from(OUTCOMES), st.integers(0, 2**31 - 1)), max_size=20))
def test_decisions_keep_their_order(made: list[tuple[Any, int]]):
    decisions = [Decision(outcome, ms, False, 1, "store", None) for outcome, ms in made]
    answered = json.loads(completed(encode_decisions(decisions)))["decisions"]
    assert [(answer["decision"], answer["throttle_ms"]) for answer in answered] == made


# Problems


def test_a_problem_is_rfc_9457():
    assert json.loads(refusal('{"usage": {"requests": true}}').body()) == {
        "type": "about:blank",
        "title": "Unprocessable Content",
        "status": 422,
        "detail": "The request is invalid: see errors.",
        "errors": [{"field": "/usage/requests", "message": "must be an integer"}],
    }


def test_a_problem_without_fields_has_no_errors():
    assert json.loads(ProblemError(404, "Nothing \ud800 here.").body())["detail"] == "Nothing ? here."
    assert "errors" not in ProblemError(404, "Nothing.").document()


@given(st.lists(st.text()))
def test_pointers_can_be_read_back(steps: list[str]):
    read = [step.replace("~1", "/").replace("~0", "~") for step in pointer(*steps).split("/")[1:]]
    assert read == steps


@pytest.mark.parametrize("admitted", [*ADMITTED, ADMITTED_ALONE])
def test_admissions_are_encoded_once_and_like_all_others(admitted: Decision):
    assert encode_decision(admitted) == encode_decision(replace(admitted))
    assert encode_decision(admitted) is encode_decision(admitted)


def test_decision_that_is_not_ready_made_is_encoded():
    assert json.loads(encode_decision(Decision("admit", 0, True, 99, "store", None)))["applied"] == 99
