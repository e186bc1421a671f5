"""Kafka's own numbers: each vector is a scenario that runs on both the oracle and the real HTTP API."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from app.domain import sampled_rate
from app.domain.ask import Ask
from app.domain.digest import digest, spread
from app.domain.entity import Entity
from app.domain.ladder import MatchingRules
from app.domain.producer_ids import ProducerIds, Segment
from app.domain.quota import Defaults, Layers
from app.domain.quota_value import resolve
from app.domain.shape import Shape
from app.domain.usage import usage_of
from tests import service
from tests.drivers import Driver, HttpDriver, OracleDriver, OrdinaryDriver
from tests.false_seen import false_seen
from tests.pushing import pushed
from tests.report import say
from tests.volume_vectors import VOLUMES

FILE: Final = Path(__file__).parents[1] / "vectors" / "kafka.yaml"
GIVEN: Final = Path(__file__).parents[3] / "shared" / "vectors" / "kafka.yaml"
INTER_BROKER: Final = "REPLICATION"
DRIVERS: Final = ("oracle", "http", "ordinary")


class Vector(dict[str, Any]):
    """One vector of the file."""

    @property
    def id(self) -> str:
        return str(self["id"])

    def numbers(self, field: str) -> list[Any]:
        """The numbers in a field's text, in order: `record 50 at t=0` has 50 and 0."""
        found = re.findall(r"(?<![\w.])-?\d[\d_]*(?:\.\d+)?", self[field].replace("->", " "))
        return [float(n) if "." in n else int(n) for n in found]

    def rate(self, **more: object) -> dict[str, object]:
        """The quota's value from the vector's cfg: the limit (or the given one), samples, and more fields."""
        cfg = self["cfg"]
        value = {"samples": cfg["samples"], "sample_ms": cfg["window_s"] * 1000}
        if "quota" in cfg:
            value["limit"] = cfg["quota"]
        return {**value, **({"burst": cfg["burst"]} if "burst" in cfg else {}), **more}


@cache
def vectors() -> dict[str, Vector]:
    """Every vector by its id."""
    read = [Vector(entry) for entry in yaml.safe_load(FILE.read_text(encoding="utf-8"))]
    found = {vector.id: vector for vector in read}
    assert len(found) == len(read)
    return found


def ids(via: str) -> list[str]:
    return [vector.id for vector in vectors().values() if vector["via"] == via]


@dataclass(frozen=True)
class Quotagate:
    """The driver of a scenario, and a way to get another that sums delays as KIP-124 does."""

    driver: Driver
    sequential: Callable[[], Driver]


Scenario = Callable[[Vector, Quotagate], None]
SCENARIOS: Final[dict[str, Scenario]] = {}
FORMULAS: Final[dict[str, Callable[[Vector], None]]] = {}


def scenario(*prefixes: str) -> Callable[[Scenario], Scenario]:
    """Register the scenario of the HTTP vectors with these ids, or with ids that continue one after a dot."""

    def add(run: Scenario) -> Scenario:
        SCENARIOS.update({id_: run for id_ in ids("http") if id_.split(".")[0] in prefixes})
        return run

    return add


def formula(*prefixes: str) -> Callable[[Callable[[Vector], None]], Callable[[Vector], None]]:
    """Register the scenario of vectors of the domain."""

    def add(run: Callable[[Vector], None]) -> Callable[[Vector], None]:
        FORMULAS.update({id_: run for id_ in ids("domain") if id_.split(".")[0] in prefixes})
        return run

    return add


def outcome(decision: dict[str, Any]) -> tuple[str, int]:
    return decision["decision"], decision["throttle_ms"]


def delayed(ms: int) -> tuple[str, int]:
    return ("delay", ms) if ms else ("admit", 0)


# Byte rates


