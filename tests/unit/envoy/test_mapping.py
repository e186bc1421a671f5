"""The names in descriptors, by their own entries and by a file."""

from __future__ import annotations

import pytest

from app.envoy.mapping import NOTHING, DescriptorMapping, MappingError, Names, UnusableDescriptorError

JOINED = """
domains:
  shop:
    principal: [tenant, {key: plan, value: gold}]
    client_id: [path, remote_address]
"""
RULES = """
domains:
  messaging:
    descriptors:
      - entries: [{key: type, value: ad}, number]
        principal: ads
        client_id: [number]
      - entries: [{key: type, value: ad}]
        principal: all-ads
        usage: mutations
      - entries: [{key: path, value: /api/*}]
        principal: api
        client_id: [path]
      - entries: [{key: path, value: /api/health}]
        unlimited: true
      - entries: [path]
        principal: others
      - entries: [{key: code, value: 010}]
        principal: octal
"""


def names(text: str, domain: str, *entries: tuple[str, str]) -> Names:
    return DescriptorMapping.read(text).names(domain, entries)


def test_entries_mean_what_they_say():
    sent = [
        ("principal", "alice"),
        ("client_id", "etl"),
        ("remote_address", "10.0.0.7"),
        ("broker", "1"),
        ("listener", "EXTERNAL"),
        ("usage", "produce_bytes"),
    ]
    found = DescriptorMapping().names("any", sent)
    assert found == Names("alice", "etl", "10.0.0.7", "1", "EXTERNAL", "produce_bytes")


@pytest.mark.parametrize(
    "entries",
    [[("path", "/")], [("principal", "")], [("usage", "requests")], [("remote_address", "")]],
    ids=str,
)
def test_descriptor_that_names_nothing(entries: list[tuple[str, str]]):
    assert DescriptorMapping().names("shop", entries).is_empty


def test_empty_client_id_is_a_client():
    assert not DescriptorMapping().names("shop", [("client_id", "")]).is_empty


@pytest.mark.parametrize("usage", ["producer_ids", "", "\udcff"])
def test_usage_that_is_none_makes_a_descriptor_unusable(usage: str):
    with pytest.raises(UnusableDescriptorError) as caught:
        DescriptorMapping().names("shop", [("principal", "a"), ("usage", usage)])
    assert caught.value.reason == "usage"


def test_the_first_of_equal_entries_that_is_not_empty_counts():
    found = DescriptorMapping().names("shop", [("principal", ""), ("principal", "a"), ("principal", "b")])
    assert found == Names("a", is_ambiguous=True)


def test_bytes_that_are_not_utf8_match_and_join_as_bytes():
    def text(value: bytes) -> str:
        return value.decode(errors="surrogateescape")

    assert names(JOINED, "shop", ("tenant", text(b"\xe4%"))) == Names("tenant=%E4%25")
    assert names(RULES, "messaging", ("path", text(b"/api/\xff"))) == Names("api", "path=%2Fapi%2F%FF")
    assert names(RULES, "messaging", ("path", text(b"/api\xff/"))) == Names("others")


def test_entries_join_in_the_order_of_the_file():
    found = names(JOINED, "shop", ("path", "/a,b=c"), ("plan", "gold"), ("tenant", "ä 1"))
    assert found == Names("tenant=%C3%A4%201,plan=gold", "path=%2Fa%2Cb%3Dc")


def test_entry_with_another_value_does_not_join():
    assert names(JOINED, "shop", ("plan", "free"), ("tenant", "a")).principal == "tenant=a"


def test_an_entry_that_means_what_it_says_goes_before_joined_ones():
    found = names(JOINED, "shop", ("tenant", "a"), ("principal", "alice"), ("remote_address", "10.0.0.7"))
    assert found == Names("alice", "remote_address=10.0.0.7", "10.0.0.7")


