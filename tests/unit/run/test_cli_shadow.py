"""`quotagate quotas watch` and `promote`, with a node that answers as the test says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from app.run.commands.quotas import shadow
from tests.commands import Command, Gate, quotagate
from tests.unit.run.test_cli_kafka import gate

__all__ = ["gate", "quotagate"]

NOW_MS = 1_700_000_100_000
PATH, ENTITY = "/v1/quotas:shadow", "/v1/quotas/user=%2A"
COUNTS = st.integers(0, 2**53 - 1)


def quota(key: str = "request_rate", in_shadow_ms: int | None = 3_600_000, **counts: int) -> dict[str, Any]:
    return {
        "quota": key,
        "limit": 100,
        "enforcement": "deny",
        "since_ms": None if in_shadow_ms is None else NOW_MS - in_shadow_ms,
        "window_ms": 11_000,
        **dict.fromkeys(shadow.VERDICTS, 0),
        **counts,
    }


def answer(*shadows: dict[str, Any], now_ms: int = NOW_MS) -> dict[str, Any]:
    return {"entity": "user=%2A", "version": 17, "now_ms": now_ms, "shadows": [*shadows]}


def answered(gate: Gate, *shadows: dict[str, Any]) -> None:
    """Let the node answer with these shadow quotas, and make what it is sent live."""
    gate.answers["GET", PATH] = (200, answer(*shadows))
    gate.answers["PATCH", ENTITY] = (200, {"entity": "user=%2A", "quotas": {}, "bounds": {}, "version": 18})


BUSY = quota(admit=990, delay=3, throttle=5, reject=2)


def test_watch_shows_the_counts_once_without_a_terminal(quotagate: Command, gate: Gate) -> None:
    answered(gate, BUSY, quota("producer_ids_rate", None))
    ran = quotagate("quotas", "watch", "user=%2A", "--url", gate.url)
    assert (ran.code, ran.err) == (0, "")
    assert [line.split() for line in ran.out.splitlines()] == [
        ["QUOTA", "LIMIT", "IN", "SHADOW", "FOR", "ASKS", "WOULD", "DELAY", "WOULD", "REFUSE"],
        ["request_rate", "100", "1", "h", "1,000", "3", "(0.30%)", "7", "(0.70%)"],
        ["producer_ids_rate", "100", "an", "unknown", "time", "0", "0", "0"],
    ]
    assert gate.brief() == [("GET", PATH, [("entity", "user=%2A")])]
    for output, read in (("json", json.loads), ("yaml", yaml.safe_load)):
        ran = quotagate("quotas", "watch", "user=%2A", "--url", gate.url, "-o", output)
        assert read(ran.out)["shadows"][0] == BUSY


def test_watch_of_an_entity_without_shadow_quotas_says_so(quotagate: Command, gate: Gate) -> None:
    answered(gate)
    ran = quotagate("quotas", "watch", "user=%2A", "--url", gate.url)
    assert (ran.code, ran.err) == (0, "user=%2A has no shadow quota.\n")


def test_promote_makes_all_shadow_quotas_live_at_the_version_that_it_showed(
    quotagate: Command, gate: Gate
) -> None:
    answered(gate, BUSY, quota("producer_ids_rate", throttle=1))
    ran = quotagate("quotas", "promote", "user=%2A", "--url", gate.url)
    assert ran.code == 0, ran.err
    assert ran.err == "Live at version 18 of user=%2A: request_rate, producer_ids_rate.\n"
    patch = gate.asked[-1]
    live = {"shadow": None}
    assert patch.body == {"request_rate": live, "producer_ids_rate": live}
    assert patch.headers["if-match"] == '"17"'
    assert patch.headers["x-reason"] == (
        "promoted from shadow: request_rate would have refused 7 and delayed 3 of 1,000 asks in 1 h; "
        "producer_ids_rate would have refused 1 and delayed 0 of 1 asks in 1 h"
    )


def test_promote_takes_some_keys_a_reason_and_a_version(quotagate: Command, gate: Gate) -> None:
    answered(gate, BUSY, quota("producer_ids_rate"))
    words = ("request_rate", "--reason", "trial is over", "--if-match", "16")
    ran = quotagate("quotas", "promote", "user=%2A", *words, "--url", gate.url, "-o", "json")
    assert (ran.code, ran.err) == (0, "")
    assert json.loads(ran.out)["promoted"] == [BUSY]
    patch = gate.asked[-1]
    assert patch.body == {"request_rate": {"shadow": None}}
    assert (patch.headers["if-match"], patch.headers["x-reason"]) == ('"16"', "trial is over")


@pytest.mark.parametrize(
    ("in_shadow_ms", "warns"),
    [
        (10_999, "is shorter than its window of 11 s"),
        (11_000, ""),
        (None, "unknown since when"),
        (-5, "0 ms"),
    ],
)
def test_promote_warns_of_a_period_shorter_than_a_window(
    quotagate: Command, gate: Gate, in_shadow_ms: int | None, warns: str
) -> None:
    answered(gate, quota(in_shadow_ms=in_shadow_ms))
    ran = quotagate("quotas", "promote", "user=%2A", "--url", gate.url)
    assert ran.code == 0
    assert warns in ran.err
    assert ("warning: request_rate" in ran.err or "warning: it is" in ran.err) == bool(warns)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([], "user=%2A has no shadow quota"),
        (["producer_ids_rate"], "producer_ids_rate: no shadow quota of user=%2A; there is request_rate"),
    ],
)
def test_promote_changes_nothing_without_a_shadow_quota(
    quotagate: Command, gate: Gate, keys: list[str], said: str
) -> None:
    answered(gate, *([BUSY] if keys else []))
    ran = quotagate("quotas", "promote", "user=%2A", *keys, "--url", gate.url)
    assert (ran.code, ran.err) == (1, f"quotagate: {said}\n")
    assert {asked.method for asked in gate.asked} == {"GET"}


@pytest.mark.parametrize("command", ["watch", "promote"])
def test_an_entity_that_is_none_is_wrong_use(quotagate: Command, gate: Gate, command: str) -> None:
    ran = quotagate("quotas", command, "group=a", "--url", gate.url)
    assert ran.code == 2
    assert not gate.asked


@given(st.lists(st.tuples(st.integers(1, 5_000), *[COUNTS] * 4), min_size=1, max_size=20))
def test_rates_add_up_to_what_was_counted_while_watching(steps: list[tuple[int, ...]]) -> None:
    totals, now_ms, reads = [0] * 4, NOW_MS, []
    for passed_ms, *more in steps:
        now_ms += passed_ms
        totals = [total + number for total, number in zip(totals, more, strict=True)]
        counts = dict(zip(shadow.VERDICTS, totals, strict=True))
        reads.append(answer({**quota(), **counts}, now_ms=now_ms))
    found = shadow.rates(reads, "request_rate", shadow.throttled)
    assert len(found) == len(reads) - 1
    added = sum(
        rate * (reads[at // shadow.STEP_MS - 1]["now_ms"] - reads[at // shadow.STEP_MS - 2]["now_ms"]) / 1000
        for at, rate in found.items()
    )
    first, last = (shadow.throttled(read["shadows"][0]) for read in (reads[0], reads[-1]))
    assert added == pytest.approx(last - first)


def test_there_is_no_rate_over_a_change_or_without_the_quota() -> None:
    other = quota(in_shadow_ms=5)
    reads = [answer(now_ms=1), answer(BUSY, now_ms=2), answer(other, now_ms=3), answer(other, now_ms=3)]
    assert shadow.rates(reads, "request_rate", shadow.asks) == {}