@scenario("C02")
def rates_and_delays_follow_the_limit(vector: Vector, quotagate: Quotagate) -> None:
    user, driver = vector.id, quotagate.driver
    driver.put(f"user={user}", {"producer_byte_rate": vector.rate()})
    for row in vector["rows"]:
        if row[0] == "set_quota":
            driver.put(f"user={user}", {"producer_byte_rate": vector.rate(limit=row[1])})
            continue
        at, value, throttle_ms, rate_after = row
        decision = driver.ask(at, {"produce_bytes": value}, principal=user)
        assert outcome(decision) == delayed(throttle_ms)
        assert decision["quotas"][0]["observed"] == rate_after


@scenario("C04")
def a_cold_rate_counts_the_samples_that_are_missing(vector: Vector, quotagate: Quotagate) -> None:
    user, driver = vector.id, quotagate.driver
    value, at, then = vector.numbers("op")
    driver.put(f"user={user}", {"producer_byte_rate": vector.rate(limit=10**9)})
    driver.ask(at, {"produce_bytes": value}, principal=user)
    shown = driver.shown(then, "produce_bytes", principal=user)
    assert shown["observed"] == pytest.approx(vector["expect_rate"], rel=1e-9)


@scenario("C06")
def a_rate_forgets_old_samples(vector: Vector, quotagate: Quotagate) -> None:
    user, driver = vector.id, quotagate.driver
    value, first, second, then = vector.numbers("op")
    driver.put(f"user={user}", {"producer_byte_rate": vector.rate(limit=10**9)})
    for at in (first, second):
        driver.ask(at, {"produce_bytes": value}, principal=user)
    shown = driver.shown(then, "produce_bytes", principal=user)
    assert shown["observed"] == pytest.approx(vector["expect_rate"], rel=1e-6)
    assert 2 * value / shown["observed"] * 1000 == pytest.approx(vector["expect_window_ms"])
    later, nothing = vector.numbers("then")
    assert driver.shown(later, "produce_bytes", principal=user)["observed"] == nothing


@scenario("C11")
def deny_waits_until_it_passes_and_not_as_long_as_the_formula_says(
    vector: Vector, quotagate: Quotagate
) -> None:
    user, driver = vector.id, quotagate.driver
    too_large, _, largest, value, at, again, then, wait = vector.numbers("here")
    driver.put(f"user={user}", {"consumer_byte_rate": vector.rate()})
    refused = driver.ask(at, {"fetch_bytes": too_large}, principal=user)
    assert outcome(refused) == ("reject", 0)
    assert refused["limited_by"]["largest"] == largest
    assert outcome(driver.ask(at, {"fetch_bytes": value}, principal=user)) == ("admit", 0)
    assert outcome(driver.ask(then, {"fetch_bytes": again}, principal=user)) == ("throttle", wait)
    first_ms = vector["first_t_accepted_again"]
    assert then + wait == first_ms
    assert outcome(driver.ask(first_ms - 1, {"fetch_bytes": again}, principal=user)) == ("throttle", 1)
    assert outcome(driver.ask(first_ms, {"fetch_bytes": again}, principal=user)) == ("admit", 0)


@scenario("C12")
def a_violation_is_delayed_at_least_a_millisecond(vector: Vector, quotagate: Quotagate) -> None:
    user, driver = vector.id, quotagate.driver
    value, at = vector.numbers("op")
    expected = vector.numbers("here")[0] if "here" in vector else vector["expect_throttle_ms"]
    driver.put(f"user={user}", {"producer_byte_rate": vector.rate()})
    decision = driver.ask(at, {"produce_bytes": value}, principal=user)
    assert outcome(decision) == delayed(expected)
    assert (decision["decision"] == "delay") == vector["violated"]


@scenario("C14")
def a_rejected_fetch_charges_nothing(vector: Vector, quotagate: Quotagate) -> None:
    user, driver = vector.id, quotagate.driver
    too_large, largest, value, then = vector.numbers("here")
    driver.put(f"user={user}", {"consumer_byte_rate": vector.rate()})
    refused = driver.ask(0, {"fetch_bytes": too_large}, principal=user)
    assert (*outcome(refused), refused["charged"]) == ("reject", 0, False)
    assert refused["limited_by"]["largest"] == largest
    assert refused["quotas"][0]["observed"] == 0
    assert outcome(driver.ask(then, {"fetch_bytes": value}, principal=user)) == ("admit", 0)


