"""The check apart from any server: the query, the headers, and the RateLimit fields of the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from math import nan
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.admission.compiled import charge_of
from app.admission.plan import PlannedAsk
from app.domain.ask import AMOUNTS, COUNTS, Ask
from app.domain.decision import Decision
from app.domain.entity import check_name, normalise_ip
from app.domain.errors import EntityError
from app.domain.ladder import AppliedQuota
from app.domain.quota import KEYS, MAX_WHOLE, Quota
from app.http.check_question import (
    CallerIdentity,
    Callers,
    CheckQuery,
    Sources,
    read_query,
    rightmost_untrusted,
)
from app.http.problems import FieldError, ProblemError
from app.http.routes.check import answer_to
from app.http.server.hot import HttpAnswer, sized
from app.store.port import Answer, ChargeResult
from tests.steps import decode_ask

TRUSTED = (ip_network("10.0.0.0/8"), ip_network("2001:db8:1::/48"))


# The query: the usage


def query(text: str | bytes, *, timed: bool = False) -> CheckQuery:
    found = read_query(text if isinstance(text, bytes) else text.encode(), timed=timed)
    assert not found.errors
    return found


def wrong(text: str | bytes, *, timed: bool = False) -> list[tuple[str, str]]:
    errors = read_query(text if isinstance(text, bytes) else text.encode(), timed=timed).errors
    return [(error.field, error.message) for error in errors]


def test_without_a_query_it_is_one_request():
    assert query("") == CheckQuery({"requests": 1}, None, None, 429, None, ())


@pytest.mark.parametrize("text", ["&", "&&broker=1&", "broker=1", "deny_status=403", "listener=a&&"])
def test_query_without_usage_keeps_the_default(text: str):
    assert query(text).usage == {"requests": 1}


def test_usage_comes_from_the_query():
    assert query("produce_bytes=2.5&requests=0&mutations=3").usage == {
        "requests": 0,
        "mutations": 3,
        "produce_bytes": 2.5,
    }
    assert query("connections=1").usage == {"connections": 1}
    everything = "&".join(f"{name}=9007199254740991" for name in COUNTS + AMOUNTS)
    assert query(everything).usage == dict.fromkeys(COUNTS + AMOUNTS, 9007199254740991)


def test_counts_are_integers_and_amounts_are_numbers():
    usage = query("requests=7&fetch_bytes=7").usage
    assert (type(usage["requests"]), type(usage["fetch_bytes"])) == (int, float)


@pytest.mark.parametrize(
    ("spelled", "name"),
    [("a+b", "a b"), ("a%20b", "a b"), ("a%2Bb", "a+b"), ("%E2%82%AC", "€"), ("€", "€"), ("a=b", "a=b")],
)
def test_names_are_decoded_once(spelled: str, name: str):
    found = query(f"broker={spelled}&listener={spelled}%25")
    assert (found.broker, found.listener) == (name, f"{name}%")


def test_parameter_names_are_decoded_too():
    found = query("%62roker=1&deny%5Fstatus=403")
    assert (found.broker, found.listener, found.deny_status) == ("1", None, 403)


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("requests=", "/requests", "must be an integer"),
        ("requests", "/requests", "must be an integer"),
        ("requests=1.0", "/requests", "must be an integer"),
        ("requests=1e3", "/requests", "must be an integer"),
        ("requests=+1", "/requests", "must be an integer"),
        ("requests=%2B1", "/requests", "must be an integer"),
        ("requests=01", "/requests", "must be an integer"),
        ("requests=1_000", "/requests", "must be an integer"),
        ("requests=%201", "/requests", "must be an integer"),
        ("requests=\u0661", "/requests", "must be an integer"),
        ("requests=1%0A", "/requests", "must be an integer"),
        ("requests=-1", "/requests", "must be at least 0"),
        ("requests=9007199254740992", "/requests", "must be at most 9007199254740991"),
        (f"requests={'9' * 5000}", "/requests", "must be at most 9007199254740991"),
        ("connections=true", "/connections", "must be an integer"),
        ("mutations=1.5", "/mutations", "must be an integer"),
        ("fetch_bytes=", "/fetch_bytes", "must be a number"),
        ("fetch_bytes=.5", "/fetch_bytes", "must be a number"),
        ("fetch_bytes=5.", "/fetch_bytes", "must be a number"),
        ("fetch_bytes=nan", "/fetch_bytes", "must be a number"),
        ("fetch_bytes=Infinity", "/fetch_bytes", "must be a number"),
        ("fetch_bytes=0x10", "/fetch_bytes", "must be a number"),
        ("produce_bytes=1e999", "/produce_bytes", "must be at most 9007199254740991"),
        ("request_time_ms=-0.1", "/request_time_ms", "must be at least 0"),
        ("producer_ids=1", "/producer_ids", "is unknown"),
        ("principal=alice", "/principal", "is unknown"),
        ("Requests=1", "/Requests", "is unknown"),
        ("=1", "/", "is unknown"),
        ("=", "/", "is unknown"),
        ("a/b~c=1", "/a~1b~0c", "is unknown"),
        ("at_ms=1", "/at_ms", "is unknown"),
        ("broker=", "/broker", "must not be empty"),
        ("listener", "/listener", "must not be empty"),
        (f"broker={'x' * 513}", "/broker", "must be at most 512 bytes of UTF-8"),
        (f"broker={'€' * 171}", "/broker", "must be at most 512 bytes of UTF-8"),
        ("broker=%00", "/broker", "must not hold control characters (U+0000-001F, U+007F-009F)"),
        ("listener=%C2%85", "/listener", "must not hold control characters (U+0000-001F, U+007F-009F)"),
        ("broker=%ff", "/broker", "must be percent-encoded UTF-8"),
        (b"broker=\xff", "/broker", "must be percent-encoded UTF-8"),
        ("broker=%ED%A0%80", "/broker", "must be percent-encoded UTF-8"),
        ("broker=50%", "/broker", "must be percent-encoded UTF-8"),
        ("broker=%zz", "/broker", "must be percent-encoded UTF-8"),
        ("br%oker=1", "/br%oker", "must be percent-encoded UTF-8"),
        ("deny_status=401", "/deny_status", "must be 403 or 429"),
        ("deny_status=", "/deny_status", "must be 403 or 429"),
        ("deny_status=0429", "/deny_status", "must be 403 or 429"),
        ("requests=1&requests=1", "/requests", "is duplicated"),
        ("broker=1&%62roker=1", "/broker", "is duplicated"),
    ],
)
def test_query_errors_are_named_with_their_field(text: str | bytes, field: str, message: str):
    assert wrong(text) == [(field, message)]


def test_every_fault_is_named():
    assert [field for field, _ in wrong("requests=x&q=1&broker=&deny_status=200&fetch_bytes=%")] == [
        "/fetch_bytes",
        "/requests",
        "/q",
        "/broker",
        "/deny_status",
    ]


def test_query_takes_at_ms_under_the_callers_clock():
    assert query("at_ms=1700000000000", timed=True).at_ms == 1_700_000_000_000
    assert query("", timed=True).at_ms is None
    assert wrong("at_ms=1.5", timed=True) == [("/at_ms", "must be an integer")]
    assert wrong("at_ms=-1", timed=True) == [("/at_ms", "must be at least 0")]


numbers = st.one_of(
    st.integers(-5, 2**60), st.floats(-5, 2**60), st.sampled_from([2**53 - 1, 2**53, 2.0**53, -0.0, 5e-324])
)


@given(st.sampled_from(COUNTS + AMOUNTS), numbers)
def test_a_number_is_taken_as_a_body_takes_it(field: str, number: float):
    """The query accepts the same numbers as a body, and refuses others in the same words."""
    spelled = json.dumps(number)
    found = read_query(f"{field}={spelled.replace('+', '%2B')}".encode(), timed=False)
    refused: tuple[FieldError, ...] = ()
    try:
        assert found.usage == decode_ask(f'{{"usage": {{"{field}": {spelled}}}}}'.encode(), "store").usage
    except ProblemError as problem:
        refused = problem.errors
    assert [error.message for error in found.errors] == [error.message for error in refused]


@given(st.binary(max_size=60), st.booleans())
@example(b"%", False)
def test_any_query_is_parsed_or_refused(text: bytes, timed: bool):
    found = read_query(text, timed=timed)
    assert found.usage
    assert found.deny_status in (403, 429)


# The headers: the caller


def who(*headers: tuple[str, str | bytes], sources: Sources | None = None) -> CallerIdentity:
    found, errors = read(*headers, sources=sources)
    assert not errors
    return found


def read(
    *headers: tuple[str, str | bytes], sources: Sources | None = None
) -> tuple[CallerIdentity, list[tuple[str, str]]]:
    errors: list[FieldError] = []
    sent: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        sent.setdefault(name.lower().encode(), []).append(
            value if isinstance(value, bytes) else value.encode()
        )
    found = Callers(sources or Sources()).of(sent, errors)
    return found, [(error.field, error.message) for error in errors]


PRINCIPAL, CLIENT, IP = "X-Quotagate-Principal", "X-Quotagate-Client-Id", "X-Quotagate-IP"


def test_three_headers_name_the_caller():
    sent = ((PRINCIPAL, "alice"), (CLIENT, "etl"), (IP, "10.0.0.7"), ("Accept", "*/*"), ("Accept", "a/b"))
    assert who(*sent) == CallerIdentity("alice", "etl", "10.0.0.7")
    assert who() == CallerIdentity(None, None, None)


def test_an_empty_principal_or_ip_is_absent_and_an_empty_client_is_a_client():
    assert who((PRINCIPAL, ""), (CLIENT, ""), (IP, "")) == CallerIdentity(None, "", None)
    assert who((PRINCIPAL, " \t"), (CLIENT, " "), (IP, " ")) == CallerIdentity(None, "", None)


def test_names_are_utf8_and_blanks_around_them_are_not_theirs():
    assert who((PRINCIPAL, " Zoë O'Neil\t"), (CLIENT, "日本,=*%2A")) == CallerIdentity(
        "Zoë O'Neil", "日本,=*%2A", None
    )


def test_the_settings_name_the_headers():
    sources = Sources("X-User", "x-app", "X-REAL-IP")
    sent = (("X-User", "alice"), ("X-App", "etl"), ("X-Real-IP", "::1"), (PRINCIPAL, "mallory"), (IP, "x"))
    assert who(*sent, sources=sources) == CallerIdentity("alice", "etl", "::1")
    assert read(("X-Real-Ip", "x"), sources=sources)[1][0][0] == "/X-REAL-IP"


def test_one_header_may_name_both_principal_and_client():
    assert who(("X-User", "alice"), sources=Sources("X-User", "X-User")) == CallerIdentity(
        "alice", "alice", None
    )


@pytest.mark.parametrize(
    ("sent", "address"),
    [
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("2001:DB8:0:0::1", "2001:db8::1"),
        (" 192.0.2.1 ", "192.0.2.1"),
    ],
)
def test_addresses_are_normalised(sent: str, address: str):
    assert who((IP, sent)).ip == address


@pytest.mark.parametrize(
    "sent",
    [
        "192.0.2.1, 192.0.2.2",
        "192.0.2.1,",
        "192.0.2.1:80",
        "[::1]",
        "[::1]:80",
        "fe80::1%eth0",
        "localhost",
        "unknown",
        "unix:",
        "192.0.2",
        "192.0.2.01",
        "3221225985",
        "192.0.2.1/32",
        b"\xff",
        "\u0661.1.1.1",
    ],
)
def test_the_ip_header_holds_exactly_one_address(sent: str | bytes):
    ((field, message),) = read((IP, sent))[1]
    assert field == "/X-Quotagate-IP"
    assert message.startswith("must be an ")


@pytest.mark.parametrize(
    ("header", "value", "message"),
    [
        (PRINCIPAL, b"\xff", "must be UTF-8"),
        (PRINCIPAL, "a\x7f", "must not hold control characters (U+0000-001F, U+007F-009F)"),
        (PRINCIPAL, "a\x85", "must not hold control characters (U+0000-001F, U+007F-009F)"),
        (PRINCIPAL, "x" * 513, "must be at most 512 bytes of UTF-8"),
        (CLIENT, "\x1f", "must not hold control characters (U+0000-001F, U+007F-009F)"),
        (CLIENT, b"\xed\xa0\x80", "must be UTF-8"),
    ],
)
def test_names_are_checked(header: str, value: str | bytes, message: str):
    assert read((header, value))[1] == [(f"/{header}", message)]


@pytest.mark.parametrize("header", [PRINCIPAL, CLIENT, IP])
@pytest.mark.parametrize("values", [("::1", "::1"), ("", ""), ("", "::2"), ("::1", "::2", "::3")])
def test_duplicated_header_is_refused(header: str, values: tuple[str, ...]):
    errors = read(*((header, value) for value in values))[1]
    assert set(errors) == {(f"/{header}", "is duplicated")}


header_values = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=40).map(lambda text: text.encode(errors="replace")),
    st.ip_addresses().map(lambda address: str(address).encode()),
)


@given(
    st.lists(
        st.tuples(st.sampled_from([PRINCIPAL, CLIENT, IP, "X-Forwarded-For"]), header_values), max_size=5
    ),
    st.sampled_from([Sources(), Sources(trusted=TRUSTED)]),
)
def test_any_headers_give_a_valid_caller_or_errors(headers: list[tuple[str, bytes]], sources: Sources):
    found, errors = read(*headers, sources=sources)
    if not errors:
        assert found.principal is None or check_name(found.principal) is None
        assert not found.client_id or check_name(found.client_id) is None
        assert found.ip is None or normalise_ip(found.ip) == found.ip


# The caller's address behind trusted proxies


def behind(*lines: str, trusted: tuple[IPv4Network | IPv6Network, ...] = TRUSTED) -> str | None:
    return who(*(("X-Forwarded-For", line) for line in lines), sources=Sources(trusted=trusted)).ip


@pytest.mark.parametrize(
    ("lines", "address"),
    [
        (["203.0.113.9"], "203.0.113.9"),
        (["203.0.113.9, 10.0.0.1, 10.0.0.2"], "203.0.113.9"),
        (["6.6.6.6, 203.0.113.9, 10.0.0.1"], "203.0.113.9"),
        (["6.6.6.6", "203.0.113.9", "10.0.0.1, 10.2.3.4"], "203.0.113.9"),
        (["10.6.6.6, 203.0.113.9"], "203.0.113.9"),
        (["nonsense, <script>, 203.0.113.9, 10.0.0.1"], "203.0.113.9"),
        (["203.0.113.9,,10.0.0.1, ,"], "203.0.113.9"),
        (["203.0.113.9,\t10.0.0.1 "], "203.0.113.9"),
        (["203.0.113.9,::ffff:10.0.0.1"], "203.0.113.9"),
        (["::FFFF:203.0.113.9, 10.0.0.1"], "203.0.113.9"),
        (["2001:db8:2::7, 2001:db8:1::1, 10.0.0.1"], "2001:db8:2::7"),
        (["203.0.113.9:4711, 10.0.0.1:80"], "203.0.113.9"),
        (["[2001:DB8:2::7]:4711, [2001:db8:1::1]"], "2001:db8:2::7"),
        (["10.0.0.1, 10.0.0.2"], None),
        ([""], None),
        ([",", " "], None),
        ([], None),
    ],
)
def test_the_address_is_the_rightmost_untrusted_one(lines: list[str], address: str | None):
    assert behind(*lines) == address


@pytest.mark.parametrize(
    "entry",
    [
        "unknown",
        "unix:",
        "_hidden",
        "example.org",
        "fe80::1%eth0",
        "[::1",
        "[10.0.0.3]",
        "10.0.0.3:http",
        "10.0.0.3:123456",
        "2001:db8:1::1:80000",
        "\u0661.1.1.1",
        "",
    ],
)
def test_invalid_forwarded_entry_is_refused(entry: str):
    sources = Sources(trusted=TRUSTED)
    found, errors = read(("X-Forwarded-For", f"203.0.113.9, {entry}, 10.0.0.1"), sources=sources)
    if entry:
        ((field, message),) = errors
        assert (found.ip, field) == (None, "/X-Forwarded-For")
        assert message.startswith("entry '")
    else:
        assert (found.ip, errors) == ("203.0.113.9", [])


def test_with_trusted_proxies_the_ip_header_is_not_read_and_without_them_the_other_is_not():
    forged = ((IP, "6.6.6.6"), (IP, "x"), ("X-Forwarded-For", "203.0.113.9"))
    assert who(*forged, sources=Sources(trusted=TRUSTED)).ip == "203.0.113.9"
    assert who((IP, "192.0.2.1"), ("X-Forwarded-For", "6.6.6.6"), ("X-Forwarded-For", "?")).ip == "192.0.2.1"


def test_the_ip_header_may_be_named_like_the_proxies_and_then_holds_one_address():
    sources = Sources(ip="X-Forwarded-For")
    assert who(("X-Forwarded-For", "192.0.2.1"), sources=sources).ip == "192.0.2.1"
    assert read(("X-Forwarded-For", "192.0.2.1, ::1"), sources=sources)[1][0][0] == "/X-Forwarded-For"


addresses = st.one_of(
    st.sampled_from(
        ["10.0.0.1", "10.255.0.9", "2001:db8:1::5", "::ffff:10.1.1.1", "203.0.113.9", "2001:db8::9"]
    ),
    st.ip_addresses().map(str),
)


@st.composite
def spelled_hops(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Addresses in their order; and the lines of a header that holds them, with blanks, ports and gaps."""
    hops = draw(st.lists(addresses, max_size=6))
    blanks = st.sampled_from(["", " ", "\t", "  "])
    entries = []
    for hop in hops:
        port = draw(st.sampled_from(["", "", ":1", ":65535"]))
        spelling = f"[{hop}]{port}" if ":" in hop and (port or draw(st.booleans())) else f"{hop}{port}"
        entries.append(draw(blanks) + spelling + draw(blanks))
        entries += draw(st.lists(blanks, max_size=1))
    lines: list[list[str]] = [[]]
    for entry in entries:
        if draw(st.booleans()):
            lines.append([])
        lines[-1].append(entry)
    return hops, [",".join(line) for line in lines]


