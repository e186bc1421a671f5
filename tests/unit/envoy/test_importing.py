"""The importer against the documentation of envoyproxy/ratelimit: the examples of its README, row by row."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from app.domain.entity import Entity
from app.envoy.importing import SECONDS, EnvoyConfigurationError, EnvoyImport
from app.envoy.mapping import DescriptorMapping
from tests.envoy.limiter import Limiter

# The examples of the README of envoyproxy/ratelimit, in its order, as it has them.
EXAMPLES: dict[str, str] = {
    "mongo_cps": """
descriptors:
  - key: database
    value: users
    rate_limit: {unit: second, requests_per_unit: 500}
  - key: database
    value: default
    rate_limit: {unit: second, requests_per_unit: 500}
""",
    "messaging": """
descriptors:
  - key: message_type
    value: marketing
    descriptors:
      - key: to_number
        rate_limit: {unit: day, requests_per_unit: 5}
  - key: to_number
    rate_limit: {unit: day, requests_per_unit: 100}
""",
    "edge_proxy_per_ip": """
descriptors:
  - key: remote_address
    rate_limit: {unit: second, requests_per_unit: 10}
  - key: remote_address
    value: 50.0.0.5
    rate_limit: {unit: second, requests_per_unit: 0}
""",
    "example4": """
descriptors:
  - key: key
    value: value
    rate_limit: {requests_per_unit: 300, unit: second}
""",
    "example4_nested": """
descriptors:
  - key: key
    value: value
    descriptors:
      - key: subkey
        rate_limit: {requests_per_unit: 300, unit: second}
""",
    "internal": """
descriptors:
  - key: ldap
    rate_limit: {unlimited: true}
  - key: azure
    rate_limit: {unit: minute, requests_per_unit: 100}
""",
    "example6": """
descriptors:
  - key: service
    descriptors:
      - key: user
        value: user-a
        rate_limit: {requests_per_unit: 10, unit: second}
        shadow_mode: true
      - key: user
        value: user-b
        rate_limit: {requests_per_unit: 20, unit: second}
""",
    "example8": """
descriptors:
  - key: key1
    detailed_metric: true
    rate_limit: {unit: minute, requests_per_unit: 10}
  - key: key1
    value: value1
    rate_limit: {unit: minute, requests_per_unit: 20}
""",
    "example9": """
descriptors:
  - key: key1
    value: value*
    rate_limit: {unit: minute, requests_per_unit: 20}
""",
    "units": """
descriptors:
  - {key: unit, value: s, rate_limit: {unit: SECOND, requests_per_unit: 3}}
  - {key: unit, value: m, rate_limit: {unit: minute, requests_per_unit: 3}}
  - {key: unit, value: h, rate_limit: {unit: hour, requests_per_unit: 3}}
  - {key: unit, value: d, rate_limit: {unit: day, requests_per_unit: 3}}
  - {key: unit, value: w, rate_limit: {unit: week, requests_per_unit: 3}}
  - {key: unit, value: mo, rate_limit: {unit: month, requests_per_unit: 3}}
  - {key: unit, value: y, rate_limit: {unit: year, requests_per_unit: 3}}
""",
    "shadowed_by_a_value": """
descriptors:
  - {key: path, value_to_metric: true, rate_limit: {unit: second, requests_per_unit: 1}}
  - {key: path, value: /free}
  - key: path
    value: /deep
    descriptors:
      - {key: verb, value: GET, rate_limit: {unit: second, requests_per_unit: 7}}