@scenario("C15")
def a_delayed_produce_stays_charged(vector: Vector, quotagate: Quotagate) -> None:
    user, driver = vector.id, quotagate.driver
    numbers = vector.numbers("op")
    driver.put(f"user={user}", {"producer_byte_rate": vector.rate()})
    for value, at, throttle_ms in (numbers[:3], numbers[3:]):
        assert outcome(driver.ask(at, {"produce_bytes": value}, principal=user)) == delayed(throttle_ms)


# Request rates


@scenario("B03")
def a_request_delay_is_at_most_one_sample(vector: Vector, quotagate: Quotagate) -> None:
    user, driver = vector.id, quotagate.driver
    requests, at = vector.numbers("op")
    limit = vector["cfg"]["request_rate"]
    capped_and_not = {
        "request_rate": vector.rate(limit=limit),
        "producer_byte_rate": vector.rate(limit=limit),
    }
    driver.put(f"user={user}", capped_and_not)
    ones = [{"at_ms": at, "principal": user, "usage": {field: 1}} for field in ("requests", "produce_bytes")]
    for one, expected in zip(ones, (vector["expect_throttle_ms"], vector["uncapped_ms"]), strict=True):
        *_, last = driver.asks([one] * requests)
        assert outcome(last) == delayed(expected)


@scenario("B06")
def delays_are_not_summed_unless_kip_124_is_asked_for(vector: Vector, quotagate: Quotagate) -> None:
    user = vector.id
    requests, at, alone_ms, bytes_ms = vector.numbers("op")
    longest_ms, summed_ms = vector.numbers("here")
    assert [longest_ms, summed_ms] == list(vector["expect"].values())
    byte_rate, allowance_ms = 1_000, (vector["cfg"]["samples"] - 1) * vector["cfg"]["window_s"] * 1000
    produced = byte_rate * (allowance_ms + bytes_ms) // 1000
    quotas = {
        "request_rate": vector.rate(limit=vector["cfg"]["request_rate"]),
        "producer_byte_rate": vector.rate(limit=byte_rate),
    }
    for driver, expected in ((quotagate.driver, longest_ms), (quotagate.sequential(), summed_ms)):
        driver.put(f"user={user}", quotas)
        decision = driver.ask(at, {"requests": requests, "produce_bytes": produced}, principal=user)
        assert outcome(decision) == delayed(expected)
        assert decision["limited_by"]["quota"] == "producer_byte_rate"
    by_quota = {
        quota["quota"]: quota["throttle_ms"]
        for quota in quotagate.driver.ask(
            at, {"requests": 0, "produce_bytes": 0}, principal=user, mode="peek"
        )["quotas"]
    }
    assert by_quota == {"request_rate": alone_ms, "producer_byte_rate": bytes_ms}


# Token buckets


@scenario("T01", "T02")
def tokens_are_recorded_and_given_back(vector: Vector, quotagate: Quotagate) -> None:
    user, driver = vector.id, quotagate.driver
    driver.put(f"user={user}", {"controller_mutation_rate": vector.rate()})
    for at, value, tokens in vector["rows_t_record_tokens"]:
        if value is not None:
            mode = "record" if value >= 0 else "refund"
            driver.ask(at, {"mutations": abs(value)}, principal=user, mode=mode)
        assert driver.shown(at, "mutations", principal=user)["remaining"] == tokens


@scenario("T03")
def deny_has_no_debt_and_record_has(vector: Vector, quotagate: Quotagate) -> None:
    user, driver = vector.id, quotagate.driver
    value, burst, recorded, delay_ms, tokens, then, tokens_then = vector.numbers("here")
    driver.put(f"user={user}", {"controller_mutation_rate": vector.rate()})
    refused = driver.ask(0, {"mutations": value}, principal=user)
    assert outcome(refused) == ("reject", 0)
    assert refused["limited_by"]["largest"] == burst
    decision = driver.ask(0, {"mutations": recorded}, principal=user, mode="record")
    assert outcome(decision) == delayed(delay_ms)
    assert decision["quotas"][0]["remaining"] == tokens
    assert driver.shown(then, "mutations", principal=user)["remaining"] == tokens_then