def is_trusted(address: str) -> bool:
    return any(ip_address(address) in network for network in TRUSTED)


@given(spelled_hops(), st.text('0123456789abcdef.:[]%, \t"unkow\xff', max_size=40))
def test_entries_before_the_chosen_address_are_ignored(
    hops_and_lines: tuple[list[str], list[str]], forged: str
):
    """The last untrusted address is found in any spelling, and entries before it do not matter."""
    hops, lines = hops_and_lines
    untrusted = [normalise_ip(hop) for hop in hops if not is_trusted(normalise_ip(hop))]
    expected = untrusted[-1] if untrusted else None
    assert behind(*lines) == expected
    if expected is not None:
        assert behind(forged, *lines) == expected


def test_endless_list_of_trusted_proxies_is_refused_and_one_of_others_is_not():
    with pytest.raises(EntityError, match="trusted proxies"):
        rightmost_untrusted("10.0.0.1," * 7_000, is_trusted)
    assert rightmost_untrusted(f"{'10.0.0.1,' * 7_000}203.0.113.9, 10.0.0.1", is_trusted) == "203.0.113.9"


@given(st.text(max_size=60))
def test_any_list_of_hops_is_parsed_or_refused(text: str):
    try:
        found = rightmost_untrusted(text, is_trusted)
    except EntityError:
        return
    assert found is None or (normalise_ip(found) == found and not is_trusted(found))