""",
}
DAY, MINUTE, SECOND = 86_400, 60, 1

# (domain, descriptor, (requests that pass, in this many seconds)); None: unlimited.
DOCUMENTED: list[tuple[str, str, tuple[int, int] | None]] = [
    ("mongo_cps", "database=users", (500, SECOND)),
    ("mongo_cps", "database=default", (500, SECOND)),
    ("mongo_cps", "database=others", None),
    ("messaging", "message_type=marketing to_number=2061111111", (5, DAY)),
    ("messaging", "to_number=2061111111", (100, DAY)),
    ("messaging", "message_type=marketing", None),
    ("edge_proxy_per_ip", "remote_address=50.0.0.1", (10, SECOND)),
    ("edge_proxy_per_ip", "remote_address=50.0.0.5", (0, SECOND)),
    ("example4", "key=value", (300, SECOND)),
    ("example4", "key=value subkey=subvalue", None),
    ("example4_nested", "key=value subkey=subvalue", (300, SECOND)),
    ("example4_nested", "key=value", None),
    ("internal", "ldap=x", None),
    ("internal", "azure=x", (100, MINUTE)),
    ("example6", "service=auth-service user=user-a", None),
    ("example6", "service=auth-service user=user-b", (20, SECOND)),
    ("example8", "key1=unspecified_value", (10, MINUTE)),
    ("example8", "key1=value1", (20, MINUTE)),
    ("example9", "key1=value_1", (20, MINUTE)),
    ("example9", "key1=other", None),
    ("units", "unit=s", (3, SECOND)),
    ("units", "unit=m", (3, MINUTE)),
    ("units", "unit=h", (3, 3_600)),
    ("units", "unit=d", (3, DAY)),
    ("units", "unit=w", (3, 7 * DAY)),
    ("units", "unit=mo", (3, 30 * DAY)),
    ("units", "unit=y", (3, 365 * DAY)),
    ("shadowed_by_a_value", "path=/x", (1, SECOND)),
    ("shadowed_by_a_value", "path=/free", None),
    ("shadowed_by_a_value", "path=/deep", None),
    ("shadowed_by_a_value", "path=/deep verb=GET", (7, SECOND)),
    ("shadowed_by_a_value", "path=/deep verb=PUT", None),
]

# (domain, two descriptors, whether they share one count)
APART: list[tuple[str, str, str, bool]] = [
    ("messaging", "to_number=1", "to_number=2", False),
    ("messaging", "message_type=marketing to_number=1", "message_type=marketing to_number=2", False),
    ("messaging", "message_type=marketing to_number=1", "to_number=1", False),
    ("messaging", "to_number=1", "to_number=1", True),
    ("mongo_cps", "database=users", "database=default", False),
    ("example9", "key1=value_1", "key1=value_2", False),
    ("example6", "service=a user=user-b", "service=b user=user-b", False),
]


def limiter_of_examples() -> Limiter:
    """A limiter with the quotas and the mapping of all examples."""
    found = EnvoyImport()
    for domain, text in EXAMPLES.items():
        found.add(f"domain: {domain}\n{text}")
    assert found.left_out == []
    return Limiter(found)


def entries(descriptor: str) -> list[tuple[str, str]]:
    return [(key, value) for key, _, value in (entry.partition("=") for entry in descriptor.split())]


@pytest.mark.parametrize(("domain", "descriptor", "expected"), DOCUMENTED, ids=str)
def test_limits_are_those_that_are_documented(domain: str, descriptor: str, expected: tuple[int, int] | None):
    limiter = limiter_of_examples()
    ask = limiter.ask(domain, entries(descriptor))
    if expected is None:
        assert all(limiter.passes(ask) for _ in range(600))
        return
    number, seconds = expected
    assert [limiter.passes(ask) for _ in range(number + 1)] == [True] * number + [False]
    assert limiter.policies(ask) == [(number, seconds)]
    if number:
        later_ms = 1_000_000 + 2 * seconds * 1_000
        assert [limiter.passes(ask, later_ms) for _ in range(number + 1)] == [True] * number + [False]


@pytest.mark.parametrize(("domain", "first", "second", "shared"), APART, ids=str)
def test_values_have_counts_of_their_own(domain: str, first: str, second: str, shared: bool):
    limiter = limiter_of_examples()
    one, other = (limiter.ask(domain, entries(each)) for each in (first, second))
    while limiter.passes(one):
        pass
    assert limiter.passes(other) is not shared


def test_a_limit_in_shadow_is_imported_as_one():
    limiter = limiter_of_examples()
    shadows = [row for row in limiter.found.rows if row.shadow]
    assert [(row.domain, row.path, row.limit) for row in shadows] == [
        ("example6", "service, user=user-a", "10/second")
    ]
    assert limiter.found.quotas[shadows[0].entity]["request_rate"]["shadow"] is True


def test_domains_are_apart():
    limiter = limiter_of_examples()
    made = [row.entity for row in limiter.found.rows if row.entity]
    assert len(made) == len(set(made)) == len(limiter.found.quotas)


def limit(unit: str = "unit: day", number: str = "requests_per_unit: 1", more: str = "") -> str:
    """A rate limit as a file has it."""
    return f"rate_limit: {{{', '.join(filter(None, (unit, number, more)))}}}"


def counted(number: str) -> str:
    """A descriptor with this spelling of the number of requests."""
    return f"{{key: a, {limit(number=f'requests_per_unit: {number}')}}}"


def more(fields: str) -> str:
    """A descriptor whose limit has further fields."""
    return f"{{key: a, {limit(more=fields)}}}"


REFUSES = "envoyproxy/ratelimit refuses the file"
# (a descriptor, its entry in the list: the path, the field, the effect, and a part of the reason)
WRONG: list[tuple[str, tuple[str, str, str, str]]] = [
    (f"{{key: a, {limit(unit='unit: fortnight')}}}", ("a", "rate_limit", "looser", "the unit must be")),
    (f"{{key: a, {limit(unit='')}}}", ("a", "rate_limit", "looser", "the unit must be")),
    (f"{{key: a, {limit(unit='unit: unknown')}}}", ("a", "rate_limit", "looser", REFUSES)),
    ("{key: a, rate_limit: {requests_per_unit: 1}}", ("a", "rate_limit", "looser", "the unit must be")),
    (f"{{key: a, {limit(number='')}}}", ("a", "rate_limit", "same", "without one it is 0")),
    (counted("~"), ("a", "rate_limit", "same", "it is 0")),
    (counted("-1"), ("a", "rate_limit", "looser", "unlimited")),
    (counted("many"), ("a", "rate_limit", "looser", "unlimited")),
    (counted(".inf"), ("a", "rate_limit", "looser", "unlimited")),
    (counted("yes"), ("a", "rate_limit", "looser", "unlimited")),
    (counted("[1]"), ("a", "rate_limit", "looser", "unlimited")),
    (
        counted("4294967296"),
        ("a", "rate_limit", "looser", "4294967295"),
    ),
    (counted("9" * 9999), ("a", "rate_limit", "looser", REFUSES)),
    (counted("1e3"), ("a", "rate_limit", "same", "it is 1000")),
    (counted("2.5"), ("a", "rate_limit", "stricter", "it is 2")),
    (counted("08"), ("a", "rate_limit", "same", "it is 8")),
    (counted('"5"'), ("a", "rate_limit", "same", "it is 5")),
    ("{key: a, rate_limit: 7}", ("a", "rate_limit", "looser", "must be a mapping")),
    ("{key: a, rate_limit: []}", ("a", "rate_limit", "looser", "must be a mapping")),
    ("{value: a}", ("", "a descriptor", "looser", "has no key")),
    ("{key: '', value: a}", ("", "a descriptor", "looser", "has no key")),
    ("{key: [a]}", ("", "a descriptor", "looser", "has no key")),
    ("a", ("", "a descriptor", "looser", "must be a mapping")),
    ("", ("", "a descriptor", "looser", "must be a mapping")),
    (f"{{key: a, value: [b], {limit()}}}", ("a", "value", "looser", "must be text")),
    (f"{{key: a, value: 1.0, {limit()}}}", ("a=1.0", "value", "same", "here it is text")),
    (f"{{key: a, value: 1e3, {limit()}}}", ("a=1e3", "value", "same", "here it is text")),
    (f"{{key: a*, {limit()}}}", ("a*", "key", "looser", "may match more")),
    ("{key: a, descriptors: 7}", ("a", "descriptors", "looser", "must be a list")),
    ("{key: a, descriptors: {key: b}}", ("a", "descriptors", "looser", "must be a list")),
    ("{key: a, colour: red}", ("a", "colour", "looser", "is unknown")),
    (f"{{key: a, Rate_Limit: {{}}, {limit()}}}", ("a", "Rate_Limit", "looser", "is unknown")),
    (more("algorithm: x"), ("a", "algorithm", "looser", "is unknown")),
    (more("unit_multiplier: 5"), ("a", "unit_multiplier", "looser", "is unknown")),
    (
        more("name: x, replaces: [{name: y}]"),
        ("a", "replaces", "stricter", "both apply"),
    ),
    (more("name: x, replaces: [{name: x}]"), ("a", "replaces", "stricter", REFUSES)),
    (more("replaces: [{name: }]"), ("a", "replaces", "stricter", REFUSES)),
    (more("replaces: y"), ("a", "replaces", "stricter", REFUSES)),
    (
        more("unlimited: true"),
        ("a", "unlimited", "looser", "contradicts the unit day"),
    ),
    (
        more('unlimited: "true"'),
        ("a", "unlimited", "stricter", "must be true or false"),
    ),
    (f"{{key: a, name: b, unit: day, {limit()}}}", ("a", "unit", "same", "has no effect here")),
    (f"{{key: a, unlimited: true, {limit()}}}", ("a", "unlimited", "same", "has no effect here")),
    (more("metadata: {a: b}, shadow_mode: true"), ("a", "shadow_mode", "same", "has no effect here")),
    (f"{{key: a, detailed_metric: 'on', {limit()}}}", ("a", "detailed_metric", "same", REFUSES)),
    (f"{{key: a, shadow_mode: 1, {limit()}}}", ("a", "shadow_mode", "stricter", "must be true or false")),
    (f"{{key: a, quota_mode: true, {limit()}}}", ("a", "quota_mode", "same", "in shadow")),
    (f"{{key: a, share_threshold: true, {limit()}}}", ("a", "share_threshold", "stricter", "one bucket")),
    (f"{{key: a, value: b, share_threshold: true, {limit()}}}", ("a=b", "share_threshold", "same", REFUSES)),
    (f"{{key: a, value: b*, share_threshold: 1, {limit()}}}", ("a=b*", "share_threshold", "looser", REFUSES)),
    (f"{{key: z, {limit(unit='unit: hour')}}}", ("z", "a descriptor", "looser", "is duplicated")),
]


@pytest.mark.parametrize(("sent", "expected"), WRONG, ids=[sent[:60] for sent, _ in WRONG])
def test_what_cannot_be_taken_is_named(sent: str, expected: tuple[str, str, str, str]):
    found = EnvoyImport()
    found.add(f"domain: d\ndescriptors:\n  - {sent}\n  - {{key: z, {limit()}}}")
    (left_out,) = found.left_out
    path, what, effect, why = expected
    assert (left_out.path, left_out.what, left_out.effect) == (path, what, effect)
    assert why in left_out.reason
    assert found.is_looser is (effect == "looser")
    assert any(row.path == "z" for row in found.rows)
    DescriptorMapping.read(yaml.safe_dump(found.mapping()))


def test_all_units_take_the_least_and_the_most():
    found = EnvoyImport()
    numbers = (0, 1, 2**32 - 1)
    made = [
        f"  - {{key: n, value: {unit}{n}, {limit(f'unit: {unit.title()}', f'requests_per_unit: {n}')}}}"
        for unit in SECONDS
        for n in numbers
    ]
    found.add("\n".join(["domain: d", "descriptors:", *made]))
    assert found.left_out == []
    limiter = Limiter(found)
    for unit in SECONDS:
        for n in numbers:
            asked = [("n", f"{unit}{n}")]
            assert limiter.policies(limiter.ask("d", asked)) == [
                (n, SECONDS[unit] if n or unit in ("second", "minute", "hour", "day") else 1)
            ]
            assert n == 0 or limiter.passes(limiter.ask("d", asked, n))
            assert not limiter.passes(limiter.ask("d", asked))


def test_a_path_whose_limit_is_wrong_is_unlimited_and_has_no_wider_limit():
    found = EnvoyImport()
    found.add(
        "domain: d\ndescriptors:\n"
        "  - {key: a, rate_limit: {unit: day, requests_per_unit: 1}}\n"
        "  - {key: a, value: b, rate_limit: {unit: fortnight, requests_per_unit: 1}}\n"
        "  - {key: a, value: c*, descriptors: [{value: no key}]}"
    )
    mapping = DescriptorMapping.read(yaml.safe_dump(found.mapping()))
    assert mapping.names("d", [("a", "b")]).is_empty
    assert mapping.names("d", [("a", "cc")]).is_empty
    assert not mapping.names("d", [("a", "d")]).is_empty


def test_a_replaced_limit_applies_too():
    """The README's example 7: the original would let 10 pass, and count nothing of the replaced limit."""
    text = """
domain: example7
descriptors:
  - key: key_1
    value: value_1
    descriptors:
      - key: user
        value: bkthomps
        rate_limit: {name: specific_limit, requests_per_unit: 5, unit: second}
  - key: key_2
    value: value_2
    descriptors:
      - key: user
        value: bkthomps
        rate_limit: {replaces: [{name: specific_limit}], requests_per_unit: 10, unit: second}
"""
    found = EnvoyImport()
    found.add(text)
    assert [(each.what, each.effect) for each in found.left_out] == [("replaces", "stricter")]
    limiter = Limiter(found)
    first = limiter.ask("example7", entries("key_1=value_1 user=bkthomps"))
    second = limiter.ask("example7", entries("key_2=value_2 user=bkthomps"))
    assert [limiter.policies(each) for each in (first, second)] == [[(5, 1)], [(10, 1)]]