@scenario("T09")
def a_debt_waits_for_its_refill_alone(vector: Vector, quotagate: Quotagate) -> None:
    user, driver = vector.id, quotagate.driver
    value, tokens, wait_ms = vector.numbers("rows")[:3]
    over, burst = vector.numbers("here")
    driver.put(f"user={user}", {"controller_mutation_rate": vector.rate()})
    refused = driver.ask(0, {"mutations": over}, principal=user)
    assert (refused["decision"], refused["limited_by"]["largest"]) == ("reject", burst)
    decision = driver.ask(0, {"mutations": value}, principal=user, mode="record")
    assert outcome(decision) == delayed(wait_ms)
    assert decision["quotas"][0]["remaining"] == tokens


@scenario("T11")
def deny_passes_the_burst_and_not_one_more(vector: Vector, quotagate: Quotagate) -> None:
    user, driver = vector.id, quotagate.driver
    passing = vector.numbers("here")[0]
    wait_ms = int(re.findall(r"throttled (\d+) ms", vector["here"])[0])
    driver.put(f"user={user}", {"controller_mutation_rate": vector.rate()})
    one = {"at_ms": 0, "principal": user, "usage": {"mutations": 1}}
    *passed, last = driver.asks([one] * (passing + 1))
    assert {outcome(decision) for decision in passed} == {("admit", 0)}
    assert outcome(last) == ("throttle", wait_ms)


# Connections


@scenario("D01")
def a_refused_connection_is_not_counted(vector: Vector, quotagate: Quotagate) -> None:
    ip, driver = "10.1.0.1", quotagate.driver
    connects, at = vector.numbers("op")[:2]
    driver.put(f"ip={ip}", {"connection_creation_rate": vector.rate(limit=vector["cfg"]["ip_rate"])})
    one = {"at_ms": at, "ip": ip, "usage": {"connections": 1}}
    decisions = driver.asks([one] * connects)
    accepted, refused = decisions[: vector["expect_accepted"]], decisions[vector["expect_accepted"] :]
    assert {(*outcome(d), d["charged"]) for d in accepted} == {("admit", 0, True)}
    wait_ms = vector["expect_first_reject_throttle_ms"]
    assert {(*outcome(d), d["charged"]) for d in refused} == {("throttle", wait_ms, False)}


@scenario("D06")
def a_connection_delay_is_at_most_one_sample(vector: Vector, quotagate: Quotagate) -> None:
    driver, (connection, at) = quotagate.driver, vector.numbers("op")
    quotas = {"max_connection_creation_rate": vector.rate(limit=vector["cfg"]["rate"])}
    for type_ in ("broker", "listener"):
        driver.put(f"{type_}={vector.id}", quotas)
        one = {"at_ms": at, type_: vector.id, "usage": {"connections": 1}}
        *_, last = driver.asks([one] * connection)
        assert outcome(last) == delayed(vector["expect_delay_ms"])
    user = vector.id
    driver.put(f"user={user}", {"producer_byte_rate": vector.rate(limit=vector["cfg"]["rate"])})
    decision = driver.ask(at, {"produce_bytes": connection}, principal=user)
    assert outcome(decision) == delayed(vector["uncapped"])