# The answer


def sampled(limit: float, samples: int = 11, sample_ms: int = 1_000, key: str = "request_rate") -> Quota:
    return Quota(key, limit, "sampled_rate", "deny", samples=samples, sample_ms=sample_ms)


def bucket(limit: float, burst: float) -> Quota:
    return Quota("controller_mutation_rate", limit, "token_bucket", "deny", burst=burst)


@pytest.mark.parametrize(
    ("quota", "units", "span_s"),
    [
        (sampled(100), 1_000, 10),
        (sampled(1, samples=6), 5, 5),
        (sampled(5, samples=1, sample_ms=2_000), 10, 2),
        (sampled(5, samples=2, sample_ms=100), 0, 1),
        (sampled(7, samples=4, sample_ms=500), 10, 1),
        (sampled(0.29, samples=2, sample_ms=100_000), 29, 100),
        (sampled(0.25, samples=2, sample_ms=1_500), 0, 1),
        (sampled(0), 0, 10),
        (sampled(2**53 - 1), MAX_WHOLE, 10),
        (sampled(2**53 - 1, 100, 3_600_000), MAX_WHOLE, 356_400),
        (sampled(200, key="request_percentage"), 2_000, 10),
        (bucket(5, 55), 55, 11),
        (bucket(5, 7.5), 7, 1),
        (bucket(100, 10), 10, 1),
        (bucket(0, 0), 0, 1),
        (bucket(0.001, 500), 500, 500_000),
        (bucket(5e-324, 2**53), MAX_WHOLE, MAX_WHOLE),
    ],
)
def test_a_policy_is_units_over_seconds(quota: Quota, units: int, span_s: int):
    assert quota.allowance == (units, span_s)


