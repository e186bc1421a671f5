"""Quota values: accepted ones, refused ones with the reason, and the ``Quota`` that they mean."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.entity import ANY, Entity
from app.domain.errors import QuotaValueError
from app.domain.quota import KEYS, Defaults, Layers
from app.domain.quota_value import alter, bound, check, check_all, merge, pointer, resolve

USER = Entity.of(user="alice")
IP = Entity.of(ip="10.0.0.7")
LISTENER = Entity.of(listener="EXTERNAL")
DEFAULTS = Defaults()


def fitting(key: str) -> Entity:
    return Entity(tuple((type_, ANY if type_ != "ip" else "10.0.0.7") for type_ in KEYS[key].entities[0]))


def refused(key: str, value: object, entity: Entity = USER, defaults: Defaults = DEFAULTS) -> dict[str, str]:
    with pytest.raises(QuotaValueError) as caught:
        check(key, value, entity, defaults)
    return dict(caught.value.errors)


@pytest.mark.parametrize(
    ("key", "value", "field", "right"),
    [
        ("foobar", 1.0, "", "unknown quota key: use one of producer_ids_rate"),
        ("connection_creation_rate", 5, "", "cannot be set on user: it goes on ip"),
        ("request_rate", True, "", "a number"),
        ("request_rate", "5", "", "a number"),
        ("request_rate", None, "", "a number"),
        ("request_rate", [5], "", "a number"),
        ("request_rate", -1, "", "from 0 to 9007199254740991"),
        ("request_rate", math.nan, "", "from 0"),
        ("request_rate", math.inf, "", "from 0"),
        ("request_rate", 10**400, "", "from 0"),
        ("request_rate", 2**53, "", "from 0 to 9007199254740991"),
        ("request_rate", {}, "/limit", "is required"),
        ("request_rate", {"limit": False}, "/limit", "must be a number"),
        ("request_rate", {"limit": None}, "/limit", "must be a number"),
        ("request_rate", {"limit": -0.5}, "/limit", "from 0"),
        ("request_rate", {"limit": 5, "a/b~": 1}, "/a~1b~0", "unknown field: request_rate takes limit, "),
        ("request_rate", {"limit": 5, "burst": 5}, "/burst", 'add "algorithm": "token_bucket"'),
        ("request_rate", {"limit": 5, "window_ms": 5000}, "/window_ms", "unknown field"),
        ("request_rate", {"limit": 5, "enforcement": "DENY"}, "/enforcement", "'deny' or 'delay'"),
        ("request_rate", {"limit": 5, "enforcement": ["deny"]}, "/enforcement", "'deny' or 'delay'"),
        ("request_rate", {"limit": 5, "scope": "node"}, "/scope", "'cluster' or 'broker'"),
        (
            "request_rate",
            {"limit": 5, "on_store_failure": "deny"},
            "/on_store_failure",
            "'admit' or 'throttle'",
        ),
        ("request_rate", {"limit": 5, "shadow": 1}, "/shadow", "true or false"),
        ("request_rate", {"limit": 5, "algorithm": "producer_ids"}, "/algorithm", "'sampled_rate' or"),
        ("request_rate", {"limit": 5, "algorithm": {}}, "/algorithm", "'sampled_rate' or"),
        ("request_rate", {"limit": 5, "samples": 0}, "/samples", "from 1 to 100"),
        ("request_rate", {"limit": 5, "samples": 101}, "/samples", "from 1 to 100"),
        ("request_rate", {"limit": 5, "samples": 2.5}, "/samples", "integer"),
        ("request_rate", {"limit": 5, "samples": True}, "/samples", "integer"),
        ("request_rate", {"limit": 5, "sample_ms": 99}, "/sample_ms", "from 100 to 3600000"),
        (
            "request_rate",
            {"limit": 5, "samples": 1, "enforcement": "deny"},
            "/samples",
            "at least 2 under deny",
        ),
        ("consumer_byte_rate", {"limit": 5, "samples": 1}, "/samples", "at least 2 under deny"),
        ("consumer_byte_rate", 2.245, "", "without a fraction"),
        ("consumer_byte_rate", 1235.0000001, "", "without a fraction"),
        ("consumer_byte_rate", 3.6893488147419103e19, "", "from 0 to 9007199254740991"),
        ("consumer_byte_rate", -2.0, "", "from 0"),
        ("controller_mutation_rate", {"limit": 5, "burst": 0}, "/burst", "above 0"),
        ("controller_mutation_rate", {"limit": 5, "burst": -1}, "/burst", "from 0"),
        (
            "controller_mutation_rate",
            {"limit": 5, "algorithm": "sampled_rate", "burst": 5},
            "/burst",
            "a field of token buckets",
        ),
        ("producer_ids_rate", 5.5, "", "without a fraction"),
        ("producer_ids_rate", 500_001, "", "from 0 to 500000"),
        ("producer_ids_rate", {"limit": 5, "enforcement": "delay"}, "/enforcement", "must be 'deny'"),
        ("producer_ids_rate", {"limit": 5, "algorithm": "sampled_rate"}, "/algorithm", "unknown field"),
        ("producer_ids_rate", {"limit": 5, "samples": 3}, "/samples", "unknown field"),
        ("producer_ids_rate", {"limit": 5, "window_ms": 999}, "/window_ms", "from 1000 to 2073600000"),
        ("producer_ids_rate", {"limit": 5, "window_ms": 2_073_600_001}, "/window_ms", "from 1000"),
        (
            "producer_ids_rate",
            {"limit": 5, "layers": "hourly"},
            "/layers",
            "'layered' or 'kip936' or 'timed'",
        ),
        ("producer_ids_rate", {"limit": 5, "layers": ["layered"]}, "/layers", "'layered' or"),
        (
            "producer_ids_rate",
            {"limit": 5, "layers": {"interval_ms": 500}},
            "/layers",
            "interval_ms and ttl_ms",
        ),
        (
            "producer_ids_rate",
            {"limit": 5, "layers": {"interval_ms": 99, "ttl_ms": 100}},
            "/layers/interval_ms",
            "from 100",
        ),
        (
            "producer_ids_rate",
            {"limit": 5, "layers": {"interval_ms": 500, "ttl_ms": 499}},
            "/layers/ttl_ms",
            "from 500 to 2000",
        ),
        (
            "producer_ids_rate",
            {"limit": 5, "layers": {"interval_ms": 500, "ttl_ms": 2001}},
            "/layers/ttl_ms",
            "one interval to 4",
        ),
    ],
)
def test_error_names_the_field_and_what_would_be_right(key: str, value: object, field: str, right: str):
    errors = refused(key, value)
    assert list(errors) == [field]
    assert right in errors[field]


def test_all_problems_are_reported_together():
    value = {"limit": -1, "samples": 0, "nonsense": 1, "shadow": "yes"}
    assert set(refused("request_rate", value, LISTENER)) == {
        "",
        "/limit",
        "/samples",
        "/nonsense",
        "/shadow",
    }
    with pytest.raises(QuotaValueError) as caught:
        check_all({"a/b": 1, "request_rate": {"limit": -1}, "producer_ids_rate": 0.5}, USER, DEFAULTS)
    assert [field for field, _ in caught.value.errors] == [
        "/producer_ids_rate",
        "/request_rate/limit",
        "/a~1b",
    ]


@pytest.mark.parametrize(("key", "limit"), [(row.name, row.max_limit) for row in KEYS.values()])
def test_limit_ranges_from_0_to_the_maximum_of_its_key(key: str, limit: float):
    for value in (0, 0.0, -0.0, limit):
        assert check(key, value, fitting(key), DEFAULTS) == {"limit": int(value)}
    assert refused(key, limit + 1, fitting(key))


def test_empty_set_of_quotas_is_refused():
    with pytest.raises(QuotaValueError, match="must set at least one quota"):
        check_all({}, USER, DEFAULTS)


def test_limit_of_ids_is_at_most_half_the_remembered_ids():
    small = Defaults(max_ids=1_000)
    assert check("producer_ids_rate", 500, USER, small) == {"limit": 500}
    assert refused("producer_ids_rate", 501, USER, small) == {"": "must be from 0 to 500"}


def test_integral_numbers_become_ints():
    value = {"limit": 5.0, "samples": 3.0, "algorithm": "token_bucket", "burst": 2.5}
    found = check("request_rate", value, USER, DEFAULTS)
    assert json.dumps(found) == '{"limit": 5, "algorithm": "token_bucket", "samples": 3, "burst": 2.5}'


def test_single_sample_is_allowed_under_delay_and_for_token_buckets():
    assert check("request_rate", {"limit": 5, "samples": 1}, USER, DEFAULTS)
    assert check("controller_mutation_rate", {"limit": 5, "samples": 1}, USER, DEFAULTS)
    assert check("consumer_byte_rate", {"limit": 5, "samples": 1, "enforcement": "delay"}, USER, DEFAULTS)


def test_defaults_come_from_key_and_settings():
    settings = Defaults(samples=3, sample_ms=2_000, window_ms=9_000, layers="timed")
    rate = resolve("request_rate", {"limit": 5}, USER, settings, 7)
    assert (rate.enforcement, rate.algorithm, rate.samples, rate.sample_ms) == (
        "delay",
        "sampled_rate",
        3,
        2_000,
    )
    assert (rate.scope, rate.on_store_failure, rate.shadow, rate.epoch) == ("cluster", "admit", False, 7)
    mutations = resolve("controller_mutation_rate", {"limit": 5}, USER, settings, 0)
    assert (mutations.algorithm, mutations.burst) == ("token_bucket", 30)
    ids = resolve("producer_ids_rate", {"limit": 5}, USER, settings, 0)
    assert (ids.window_ms, ids.layers) == (9_000, Layers(9_000, 13_500, "timed"))


def test_given_fields_override_the_defaults():
    rate = resolve(
        "request_rate",
        {"limit": 5, "algorithm": "token_bucket", "burst": 8, "shadow": True},
        USER,
        DEFAULTS,
        0,
    )
    assert (rate.algorithm, rate.burst, rate.shadow) == ("token_bucket", 8, True)
    layers = {"interval_ms": 100, "ttl_ms": 400}
    ids = resolve("producer_ids_rate", {"limit": 5, "window_ms": 1_000, "layers": layers}, USER, DEFAULTS, 0)
    assert (ids.window_ms, ids.layers) == (1_000, Layers(100, 400))


@pytest.mark.parametrize(
    ("entity", "given", "scope"),
    [
        (LISTENER, {}, "broker"),
        (LISTENER, {"scope": "cluster"}, "cluster"),
        (Entity.of(broker="1"), {"scope": "broker"}, "cluster"),
        (Entity.of(broker="1", listener="EXTERNAL"), {"scope": "broker"}, "cluster"),
        (Entity.of(broker=ANY), {}, "cluster"),
    ],
)
def test_scope_defaults_to_broker_for_listeners_and_is_ignored_if_a_broker_is_named(
    entity: Entity, given: dict[str, object], scope: str
):
    quota = resolve("max_connection_creation_rate", {"limit": 5} | given, entity, DEFAULTS, 0)
    assert quota.scope == scope


def test_merging_follows_rfc_7396_and_a_number_is_a_limit():
    layers = {"interval_ms": 500, "ttl_ms": 1_000}
    assert merge({"limit": 5, "layers": layers}, {"layers": {"ttl_ms": 2_000}}) == {
        "limit": 5,
        "layers": {"interval_ms": 500, "ttl_ms": 2_000},
    }
    assert merge({"limit": 5, "layers": "timed"}, {"layers": layers}) == {"limit": 5, "layers": layers}
    assert merge(None, 5) == {"limit": 5}
    assert merge({"limit": 5}, "7") == "7"
    assert merge({"limit": 5}, True) is True


def test_patch_error_points_to_what_the_patch_broke():
    now = {"request_rate": {"limit": 5, "algorithm": "token_bucket", "burst": 9}}
    with pytest.raises(QuotaValueError, match="/request_rate/burst unknown field"):
        alter(now, {"request_rate": {"algorithm": None}}, USER, DEFAULTS)
    with pytest.raises(QuotaValueError, match="/foobar unknown quota key"):
        alter(now, {"foobar": None}, USER, DEFAULTS)
    with pytest.raises(QuotaValueError, match="/request_rate/limit is required"):
        alter({}, {"request_rate": {"shadow": True}}, USER, DEFAULTS)
    with pytest.raises(QuotaValueError, match="/request_rate must be from 0"):
        alter(now, {"request_rate": -1}, USER, DEFAULTS)


@pytest.mark.parametrize(
    ("key", "definition", "ratio", "window_ms", "text"),
    [
        ("producer_ids_rate", {"limit": 5}, 1.0, 3_600_000, "never more than 5 in any 3600 s"),
        ("producer_ids_rate", {"limit": 0}, 0.0, 3_600_000, "a limit of 0 rejects every usage above 0"),
        ("producer_ids_rate", {"limit": 5, "shadow": True}, None, 3_600_000, "none: a shadow quota never"),
        ("request_rate", {"limit": 5}, None, 11_000, "none by itself"),
        ("consumer_byte_rate", {"limit": 5}, 12 / 11, 11_000, "never more than 1.09091 times the limit of 5"),
        ("controller_mutation_rate", {"limit": 5, "burst": 1}, 2.0, 200, "2 times the limit"),
        ("controller_mutation_rate", {"limit": 5e-324, "burst": 1}, 2.0, 2**53 - 1, "2 times the limit"),
    ],
)
def test_bounds_are_stated_in_numbers_and_words(
    key: str, definition: dict[str, object], ratio: float | None, window_ms: int, text: str
):
    found = bound(resolve(key, definition, USER, DEFAULTS, 0))
    assert (found["ratio"], found["window_ms"]) == (ratio, window_ms)
    assert text in found["text"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        "limit",
        "enforcement",
        "shadow",
        "scope",
        "on_store_failure",
        "algorithm",
        "samples",
        "sample_ms",
        "burst",
        "window_ms",
        "layers",
    ]
)
WORDS = st.sampled_from(["deny", "delay", "cluster", "broker", "admit", "throttle", "token_bucket", "timed"])
NUMBERS = st.integers(0, 5_000) | st.floats(0, 5_000)
VALUES = JSON | NUMBERS | st.dictionaries(NAMES, WORDS | NUMBERS | st.booleans() | JSON, max_size=6)


@given(key=st.sampled_from(list(KEYS)), value=VALUES)
def test_any_value_is_either_refused_or_resolves_to_a_quota(key: str, value: Any):
    entity = fitting(key)
    errors: Sequence[tuple[str, str]] | None = None
    try:
        found = check(key, value, entity, DEFAULTS)
    except QuotaValueError as wrong:
        errors = wrong.errors
    if errors is not None:
        assert errors
        assert all(field == "" or field.startswith("/") for field, _ in errors)
        return
    assert check(key, found, entity, DEFAULTS) == found, "a definition reads as itself"
    assert json.loads(json.dumps(found)) == found, "and survives the catalog"
    quota = resolve(key, found, entity, DEFAULTS, 0)
    assert quota.limit == found["limit"] >= 0  # type: ignore[operator]
    assert bound(quota)["text"]


@given(target=JSON, patch=JSON)
def test_patch_is_idempotent(target: Any, patch: Any):
    definition = target if isinstance(target, dict) else None
    if patch == patch:  # noqa: PLR0124 - NaN differs from itself
        once = merge(definition, patch)
        twice = merge(once if isinstance(once, dict) else None, patch)
        assert repr(once) == repr(twice)


@given(st.lists(st.text(max_size=6), max_size=3))
def test_pointers_can_be_read_back(tokens: list[str]):
    spelled = pointer(*tokens).split("/")[1:]
    assert tokens == [token.replace("~1", "/").replace("~0", "~") for token in spelled]


@pytest.mark.parametrize(("sample_ms", "burst"), [(1_000, 12), (500, 6), (1_250, 15)])
def test_default_burst_of_a_token_bucket_is_what_the_limit_allows_in_all_samples(sample_ms: int, burst: int):
    value = {"limit": 4, "algorithm": "token_bucket", "samples": 3, "sample_ms": sample_ms}
    assert resolve("request_rate", value, USER, DEFAULTS, epoch=0).burst == burst