@scenario("D15")
def broker_and_listener_both_count_but_for_the_listener_between_brokers(
    vector: Vector, quotagate: Quotagate
) -> None:
    driver, name, cfg = quotagate.driver, vector.id, vector["cfg"]
    for type_ in ("broker", "listener"):
        quotas = {"max_connection_creation_rate": vector.rate(limit=cfg[f"{type_}_rate"])}
        driver.put(f"{type_}={name}", quotas)
    one = {"at_ms": 0, "broker": name, "listener": name, "usage": {"connections": 1}}
    decisions = driver.asks([one] * len(vector["expect_delay_ms"]))
    assert [outcome(d) for d in decisions] == [delayed(ms) for ms in vector["expect_delay_ms"]]
    between = driver.ask(0, {"connections": 1}, broker=name, listener=INTER_BROKER)
    assert (*outcome(between), between["applied"]) == ("admit", 0, 0)
    broker = driver.shown(0, "connections", broker=name)
    assert broker["observed"] * cfg["window_s"] == len(decisions)


@scenario("D16")
def a_held_connection_is_asked_for_once_more(vector: Vector, quotagate: Quotagate) -> None:
    ip, driver = "10.1.0.16", quotagate.driver
    like = vectors()["D01"]
    quotas = {"connection_creation_rate": like.rate(limit=like["cfg"]["ip_rate"])}
    driver.put(f"ip={ip}", quotas)
    driver.asks([{"at_ms": 0, "ip": ip, "usage": {"connections": 1}}] * like["expect_accepted"])
    held = [driver.ask(0, {"connections": 1}, ip=ip) for _ in range(2)]
    wait_ms = like["expect_first_reject_throttle_ms"]
    assert [outcome(decision) for decision in held] == [("throttle", wait_ms)] * 2
    again = [driver.ask(wait_ms, {"connections": 1}, ip=ip, recheck=True) for _ in range(2)]
    assert [outcome(decision) for decision in again] == [("admit", 0), ("reject", 0)]
    assert "an ask with recheck is admitted if the rate then allows, else rejected" in vector["here"]


# Administration


def spelled(entity: dict[str, str]) -> str:
    return ",".join(f"{type_}={name}" for type_, name in entity.items())


@scenario("F03")
def entities_that_cannot_be_are_refused(vector: Vector, quotagate: Quotagate) -> None:
    (quota,) = re.findall(r"(\w+): (\d+)", vector["op"])
    for entity, error in vector["rows"]:
        if entity:  # the empty entity can only be sent to :alter
            assert error == "INVALID_REQUEST"
            assert quotagate.driver.put(spelled(entity), {quota[0]: int(quota[1])}) == 422
    for type_, name in (("user", "user-1"), ("client-id", "user-1"), ("ip", "1.2.3.4")):
        assert quotagate.driver.get(f"{type_}={name}") is None


@scenario("F04")
def values_are_checked_before_they_are_written(vector: Vector, quotagate: Quotagate) -> None:
    allowed, _, refused = vector.numbers("here")[:3]
    entity = f"{vector['cfg']['entity']}={vector.id}"
    for key, value, error, _ in vector["rows"]:
        good = value != refused and (error == "NONE" or value == allowed)
        assert quotagate.driver.put(entity, {key: value}) in ((200, 201) if good else (422,))
        if good:
            assert quotagate.driver.get(entity) == {key: value}


@scenario("F08")
def a_patch_is_merged_key_by_key(vector: Vector, quotagate: Quotagate) -> None:
    entity, driver = f"user={vector.id}", quotagate.driver
    statuses = []
    for _, change, after in vector["steps"]:
        statuses.append(driver.patch(entity, change))
        found = driver.get(entity)
        if isinstance(after, dict):
            assert found == after
        elif after == "3 keys stored":
            assert found == {key: limit for key, limit in change.items() if limit is not None}
            assert len(found) == 3
        else:
            assert found is None
    # removing a missing quota is a no-op for :alter, and 404 for PATCH
    assert statuses == [201, 200, 200, 200, 204, 404, 201]
    assert driver.delete(entity) == 204
    assert driver.get(entity) is None


# Producer ids


def ids_quota(limit: int, window_ms: int, layers: str = "layered") -> dict[str, object]:
    return {"producer_ids_rate": {"limit": limit, "window_ms": window_ms, "layers": layers}}