def test_a_long_path_is_a_digest_and_keeps_its_limit():
    found = EnvoyImport()
    found.add(
        f"domain: d\ndescriptors:\n  - {{key: {'a' * 600}, value: 'b*', share_threshold: true, {limit()}}}"
    )
    assert found.left_out == []
    ((spelled, _),) = found.quotas.items()
    assert str(Entity.parse(spelled)).startswith("user=sha256")
    limiter = Limiter(found)
    assert limiter.passes(limiter.ask("d", [("a" * 600, "b1")]))
    assert not limiter.passes(limiter.ask("d", [("a" * 600, "b2")]))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: [", "not YAML"),
        ("[]", "a domain"),
        ("descriptors: []", "a domain"),
        ("domain: ''", "a domain"),
        ("domain: ~", "a domain"),
        ("domain: [d]", "a domain"),
        ("just text", "a domain"),
        ("", "a domain"),
        ("# nothing\n---\n---\n", "a domain"),
        ("domain: d\n---\njust text", "a domain"),
        ("apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: x}", "a domain"),
        (
            "apiVersion: v1\nkind: ConfigMap\ndata: {config.yaml: 'domain: \"\"'}",
            "ConfigMap, config.yaml: must be",
        ),
        ("domain: d\n<<: 7", "<< must be followed by a mapping"),
        ("domain: d\n<<: [{}, a]", "<< must be followed by a mapping"),
        ("domain: d\n[a]: b", "a key of a mapping must be text"),
        ("domain: *a", "the alias in line 1 has no anchor"),
        ("domain: d\ndescriptors: &a [*a]", "the alias in line 2 is part of its own anchor"),
        ("domain: !!binary '?'", "base64"),
        (b"\xff\xfe\xff", "not YAML"),
    ],
    ids=str,
)
def test_files_of_another_kind_are_refused(text: str | bytes, fault: str):
    with pytest.raises(EnvoyConfigurationError, match=fault):
        EnvoyImport().add(text)