@given(
    st.floats(0, 2**53 - 1),
    st.integers(1, 100),
    st.integers(100, 3_600_000),
    st.floats(0, 2**80, exclude_min=True),
)
def test_a_policy_is_always_two_integers_of_a_structured_field(
    limit: float, samples: int, sample_ms: int, burst: float
):
    for quota in (sampled(limit, samples, sample_ms), bucket(limit, burst if limit else 0)):
        units, span_s = quota.allowance
        assert type(units) is type(span_s) is int
        assert 0 <= units <= MAX_WHOLE
        assert 1 <= span_s <= MAX_WHOLE


Rest = tuple[Quota, str, float | None]
"""A quota, the entity that it is set on, and the remaining units in its bucket."""


def answer(rests: Sequence[Rest], *, outcome: Any = "admit", throttle_ms: int = 0) -> HttpAnswer:
    """The answer to a gateway, by a store that reports these remaining units."""
    decision = Decision(outcome, throttle_ms, outcome == "admit", len(rests), "store", None)
    charges = [
        charge_of(AppliedQuota(quota, entity, entity, entity), Ask({KEYS[quota.key].usage: 1}))
        for quota, entity, _ in rests
    ]
    results = tuple(
        ChargeResult("admit", observed=nan if rest is None else 88.0, remaining=nan if rest is None else rest)
        for _, _, rest in rests
    )
    return answer_to(PlannedAsk(Ask(), charges, None, decision=decision, answer=Answer(results)), 403)