@scenario("A01")
def known_ids_pass_whatever_the_rate(vector: Vector, quotagate: Quotagate) -> None:
    user, driver = vector.id, quotagate.driver
    limit, window_ms = vector["cfg"]["producer_ids_rate"], hours_ms(vector["cfg"]["window"])
    driver.put(f"user={user}", ids_quota(limit, window_ms))
    step = window_ms // limit
    for n in range(limit):
        assert outcome(driver.ask(n * step, {"producer_ids": [n]}, principal=user)) == ("admit", 0)
    now = (limit - 1) * step
    for n in range(limit, limit + 20):
        assert outcome(driver.ask(now, {"producer_ids": [n]}, principal=user)) == (
            "throttle",
            window_ms - now,
        )
    seen = [{"at_ms": now, "principal": user, "usage": {"producer_ids": [n]}} for n in range(limit)]
    assert {outcome(decision) for decision in driver.asks(seen * 10)} == {("admit", 0)}


@scenario("A03")
def a_throttled_id_is_not_remembered(vector: Vector, quotagate: Quotagate) -> None:
    user, driver = vector.id, quotagate.driver
    limit, window_ms = 5, 3_600_000
    driver.put(f"user={user}", ids_quota(limit, window_ms))
    driver.ask(0, {"producer_ids": list(range(limit))}, principal=user)
    for now in (1, 2, window_ms - 1):
        retried = driver.ask(now, {"producer_ids": ["late"]}, principal=user)
        assert (*outcome(retried), retried["charged"]) == ("throttle", window_ms - now, False)
    admitted = driver.ask(window_ms, {"producer_ids": ["late"]}, principal=user)
    assert (*outcome(admitted), admitted["quotas"][0]["observed"]) == ("admit", 0, 1)


@scenario("A05")
def an_id_in_use_is_counted_once_and_a_silent_one_again(vector: Vector, quotagate: Quotagate) -> None:
    driver, window_ms = quotagate.driver, vector["cfg"]["window_s"] * 1000
    every, hours = vector.numbers("rows")[:2]
    end_ms = hours * 3_600_000
    for layers in ("kip936", "layered"):
        policy = Layers.named(layers, window_ms)
        users = {name: f"{vector.id}-{layers}-{name}" for name in ("busy", "known", "gone", "left", "kept")}
        for user in users.values():
            driver.put(f"user={user}", ids_quota(9, window_ms, layers))

        times = range(0, end_ms + 1, every * 60_000)
        assert [charged(driver, users["busy"], 1, at) for at in times] == [1] + [0] * (len(times) - 1)
        # the last layer begins no later than the last use, so silence for a layer's lifetime is always enough
        assert charged(driver, users["busy"], 1, end_ms + policy.ttl_ms) == 1
        for name, silent_ms, again in (("known", policy.ttl_ms - 1, 0), ("gone", policy.ttl_ms, 1)):
            assert charged(driver, users[name], 1, 0) == 1
            assert charged(driver, users[name], 1, silent_ms) == again
        # first seen as a layer closes: it expires with that layer unless it is refreshed
        for name, again in (("left", 1), ("kept", 0)):
            assert charged(driver, users[name], 1, 0) == 1
            assert charged(driver, users[name], 2, policy.interval_ms - 1) == 1
            if name == "kept":
                assert charged(driver, users[name], 2, policy.interval_ms) == 0
            assert charged(driver, users[name], 2, policy.ttl_ms) == again
    forgotten_ms = window_ms * (vector["cfg"]["layers"] - 1) // vector["cfg"]["layers"]
    kip936 = Layers.named("kip936", window_ms)
    assert kip936.ttl_ms - kip936.interval_ms == forgotten_ms


