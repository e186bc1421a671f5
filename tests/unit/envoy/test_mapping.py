"""What descriptors name, by their own entries and by a file."""

from __future__ import annotations

import pytest

from app.envoy.mapping import NOTHING, DescriptorMapping, MappingError, Names

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


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ([("principal", "a"), ("principal", "b")], "principal is duplicated"),
        ([("usage", "producer_ids")], "usage must be one of requests"),
        ([("usage", "")], "usage must be one of requests"),
    ],
    ids=str,
)
def test_wrong_entries_are_named(entries: list[tuple[str, str]], fault: str):
    with pytest.raises(MappingError, match=fault):
        DescriptorMapping().names("shop", entries)


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