def fields(*rests: Rest, **of: Any) -> tuple[str | None, str | None]:
    found = {name: value.decode() for name, value in answer(rests, **of).headers}
    return found.get(b"ratelimit-policy"), found.get(b"ratelimit")


def rest(remaining: float | None = 12.9, quota: Quota | None = None, entity: str = "user=*") -> Rest:
    return quota or sampled(100), entity, remaining


def test_remaining_quota_is_rounded_down_and_never_below_0():
    assert fields(rest()) == ('"request_rate";q=1000;w=10', '"request_rate";r=12;t=10')
    for remaining, left in ((0.9, 0), (-3.2, 0), (28.999999999999996, 29), (1e300, MAX_WHOLE)):
        assert fields(rest(remaining))[1] == f'"request_rate";r={left};t=10'


@pytest.mark.parametrize(
    ("wait", "seconds"), [(1, 1), (999, 1), (1_000, 1), (1_001, 2), (2_147_483_647, 2_147_484)]
)
def test_retry_after_of_a_throttled_request(wait: int, seconds: int):
    answered = answer([rest()], outcome="throttle", throttle_ms=wait)
    assert (b"ratelimit", b'"request_rate";r=12;t=%d' % seconds) in answered.headers
    assert (b"retry-after", b"%d" % seconds) in answered.headers
    assert (b"x-throttle-ms", b"%d" % wait) in answered.headers