@scenario("A08")
def no_producer_id_is_never_counted(vector: Vector, quotagate: Quotagate) -> None:
    user, driver = vector.id, quotagate.driver
    (none, *_) = vector.numbers("rows")
    driver.put(f"user={user}", ids_quota(1, 3_600_000))
    for at in range(3):
        decision = driver.ask(at, {"producer_ids": [none]}, principal=user)
        assert (*outcome(decision), decision["quotas"][0]["observed"]) == ("admit", 0, 0)
    driver.put(f"user={user}", ids_quota(0, 3_600_000))
    assert outcome(driver.ask(9, {"producer_ids": [none]}, principal=user)) == ("admit", 0)
    assert outcome(driver.ask(9, {"producer_ids": [1]}, principal=user)) == ("reject", 0)


def charged(driver: Driver, user: str, id_: int, at_ms: int) -> float:
    """The number of ids that an ask with this id is charged for."""
    before: float = driver.shown(at_ms, "producer_ids", principal=user)["observed"]
    after: float = driver.ask(at_ms, {"producer_ids": [id_]}, principal=user)["quotas"][0]["observed"]
    return after - before


def hours_ms(text: str) -> int:
    return int(text.removesuffix("h")) * 3_600_000


# Formulas


@formula("C09", "C10")
def delays(vector: Vector) -> None:
    """Kafka's formula. Here the result is never below 0, which the bare formula allows."""
    expected = vector.numbers("here")[0] if "here" in vector else vector["expect_ms"]
    arguments = vector.numbers("op")
    assert sampled_rate.delay_ms(*arguments) == expected
    if "here" in vector:
        observed, limit, window = (Fraction(str(n)) for n in arguments)
        assert round((observed - limit) / limit * window) == vector["expect_ms"]


@formula("C19")
def the_most_that_fits(vector: Vector) -> None:
    cfg = vector["cfg"]
    most = sampled_rate.largest_usage(cfg["quota"], cfg["samples"], cfg["window_s"] * 1000)
    assert most == vector["expect_max_value_in_window"]


@formula("B02")
def thread_time_in_percent(vector: Vector) -> None:
    (nanos,) = vector.numbers("op")[:1]
    quota = resolve("request_percentage", {"limit": 1}, Entity.of(user="a"), Defaults(), 0)
    assert usage_of(Ask({"request_time_ms": nanos / 1_000_000}), quota) == vector["expect"]


@formula("A16")
def strangers_in_several_layers(vector: Vector) -> None:
    """Fill several layers, each of which takes an unseen id as seen with chance p; ask with unseen ids."""
    hashes, blocks, strangers = 7, 64, 20_000
    for full, p, chance in vector["rows"]:
        load = load_at(p, hashes)
        assert 1 - (1 - false_seen(load, hashes)) ** full == pytest.approx(chance, abs=1e-6)
        shape = Shape(round(load * blocks), 1, hashes, blocks)
        cells = {
            layer: {
                (block, cell)
                for n in range(shape.ids)
                for block, places in [shape.places(spread(digest(b"", f"layer {layer}", n)))]
                for cell in places
            }
            for layer in range(1, full + 1)
        }
        state = ProducerIds(dict.fromkeys(cells, 0), [Segment(shape, cells)])
        forever = Layers(10**9, 10**9)
        asked = [spread(digest(b"", "strangers", n)) for n in range(strangers)]
        seen = sum(state.find(stranger, 0, forever) is not None for stranger in asked)
        noise = 4 * (strangers * chance * (1 - chance)) ** 0.5 + 0.05 * strangers * chance
        assert abs(seen - strangers * chance) < noise


def load_at(p: float, hashes: int) -> float:
    """The load of a block at which an unseen id is taken as seen with chance p, found by bisection."""
    low, high = 0.0, 504.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if false_seen(middle, hashes) < p else (low, middle)
    return low


# The tests