@pytest.mark.parametrize("again", ["domain: d", "apiVersion: v1\nkind: ConfigMap\ndata: {a: 'domain: d'}"])
def test_a_domain_comes_once_unless_domains_are_merged(again: str):
    found = EnvoyImport()
    found.add("domain: d")
    with pytest.raises(EnvoyConfigurationError, match="came before; --merge-domains joins both"):
        found.add(again)
    written: dict[str, Any] = found.mapping()
    assert written == {"domains": {"d": {"descriptors": []}}}
    merged = EnvoyImport(merge_domains=True)
    for text in ("domain: d", again):
        merged.add(text)
    assert merged.left_out == []


def test_a_descriptor_of_two_merged_files_is_duplicated():
    found = EnvoyImport(merge_domains=True)
    for unit in ("hour", "day"):
        found.add(f"domain: d\ndescriptors: [{{key: a, {limit(unit=f'unit: {unit}')}}}]")
    assert [(each.path, each.effect) for each in found.left_out] == [("a", "looser")]
    assert [row.limit for row in found.rows] == ["1/hour"]


def test_anchors_may_have_a_key_of_their_own():
    found = EnvoyImport()
    found.add(
        "domain: d\nx-limits: {few: &few {unit: day, requests_per_unit: 1}}\ncomment: hello\n"
        "descriptors: [{key: a, rate_limit: *few}]"
    )
    assert [(each.what, each.effect) for each in found.left_out] == [
        ("comment", "looser"),
        ("x-limits", "same"),
    ]
    assert [row.limit for row in found.rows] == ["1/day"]