def test_rejected_request_has_no_retry_after():
    answered = answer([rest()], outcome="reject")
    sent = dict(answered.headers)
    assert answered.status == 403
    assert b"retry-after" not in sent
    assert sent[b"ratelimit"] == b'"request_rate";r=12;t=10'


def test_every_quota_has_its_item_and_the_second_of_a_key_the_type_of_its_entity():
    rate = sampled(20, key="max_connection_creation_rate")
    policies, limits = fields(
        rest(),
        rest(3, sampled(50), "ip=*"),
        rest(7, bucket(5, 55)),
        rest(1, rate, "broker=1,listener=A"),
        rest(2, rate, "broker=*"),
    )
    assert policies is not None
    assert policies.split(", ") == [
        '"request_rate";q=1000;w=10',
        '"request_rate_ip";q=500;w=10',
        '"controller_mutation_rate";q=55;w=11',
        '"max_connection_creation_rate";q=200;w=10',
        '"max_connection_creation_rate_broker";q=200;w=10',
    ]
    assert limits is not None
    assert limits.split(", ") == [
        '"request_rate";r=12;t=10',
        '"request_rate_ip";r=3;t=10',
        '"controller_mutation_rate";r=7;t=11',
        '"max_connection_creation_rate";r=1;t=10',
        '"max_connection_creation_rate_broker";r=2;t=10',
    ]
    alone = fields(rest(12.9, sampled(50), "ip=*"))
    assert alone == ('"request_rate";q=500;w=10', '"request_rate";r=12;t=10')