@pytest.fixture(scope="module")
def quotagates() -> Iterator[Callable[[str], Quotagate]]:
    """Returns the driver of a scenario by name. Nodes are started when needed."""
    with ExitStack() as stack:
        rules = MatchingRules(inter_broker_listener=INTER_BROKER)

        @cache
        def node(combine: str, _of: str) -> Driver:
            settings = {
                "QUOTAGATE_CLOCK": "caller",
                "QUOTAGATE_COMBINE_DELAYS": combine,
                "QUOTAGATE_INTER_BROKER_LISTENER": INTER_BROKER,
            }
            return HttpDriver(stack.enter_context(service.running(environment=settings)))

        def quotagate(name: str) -> Quotagate:
            if name == "oracle":
                return Quotagate(OracleDriver(rules), lambda: OracleDriver(rules, sequential=True))
            if name == "http":
                return Quotagate(node("max", name), lambda: node("sequential", name))
            return Quotagate(ordinary("max"), lambda: ordinary("sequential"))

        @cache
        def ordinary(combine: str) -> Driver:
            oracle = OracleDriver(rules, sequential=combine == "sequential")
            return OrdinaryDriver(node(combine, "ordinary"), oracle)

        yield quotagate


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("id_", ids("http"))
def test_vector(id_: str, driver: str, quotagates: Callable[[str], Quotagate]) -> None:
    """Answers equal Kafka's to the millisecond, or those in `here` where this project differs."""
    SCENARIOS[id_](vectors()[id_], quotagates(driver))


@pytest.mark.parametrize("id_", ["F03", "F08"])
def test_vectors_of_alter(id_: str, quotagates: Callable[[str], Quotagate]) -> None:
    """As in Kafka's request, wrong and empty entities are refused, and keys are merged one by one."""
    driver = quotagates("http").driver
    assert isinstance(driver, HttpDriver)
    vector = vectors()[id_]
    if id_ == "F03":
        (quota,) = re.findall(r"(\w+): (\d+)", vector["op"])
        for entity, _ in vector["rows"]:
            assert not driver.alter(spelled(entity), {quota[0]: int(quota[1])}), entity
        return
    entity = "user=altered"
    for _, change, after in vector["steps"]:
        assert driver.alter(entity, change)
        found = driver.get(entity)
        if after == "3 keys stored":
            assert found == {key: limit for key, limit in change.items() if limit is not None}
        else:
            assert found == (after if isinstance(after, dict) else None)


@pytest.mark.parametrize("id_", ids("domain"))
def test_formula(id_: str) -> None:
    """The formulas in `app.domain` give Kafka's numbers."""
    FORMULAS[id_](vectors()[id_])


@pytest.fixture(scope="module")
def nodes() -> Iterator[Callable[[str, str], service.Service]]:
    """Returns a node under the caller's clock with this validity and fallback, one node for each pair."""
    with ExitStack() as stack:

        @cache
        def node(validity: str, fallback: str) -> service.Service:
            rules = {
                "QUOTAGATE_VOLUME_VALIDITY": validity,
                "QUOTAGATE_VOLUME_FALLBACK_FACTOR": fallback,
                "QUOTAGATE_VOLUME_CHECK_INTERVAL": "PT1M",
            }
            return stack.enter_context(pushed(environment=rules))

        yield node


@pytest.mark.parametrize("id_", ids("volumes"))
def test_volumes(id_: str, nodes: Callable[[str, str], service.Service]) -> None:
    """The real API derives the same factor from volumes as Strimzi's plugin."""
    VOLUMES[id_](vectors()[id_], nodes)


def test_no_vector_is_left_out() -> None:
    """Exactly the vectors of the file run, by id, except for background vectors."""
    http, domain, volumes, background = (ids(via) for via in ("http", "domain", "volumes", "background"))
    assert len(http) + len(domain) + len(volumes) + len(background) == len(vectors())
    assert set(SCENARIOS) == set(http)
    assert set(FORMULAS) == set(domain)
    assert set(VOLUMES) == set(volumes)
    say(f"{len(http)} vectors by oracle and by HTTP, {len(domain)} by app.domain, {len(volumes)} of volumes;")
    say(f"{len(background)} are background: {', '.join(background)}")


def test_vectors_are_unchanged() -> None:
    """The copy in this repository equals the original file."""
    if not GIVEN.exists():
        pytest.skip("the given file is not on this machine")
    assert FILE.read_bytes() == GIVEN.read_bytes()