def test_other_domains_are_as_without_a_file():
    assert names(JOINED, "other", ("tenant", "a")).is_empty


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([("type", "ad"), ("number", "7")], Names("ads", "number=7")),
        ([("type", "ad")], Names("all-ads", usage="mutations")),
        ([("type", "ad"), ("number", "7"), ("more", "x")], NOTHING),
        ([("number", "7"), ("type", "ad")], NOTHING),
        ([("type", "news")], NOTHING),
        ([("path", "/api/a")], Names("api", "path=%2Fapi%2Fa")),
        ([("path", "/api/health")], NOTHING),
        ([("path", "/")], Names("others")),
        ([("code", "010")], Names("octal")),
        ([("code", "8")], NOTHING),
        ([("principal", "alice")], NOTHING),
    ],
    ids=str,
)
def test_rules_are_exact_and_the_most_specific_one_counts(entries: list[tuple[str, str]], expected: Names):
    assert names(RULES, "messaging", *entries) == expected


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: [", "not YAML"),
        ("{}", "the one key domains"),
        ("domains: {a: {}}", "domains/a: must be a mapping with principal"),
        ("domains: {a: {principal: tenant}}", "principal must be a list"),
        ("domains: {a: {principal: [principal]}}", "principal means what it says"),
        ("domains: {a: {principal: [{name: x}]}}", "must have keys"),
        ("domains: {a: {client_id: [{key: x, value: []}]}}", "the value of x must be text"),
        ("domains: {a: {principal: [x], descriptors: []}}", "leave no room"),
        ("domains: {a: {descriptors: {}}}", "must be a list"),
        ("domains: {a: {descriptors: [{entries: []}]}}", "descriptors/0: must be a mapping with entries"),
        ("domains: {a: {descriptors: [{entries: [x]}]}}", "principal must be a name"),
        ("domains: {a: {descriptors: [{entries: [x], principal: ''}]}}", "principal must not be empty"),
        (
            "domains: {a: {descriptors: [{entries: [x], principal: p, client_id: [y]}]}}",
            "keys of the entries",
        ),
        ("domains: {a: {descriptors: [{entries: [x], principal: p, usage: ids}]}}", "usage must be one of"),
        ("domains: {a: {descriptors: [{entries: [x], unlimited: true, principal: p}]}}", "is unlimited"),
        (
            "domains: {a: {descriptors: [{entries: [x], principal: p}, {entries: [x], principal: q}]}}",
            "have two rules",
        ),
    ],
)
def test_faults_of_a_file_are_named(text: str, fault: str):
    with pytest.raises(MappingError, match=fault):
        DescriptorMapping.read(text)


def test_all_faults_of_a_file_are_named():
    with pytest.raises(MappingError) as caught:
        DescriptorMapping.read("domains: {a: {}, b: {descriptors: [{entries: [x]}, {entries: []}]}}")
    assert len(str(caught.value).splitlines()) == 3


WILDCARDS = """
domains:
  d:
    descriptors:
      - {entries: [{key: path, value: /api/*/v1}], principal: versions, client_id: [path]}
      - {entries: [{key: path, value: /api/*}], principal: api, client_id: [path]}
      - {entries: [{key: path, value: "*/v1"}], principal: unseen-after-api}
      - {entries: [{key: path, value: /api/x}], principal: x}
      - entries: [{key: path, value: "*.php", shared: true}, path]
        principal: php
        client_id: [path]
      - {entries: [path], principal: others}
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/api/a/v1", Names("versions", "path=%2Fapi%2Fa%2Fv1")),
        ("/api/a/v2", Names("api", "path=%2Fapi%2Fa%2Fv2")),
        ("/api/*", Names("api", "path=%2Fapi%2F%2A")),
        ("/api/v1", Names("api", "path=%2Fapi%2Fv1")),
        ("/web/v1", Names("unseen-after-api")),
        ("/api/x", Names("x")),
        ("/web", Names("others")),
        ("x.php", NOTHING),
    ],
    ids=str,
)
def test_wildcards_match_anywhere_the_first_of_the_file_before_others(path: str, expected: Names):
    assert names(WILDCARDS, "d", ("path", path)) == expected


def test_a_shared_entry_joins_no_client_id_even_if_its_key_comes_twice():
    for first in ("a.php", "b.php"):
        assert names(WILDCARDS, "d", ("path", first), ("path", "/x")) == Names("php", "path=%2Fx")


def test_wildcards_match_bytes_that_are_not_utf8():
    def text(value: bytes) -> str:
        return value.decode(errors="surrogateescape")

    assert names(WILDCARDS, "d", ("path", text(b"/api/\xff\xc3/v1"))).principal == "versions"
    assert names(WILDCARDS, "d", ("path", text(b"/api/\xff/v1\xc3"))).principal == "api"


def test_wildcards_choose_which_entries_join():
    text = "domains: {d: {principal: [{key: plan, value: g*d}], client_id: [{key: path, value: '*.php'}]}}"
    assert names(text, "d", ("plan", "gold"), ("path", "x.php")) == Names("plan=gold", "path=x.php")
    assert names(text, "d", ("plan", "silver"), ("path", "x.html")).is_empty


TWICE = """
  d:
    descriptors:
      - {entries: [{key: a, value: x*}], unlimited: true}
      - {entries: [{key: a, value: x*, shared: true}], principal: q}
"""


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{d: {descriptors: [{entries: [{key: a, shared: maybe}], principal: p}]}}", "must be true or false"),
        ("{d: {principal: [{key: a, shared: true}]}}", "must have keys, or mappings of key, value"),
        (TWICE, "have two rules"),
    ],
    ids=str,
)
def test_wrong_entries_are_named(text: str, fault: str):
    with pytest.raises(MappingError, match=fault):
        DescriptorMapping.read(f"domains: {text}")
