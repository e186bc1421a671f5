"""The importer against what envoyproxy/ratelimit documents: the examples of its README, row by row."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from app.domain.ask import Ask
from app.domain.entity import Entity
from app.domain.ladder import MatchingRules, applied_quotas
from app.domain.oracle import Oracle
from app.domain.quota import Defaults, Quota
from app.domain.quota_value import resolve
from app.envoy.importing import EnvoyConfigurationError, EnvoyImport
from app.envoy.mapping import DescriptorMapping
from app.http.ratelimit import policy

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

# (domain, descriptor, how many pass in so many seconds); None: unlimited.
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


class Limiter:
    """What an import makes of the examples, decided by the oracle."""

    def __init__(self) -> None:
        found = EnvoyImport()
        for domain, text in EXAMPLES.items():
            found.add(f"domain: {domain}\n{text}")
        assert found.left_out == []
        self.found = found
        self.mapping = DescriptorMapping.read(yaml.safe_dump(found.mapping()))
        self.quotas: dict[str, dict[Entity, Quota]] = {}
        for spelled, definitions in found.quotas.items():
            entity = Entity.parse(spelled)
            for key, definition in definitions.items():
                quota = resolve(key, definition, entity, Defaults(), 0)
                self.quotas.setdefault(key, {})[entity] = quota
        self.oracle = Oracle(b"secret")

    def ask(self, domain: str, descriptor: str, hits: int = 1) -> Ask:
        entries = [tuple(entry.split("=")) for entry in descriptor.split()]
        names = self.mapping.names(domain, entries)  # type: ignore[arg-type]
        return Ask({names.usage: hits}, principal=names.principal, client_id=names.client_id, deny=True)

    def passes(self, ask: Ask, now_ms: int = 1_000_000) -> bool:
        return self.oracle.decide(ask, self.quotas, MatchingRules(), now_ms).decision == "admit"


@pytest.mark.parametrize(("domain", "descriptor", "expected"), DOCUMENTED, ids=str)
def test_limits_are_those_that_are_documented(domain: str, descriptor: str, expected: tuple[int, int] | None):
    limiter = Limiter()
    ask = limiter.ask(domain, descriptor)
    if expected is None:
        assert all(limiter.passes(ask) for _ in range(600))
        return
    number, seconds = expected
    assert [limiter.passes(ask) for _ in range(number + 1)] == [True] * number + [False]
    applied = applied_quotas(ask, limiter.quotas, MatchingRules())
    assert [policy(each.quota) for each in applied] == [(number, seconds)]
    if number:
        later_ms = 1_000_000 + 2 * seconds * 1_000
        assert [limiter.passes(ask, later_ms) for _ in range(number + 1)] == [True] * number + [False]


@pytest.mark.parametrize(("domain", "first", "second", "shared"), APART, ids=str)
def test_values_have_counts_of_their_own(domain: str, first: str, second: str, shared: bool):
    limiter = Limiter()
    one, other = limiter.ask(domain, first), limiter.ask(domain, second)
    while limiter.passes(one):
        pass
    assert limiter.passes(other) is not shared


def test_a_limit_in_shadow_is_imported_as_one():
    limiter = Limiter()
    shadows = [row for row in limiter.found.rows if row.shadow]
    assert [(row.domain, row.path, row.limit) for row in shadows] == [
        ("example6", "service, user=user-a", "10/second")
    ]
    assert limiter.found.quotas[shadows[0].entity]["request_rate"]["shadow"] is True


def test_domains_are_apart():
    limiter = Limiter()
    entities = [row.entity for row in limiter.found.rows if row.entity]
    assert len(entities) == len(set(entities)) == len(limiter.found.quotas)


def limit(unit: str = "unit: day", number: str = "requests_per_unit: 1", more: str = "") -> str:
    """A rate limit as a file has it."""
    return f"rate_limit: {{{', '.join(filter(None, (unit, number, more)))}}}"


# (a descriptor, what is listed of it: its path, what, and why)
WRONG: list[tuple[str, tuple[str, str, str]]] = [
    (f"{{key: a, {limit(unit='unit: fortnight')}}}", ("a", "rate_limit", "the unit must be")),
    (f"{{key: a, {limit(number='')}}}", ("a", "rate_limit", "requests_per_unit must be a whole number")),
    (f"{{key: a, {limit(number='requests_per_unit: -1')}}}", ("a", "rate_limit", "requests_per_unit")),
    (f"{{key: a, {limit(number='requests_per_unit: 4294967296')}}}", ("a", "rate_limit", "up to 4294967295")),
    ("{key: a, rate_limit: 7}", ("a", "rate_limit", "must be a mapping")),
    ("{value: a}", ("", "a descriptor", "has no key")),
    ("{key: a, descriptors: 7}", ("a", "descriptors", "must be a list")),
    ("{key: a, colour: red}", ("a", "colour", "is unknown")),
    (f"{{key: a, {limit(more='algorithm: x')}}}", ("a", "algorithm", "is unknown")),
    (f"{{key: a, {limit(more='name: x, replaces: [{name: y}]')}}}", ("a", "replaces", "both apply")),
    (f"{{key: a, quota_mode: true, {limit()}}}", ("a", "quota_mode", "in shadow")),
    (f"{{key: {'a' * 600}, {limit()}}}", ("a" * 600, "rate_limit", "longer")),
]


@pytest.mark.parametrize(("sent", "expected"), WRONG, ids=[sent[:60] for sent, _ in WRONG])
def test_what_cannot_be_taken_is_named(sent: str, expected: tuple[str, str, str]):
    found = EnvoyImport()
    found.add(f"domain: d\ndescriptors:\n  - {sent}\n  - {{key: z, {limit()}}}")
    (left_out,) = found.left_out
    path, what, why = expected
    assert (left_out.path, left_out.what) == (path, what)
    assert why in left_out.reason
    assert any(row.path == "z" for row in found.rows)
    DescriptorMapping.read(yaml.safe_dump(found.mapping()))


def test_a_path_whose_limit_is_wrong_is_unlimited_and_has_no_wider_limit():
    found = EnvoyImport()
    found.add(
        "domain: d\ndescriptors:\n"
        "  - {key: a, rate_limit: {unit: day, requests_per_unit: 1}}\n"
        "  - {key: a, value: b, rate_limit: {unit: fortnight, requests_per_unit: 1}}"
    )
    mapping = DescriptorMapping.read(yaml.safe_dump(found.mapping()))
    assert mapping.names("d", [("a", "b")]).is_empty
    assert not mapping.names("d", [("a", "c")]).is_empty


@pytest.mark.parametrize(
    ("text", "fault"),
    [("a: [", "not YAML"), ("[]", "a domain"), ("descriptors: []", "a domain"), ("domain: ''", "a domain")],
)
def test_files_of_another_kind_are_refused(text: str, fault: str):
    with pytest.raises(EnvoyConfigurationError, match=fault):
        EnvoyImport().add(text)


def test_a_domain_comes_once():
    found = EnvoyImport()
    found.add("domain: d")
    with pytest.raises(EnvoyConfigurationError, match="came before"):
        found.add("domain: d")
    written: dict[str, Any] = found.mapping()
    assert written == {"domains": {"d": {"descriptors": []}}}