def test_unknown_numbers_are_omitted():
    both = '"request_rate";q=1000;w=10, "controller_mutation_rate";q=55;w=11'
    tokens = rest(None, bucket(5, 55))
    assert fields(rest(), tokens) == (both, '"request_rate";r=12;t=10')
    assert fields(tokens) == ('"controller_mutation_rate";q=55;w=11', None)
    assert fields() == (None, None)


@given(st.lists(st.one_of(st.none(), st.floats(-1e300, 1e300)), max_size=3), st.integers(0, 2**31 - 1))
def test_the_fields_are_structured_fields(remaining: list[float | None], wait: int):
    """Lists of strings with integer parameters, as RFC 9651 has them."""
    item = r'"[a-z_]+";[qr]=[0-9]{1,15};[wt]=[1-9][0-9]{0,14}'
    of = {"outcome": "throttle" if wait else "admit", "throttle_ms": wait}
    for field in fields(*map(rest, remaining), **of):
        assert field is None or re.fullmatch(f"{item}(, {item})*", field)


def test_the_body_is_the_decision():
    answered = answer([rest()])
    assert answered.status == 200
    assert json.loads(answered.body) == {
        "decision": "admit",
        "throttle_ms": 0,
        "charged": True,
        "applied": 1,
        "source": "store",
        "limited_by": None,
    }
    assert (b"content-length", b"%d" % len(answered.body)) in sized(answered)