def test_parts_of_manifests_that_are_no_configuration_are_named():
    found = EnvoyImport()
    found.add("""
apiVersion: v1
kind: List
items:
  - apiVersion: v1
    kind: ConfigMap
    metadata: {name: limits}
    data:
      a.yaml: "domain: d"
      LOG_LEVEL: debug
      empty.yaml: "# nothing yet"
      lost.yaml: "descriptors: [{key: a}]"
      broken.yaml: "a: ["
    binaryData: {picture.png: iVBORw0KGgo=, wrong.yaml: "?"}
  - {apiVersion: gateway.envoyproxy.io/v1alpha1, kind: BackendTrafficPolicy, metadata: {name: p}}
  - {apiVersion: v1, kind: Secret, data: {b.yaml: ZG9tYWluOiBl}, stringData: {c: "domain: f"}}
""")
    assert list(found.rules) == ["d", "f", "e"]
    assert [(each.what, each.effect) for each in found.left_out] == [
        ("ConfigMap limits, LOG_LEVEL", "same"),
        ("ConfigMap limits, lost.yaml", "looser"),
        ("ConfigMap limits, broken.yaml", "looser"),
        ("ConfigMap limits, picture.png", "looser"),
        ("ConfigMap limits, wrong.yaml", "looser"),
        ("BackendTrafficPolicy p", "same"),
    ]
