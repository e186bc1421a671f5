"""Each bucket is judged as the oracle decides it; lost, unlogged and forgotten charges are distinguished."""

from __future__ import annotations

import copy
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from app.domain.ask import Ask
from app.domain.entity import Entity
from app.domain.oracle import IdsBucket, Oracle, RateBucket
from app.domain.quota import Layers, Quota
from tests.jobs import faults
from tests.jobs.audits import Findings, judge
from tests.jobs.logs import SECRET, START_MS, OracleLog, Row, asks
from workers.jobs.audit.findings import improbable
from workers.jobs.audit.judge import AuditRules
from workers.jobs.verdicts import ORDERS_PER_MS

NAMES = ("a", "b", "c")
QUICK = (0, 0, 1, 2, 5, 20)
CLOCKS = (0, 1, 5, 20, 100, 1_000, -40, -30_000, 20_000)
BYTES = ("producer_byte_rate", "user=a", "a")
IDS = ("producer_ids_rate", "user=a", "a")


def logged(asks_: int = 0, gap_ms: tuple[int, ...] = QUICK, seed: int = 1, **oracle) -> OracleLog:
    log = OracleLog(Oracle(SECRET, **oracle))
    log.run(asks(seed, NAMES), asks_, gap_ms, seed)
    return log


@cache
def random_rows(gap_ms: tuple[int, ...], seed: int) -> tuple[Row, ...]:
    """The rows of 1,500 random asks, which tests do not change."""
    return tuple(logged(1_500, gap_ms, seed).rows)


def send(log: OracleLog, count: int, gap_ms: int = 100, size: int = 1_000) -> None:
    """Produce requests of one principal at a steady pace."""
    for _ in range(count):
        log.now_ms += gap_ms
        log.ask(Ask({"produce_bytes": size}, None, "a", detail=True))


def bring(log: OracleLog, *ids: int, mode: str = "admit") -> None:
    log.now_ms += 1
    log.ask(Ask({}, ids, "a", mode=mode, detail=True))  # type: ignore[arg-type]


def ids_of(log: OracleLog) -> IdsBucket:
    [bucket] = [each for key, each in log.oracle.buckets.items() if key[0] == "producer_ids_rate"]
    assert isinstance(bucket, IdsBucket)
    return bucket


def wipe(log: OracleLog) -> None:
    log.oracle.buckets.clear()


def clean(found: Findings) -> bool:
    wrong = ("differs", "lost", "unlogged", "charged_again", "falsely_seen", "over", "unjudged")
    return not any(found.total(count) for count in wrong) and not found.cases


@pytest.mark.parametrize("gap_ms", [QUICK, CLOCKS], ids=["quick", "clocks"])
@pytest.mark.parametrize("seed", [1, 2, 3, 5])
def test_decisions_of_the_oracle_are_exact(seed: int, gap_ms: tuple[int, ...]):
    rows = random_rows(gap_ms, seed)
    found = judge(rows)
    wrong = [case for case in found.cases if case["case"] != "falsely_seen"]
    assert not wrong, wrong[:3]
    assert found.total("over") == 0, "refunds and clocks that are set back lead to no excess"
    assert found.total("judged") + found.total("unjudged") == found.total("verdicts") > 2_000
    # a peek before the newest time of its ids is answered from a copy, and not judged
    assert found.total("unjudged") <= (0 if gap_ms is QUICK else found.total("corrections"))
    assert found.total("corrections") == sum(
        verdict["correction"] > 0 for row in rows for verdict in row["verdicts"]
    )
    assert (found.total("corrections") > 50) == (gap_ms is CLOCKS)


def test_small_limit_of_remembered_ids():
    log = logged(1_500, max_ids=60)
    found = judge(log.rows, AuditRules(max_ids=60))
    assert found.total("differs") == found.total("lost") == 0
    reasons = {row["reason"] for row in _ids_verdicts(log)}
    assert "capacity" in reasons


def test_delays_summed_as_in_kip_124():
    log = logged(800, sequential=True)
    assert judge(log.rows, AuditRules(sequential=True)).total("differs") == 0
    assert judge(log.rows, AuditRules(sequential=False)).total("differs") > 0


def test_changed_quota_is_judged_by_the_quota_of_its_time():
    log = logged(300)
    user = Entity.parse("user=*")
    for key, changed in (
        ("producer_byte_rate", {"limit": 5_000}),
        ("producer_ids_rate", {"limit": 7, "shadow": True}),
        ("request_rate", {"enforcement": "deny", "samples": 4, "epoch": 9}),
        ("controller_mutation_rate", {"limit": 10, "burst": 40}),
    ):
        log.quotas[key][user] = replace(log.quotas[key][user], **changed)
    log.run(asks(5, NAMES), 700, QUICK)
    found = judge(log.rows)
    assert not [case for case in found.cases if case["case"] != "falsely_seen"]


@pytest.mark.parametrize("ms", [0, 300, 2_500])
def test_charges_that_were_taken_back_are_followed(ms: int):
    """An ask that another slot refused was charged for a while, and was admitted by nobody."""
    log = logged(200)
    ask = Ask({"requests": 1, "produce_bytes": 500, "mutations": 1}, None, "a", "etl", detail=True)
    for _ in range(40):
        log.now_ms += 1_000
        undo = log.charge_in_vain(replace(ask, mode="record", deny=False))
        log.now_ms += ms
        log.ask(ask)
        undo()
        log.ask(ask)
    assert clean(judge(log.rows))
    without = [row for row in log.rows if row["kind"] not in {"undone", "undo"}]
    assert not clean(judge(without))


def test_replayed_answers_and_fallback_answers_charge_nothing():
    log = logged()
    send(log, 10)
    row = log.rows[-1]
    log.rows.append({**row, "replayed": True, "place": 98})
    log.rows.append({**row, "order": None, "source": "fallback", "failure": "timeout", "place": 99})
    send(log, 10)
    assert clean(judge(log.rows))


def test_wiped_store_is_a_loss():
    log = logged()
    send(log, 20)
    wipe(log)
    send(log, 20)
    tally = judge(log.rows).tallies[BYTES]
    assert (tally["lost"], tally["lost_units"]) == (1, pytest.approx(20_000))
    assert tally["differs"] == tally["unjudged"] == 0, "from then on it is judged by what was left"


def test_failover_that_loses_the_last_charge_is_a_loss():
    log = logged()
    send(log, 20)
    bucket = next(iter(log.oracle.buckets.values()))
    assert isinstance(bucket, RateBucket)
    before = bucket.state
    send(log, 1)
    bucket.state = before
    send(log, 20)
    tally = judge(log.rows).tallies[BYTES]
    assert (tally["lost"], tally["lost_units"]) == (1, pytest.approx(1_000))
    assert tally["differs"] == tally["unjudged"] == 0


def test_judging_resumes_after_unexplained_loss():
    log = logged()
    send(log, 40)
    bucket = next(iter(log.oracle.buckets.values()))
    assert isinstance(bucket, RateBucket)
    bucket.state = bucket.state[:-3]
    send(log, 400)
    tally = judge(log.rows).tallies[BYTES]
    assert tally["lost"] == 1
    assert tally["differs"] == 0
    assert 0 < tally["unjudged"] < 200


def test_reset_is_not_a_loss():
    log = logged()
    send(log, 20)
    bring(log, *range(10))
    wipe(log)
    order = log.order - 1
    bring(log, *range(10))
    send(log, 20)
    assert judge(log.rows).total("lost") > 0
    found = judge(log.rows, AuditRules(resets={("user=a", key): [order] for key in (BYTES[0], IDS[0])}))
    assert clean(found), found.cases


def test_charges_from_before_the_log_are_no_finding():
    log = logged()
    bring(log, *range(20))
    send(log, 205)
    later = log.rows[105:]
    log.rows = []
    bring(log, 3, 4, 100)
    send(log, 300)
    bring(log, 5, 101)
    found = judge([*later, *log.rows], AuditRules(is_whole=False))
    assert not found.cases
    assert found.total("differs") == found.total("lost") == found.total("unlogged") == 0
    tally = found.tallies[BYTES]
    assert tally["unjudged"] < tally["judged"], "after a window the state of the bucket is known"


def by(key: str, **said: Any) -> dict[str, dict[Entity, Quota]]:
    return {key: {Entity.parse("user=*"): Quota(key, enforcement="deny", **said)}}


@pytest.mark.parametrize("is_dropped", [True, False])
def test_ids_dropped_before_their_window_was_widened(*, is_dropped: bool):
    """A key lasts as long as the settings of its last write say, and a minute longer."""

    def limited(window_ms: int) -> dict[str, dict[Entity, Quota]]:
        layers = Layers.named("layered", window_ms)
        return by(IDS[0], limit=40, algorithm="producer_ids", window_ms=window_ms, layers=layers)

    log = OracleLog(Oracle(SECRET), limited(600_000))
    bring(log, *range(10))
    log.now_ms += 865_000 if is_dropped else 800_000
    if is_dropped:
        wipe(log)
    log.quotas = limited(3_600_000)
    bring(log, *range(5, 12))
    bring(log, *range(5, 15))
    assert clean(judge(log.rows))
    assert log.rows[1]["verdicts"][0]["observed"] == (7.0 if is_dropped else 12.0)


@pytest.mark.parametrize("is_dropped", [True, False])
def test_tokens_dropped_before_their_burst_was_raised(*, is_dropped: bool):
    def limited(burst: float) -> dict[str, dict[Entity, Quota]]:
        return by("controller_mutation_rate", limit=1, algorithm="token_bucket", burst=burst)

    log = OracleLog(Oracle(SECRET), limited(1_000))
    log.ask(Ask({"mutations": 10}, None, "a", detail=True))
    log.now_ms += 75_000 if is_dropped else 60_000
    if is_dropped:
        wipe(log)
    log.quotas = limited(5_000)
    for _ in range(3):
        log.ask(Ask({"mutations": 10}, None, "a", detail=True))
    assert clean(judge(log.rows))


def test_debt_ends_by_charge_refusal_or_refund():
    def limited(limit: float) -> dict[str, dict[Entity, Quota]]:
        given = {"algorithm": "token_bucket", "burst": 9.0, "max_debt": limit * 60}
        return by("controller_mutation_rate", limit=limit, **given)

    log = OracleLog(Oracle(SECRET), limited(10))
    history = [(10, "record", 2**53 - 1), (1, "admit", 1), (10, "record", 9_999), (1, "refund", 7)]
    for limit, mode, mutations in [*history, (10, "record", 3), (2, "record", 2), (2, "admit", 1)]:
        log.now_ms += 5_000
        log.quotas = limited(limit)
        log.ask(Ask({"mutations": mutations}, None, "a", mode=mode, detail=True))  # type: ignore[arg-type]
    shown = [row["verdicts"][0]["remaining"] for row in log.rows]
    assert shown[:4] == [-600, -60, -600, -53], "no deeper than the deepest debt"
    assert clean(judge(log.rows))
    endless = copy.deepcopy(log.rows)
    for row in endless:
        row["verdicts"][0]["max_debt"] = None
    assert not clean(judge(endless)), "the log must have the deepest debt"


def test_token_bucket_whose_first_row_is_a_refund():
    log = OracleLog(
        Oracle(SECRET), by("controller_mutation_rate", limit=1, algorithm="token_bucket", burst=20)
    )
    for mode, mutations in (("admit", 12), ("refund", 3), ("admit", 1), ("admit", 1)):
        log.now_ms += 100
        log.ask(Ask({"mutations": mutations}, None, "a", mode=mode, detail=True))  # type: ignore[arg-type]
    assert clean(judge(log.rows[1:], AuditRules(is_whole=False)))
    assert judge(log.rows[1:]).total("unlogged") == 1, "in a complete log, buckets begin empty"


@pytest.mark.parametrize("size", [1_000, 0])
def test_unanswered_call_ahead_of_a_clock_that_is_set_back(size: int):
    log = logged()
    send(log, 2)
    log.now_ms += 20_000
    send(log, 1, size=size)
    log.rows[-1] |= {"order": None, "source": "fallback", "failure": "timeout"}
    log.now_ms -= 20_000
    send(log, 3)
    found = judge(log.rows)
    assert (found.total("lost"), found.total("differs")) == (0, 0)
    assert found.total("unjudged") >= 1


def test_ids_are_judged_again_once_the_bucket_expired():
    log = logged()
    bring(log, 1, 2, 3)
    log.rows = []
    bring(log, 2)
    log.now_ms += 100_000
    bring(log, 2, 7)
    row = copy.deepcopy(log.rows[-1])
    later = AuditRules(is_whole=False)
    assert clean(judge(log.rows, later))
    row["verdicts"][0]["charged_ids"] = row["verdicts"][0]["charged_ids"][:1]
    row["verdicts"][0]["observed"] = 1.0
    assert judge([log.rows[0], row], later).total("falsely_seen") == 1


def test_unlogged_charges_are_counted_and_make_no_verdict_differ():
    log = logged()
    send(log, 20)
    late = log.rows.pop(10)
    bring(log, 1, 2, 3)
    bring(log, 4)
    log.rows.pop(-2)
    bring(log, 1, 5)
    found = judge(log.rows)
    assert late["decision"] == "admit"
    assert found.tallies[BYTES]["unlogged"] == found.tallies[IDS]["unlogged"] == 1
    assert judge(log.rows, AuditRules(is_whole=False)).tallies[IDS]["unlogged"] == 0, (
        "the charge may be older than the log"
    )
    assert found.total("falsely_seen") == 0
    assert found.total("differs") == found.total("lost") == 0


def test_id_charged_again_was_lost():
    log = logged()
    bring(log, 1, 2, 3)
    ids_of(log).state.segments.clear()
    bring(log, 2, 4)
    found = judge(log.rows)
    [case] = found.cases
    assert (case["case"], case["digest"]) == ("charged_again", log.rows[0]["ids"][1])
    assert found.tallies[IDS]["charged_again"] == 1


def test_falsely_seen_id_is_named():
    log = logged()
    bring(log, 1, 2, 3)
    bring(log, 4, 5)
    row = log.rows[-1]
    verdict = row["verdicts"][0]
    verdict |= {"charged_ids": verdict["charged_ids"][1:], "observed": 4.0, "remaining": 36.0}
    found = judge(log.rows)
    [case] = found.cases
    assert (case["case"], case["principal"], case["digest"], case["at_ms"]) == (
        "falsely_seen",
        "a",
        row["ids"][0],
        START_MS + 2,
    )
    assert found.tallies[IDS]["lookups"] == 5


def test_refusal_explained_by_falsely_seen_id():
    log = logged()
    bring(log, 1)
    log.now_ms += 1_000
    bring(log, *range(2, 40))
    bring(log, 100, 101, 102)
    row = log.rows[-1]
    verdict = row["verdicts"][0]
    assert row["decision"] == "throttle"
    assert clean(judge(log.rows))
    verdict["throttle_ms"] -= 1_001  # as if one of the three had been seen, and only one charge had to expire
    found = judge(log.rows)
    assert (found.total("falsely_seen"), found.total("differs")) == (1, 0)
    verdict["throttle_ms"] -= 1
    assert judge(log.rows).total("differs") == 1, "no number of seen ids explains this wait"


def test_more_ids_than_the_limit_are_above_the_bound():
    log = logged()
    bring(log, *range(40))
    log.ask(Ask({}, (100, 101), "a", mode="record", detail=True))
    row = log.rows[-1]
    assert judge(log.rows).tallies[IDS]["over"] == 0, "recorded work does not count"
    row["mode"] = "admit"
    tally = judge(log.rows).tallies[IDS]
    assert (tally["over"], tally["worst"], tally["bound"]) == (1, 42 / 40, 1.0)


@pytest.mark.parametrize("fault", [faults.double, faults.grasping])
def test_each_unlogged_charge_is_counted(fault):
    log = OracleLog(faults.FaultyOracle(SECRET, {"a": fault}))
    log.run(asks(1, ["a"]), 1_000, QUICK)
    found = judge(log.rows)
    for quota in ("producer_byte_rate", "request_rate", "controller_mutation_rate"):
        tally = found.tallies[quota, "user=a", "a"]
        charged = sum(
            verdict["usage"] > 0
            for row in log.rows
            for verdict in row["verdicts"]
            if (verdict["quota"], verdict["bucket"]) == (quota, "user=a")
            and row["mode"] in {"admit", "record"}
            and row["charged"] == (fault is faults.double)
        )
        assert charged / 2 < tally["unlogged"] <= charged, quota
        assert (tally["lost"], tally["differs"]) == (0, 0)
    assert (found.tallies[IDS]["unlogged"] > 10) == (fault is faults.double)
    assert found.total("falsely_seen") == found.total("charged_again") == 0


def test_busy_rate_is_judged_again_after_one_dropped_row():
    log = logged()
    send(log, 1_000, gap_ms=40, size=2_000)
    log.rows.pop(300)
    tally = judge(log.rows).tallies[BYTES]
    assert (tally["unlogged"], tally["lost"], tally["differs"]) == (1, 0, 0)
    assert tally["unjudged"] < 50


def test_dropped_row_that_began_the_window_is_not_a_loss():
    log = logged()
    send(log, 30, gap_ms=500)
    log.now_ms += 30_000
    send(log, 1, size=1)
    send(log, 40, gap_ms=900)
    log.rows.pop(30)
    tally = judge(log.rows).tallies[BYTES]
    assert (tally["unlogged"], tally["lost"], tally["differs"]) == (1, 0, 0)


@pytest.mark.parametrize("gap_ms", [QUICK, (0, 5, 100, 1_000, 3_000)], ids=["quick", "slow"])
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("share", [0.02, 0.4])
def test_rows_cut_from_honest_log_are_no_finding(seed: int, share: float, gap_ms: tuple[int, ...]):
    """Except refunds, which look like losses, and charges of 0, which only move when samples begin."""
    dice = random.Random(seed)
    may, rows = Counter[tuple[str, str]](), []
    for row in random_rows(gap_ms, seed):
        if row["mode"] == "refund" or 0.0 in row["usage"].values() or dice.random() > share:
            rows.append(row)
        else:
            may.update((verdict["quota"], verdict["bucket"]) for verdict in row["verdicts"])
    found = judge(rows)
    for count in ("lost", "differs", "over", "charged_again"):
        assert found.total(count) == 0, [case for case in found.cases if case["case"] != "unlogged"][:3]
    assert not improbable(found.total("falsely_seen"), found.total("lookups"))
    assert found.total("judged") > found.total("unjudged")
    unlogged = Counter[tuple[str, str]]()
    for (quota, bucket, _), tally in found.tallies.items():
        unlogged[quota, bucket] += tally["unlogged"]
    assert unlogged
    assert unlogged <= may, "no charge is counted twice"


@pytest.mark.parametrize("gap_ms", [(0, 5, 100, 1_000, 3_000), CLOCKS], ids=["slow", "clocks"])
def test_log_without_its_beginning(gap_ms: tuple[int, ...]):
    found = judge(random_rows(gap_ms, 2)[500:], AuditRules(is_whole=False))
    for count in ("lost", "differs", "over", "charged_again"):
        assert found.total(count) == 0, count
    assert not improbable(found.total("falsely_seen"), found.total("lookups"))
    assert found.total("judged") > 3 * found.total("unjudged")


def in_use(log: OracleLog, fault: str | None = None) -> None:
    """Ask for the same three ids all the time, and sometimes for a new one."""
    for turn in range(2_000):
        log.now_ms += 99
        ids = [1, 2, 3] if turn % 20 else [1, 2, 3, 1_000 + turn]
        bring(log, *ids)
        if fault == "takes for seen" and turn % 40 == 0:
            verdict = log.rows[-1]["verdicts"][0]
            verdict |= {"charged_ids": verdict["charged_ids"][:-1], "observed": verdict["observed"] - 1}
            ids_of(log).state.charges.pop()
        if fault == "forgets" and turn % 200 == 150:
            ids_of(log).state.segments.clear()


def test_ids_of_busy_bucket_are_judged_once_the_log_covers_the_life_of_a_layer():
    from_ms = START_MS + 100_000
    later = AuditRules(is_whole=False, judge_from_ms=from_ms, log_from_ms=START_MS)
    found = {}
    for fault in (None, "takes for seen", "forgets"):
        log = logged()
        in_use(log)
        log.rows, log.now_ms = [], START_MS
        ids_of(log).move(-198_000 - 2_000)
        in_use(log, fault)
        found[fault] = judge(log.rows, later)
    assert clean(found[None])
    assert found[None].total("lookups") == found["takes for seen"].total("lookups") > 40
    assert found["takes for seen"].total("falsely_seen") > 20
    assert found["forgets"].total("charged_again") >= 4 * 3


def test_bucket_older_than_the_log_may_know_unlogged_ids():
    log = logged()
    bring(log, 1, 2, 3)
    for _ in range(100):
        log.now_ms += 1_000
        bring(log, 1, 2, 3)
    log.rows = []
    bring(log, 50)
    bring(log, 1, 2, 3)
    assert clean(judge(log.rows, AuditRules(is_whole=False)))
    assert judge(log.rows).total("falsely_seen") == 3, "of a log that is said to be whole"


def test_ids_charged_by_a_late_call_are_not_falsely_seen():
    log = logged()
    bring(log, 1, 2)
    bring(log, *range(10, 20))
    log.rows[-1] |= {"order": None, "source": "fallback", "failure": "timeout"}
    log.now_ms += 500
    bring(log, *range(10, 20))
    tally = judge(log.rows).tallies[IDS]
    assert (tally["unlogged"], tally["falsely_seen"], tally["differs"], tally["lost"]) == (1, 0, 0, 0)


def test_late_rows_are_replayed():
    log = logged()
    send(log, 5)
    bring(log, 1, 2)
    log.rows[-1] |= {"kind": "late"}
    log.rows[-2] |= {"kind": "late"}
    send(log, 5)
    bring(log, 1, 2, 3)
    found = judge(log.rows)
    assert clean(found)
    assert found.total("judged") == 12


def test_loaded_charges_are_no_finding():
    log = logged()
    bring(log, 1, 2)
    send(log, 20)
    order = log.order - 1
    logged_rows = len(log.rows)
    bring(log, *range(10, 20))
    send(log, 5)
    del log.rows[logged_rows:]
    bring(log, *range(10, 20), 30)
    send(log, 400)
    loads = {("user=a", key): [order] for key in (BYTES[0], IDS[0])}
    found = judge(log.rows, AuditRules(loads=loads))
    wrong = ("differs", "lost", "unlogged", "falsely_seen", "over")
    assert [found.total(count) for count in wrong] == [0] * len(wrong), found.cases
    assert found.tallies[BYTES]["unjudged"] < 200
    assert judge(log.rows).total("unlogged") == 2, "without the loads"


def test_refunded_amount_may_be_admitted_again():
    log = logged()
    for _ in range(6):
        for mode in ("admit", "refund"):
            log.now_ms += 1
            log.ask(Ask({"mutations": 20}, None, "a", mode=mode, detail=True))
    [tally] = judge(log.rows).tallies.values()
    assert (tally["over"], tally["worst"]) == (0, 1.0)


def test_failover_leads_only_to_losses():
    log = logged()
    bring(log, *range(40))
    wipe(log)
    bring(log, *range(100, 140))
    bring(log, 7)
    tally = judge(log.rows).tallies[IDS]
    assert log.rows[-1]["decision"] == "throttle"
    assert (tally["lost"], tally["lost_units"], tally["differs"], tally["over"]) == (2, 41, 0, 0)


def _ids_verdicts(log: OracleLog):
    return [
        verdict for row in log.rows for verdict in row["verdicts"] if verdict["quota"] == "producer_ids_rate"
    ]


# Answers of a node from known ids


def know(log: OracleLog, *ids: int, after_ms: int = 1, **changed: Any) -> None:
    """A node answers alone: its row has no place in the order, and its verdict shows no counter."""
    log.now_ms += after_ms
    bring(log, *ids, mode="peek")  # to have a row of these ids
    row = log.rows.pop()
    (verdict,) = row["verdicts"]
    verdict |= {"outcome": "admit", "throttle_ms": 0, "reason": None, "observed": None, "remaining": None}
    verdict |= {"charged_ids": None, "refreshed_ids": None} | changed
    alone = {"mode": "admit", "source": "local", "order": None, "charged": True, "limited_by": None}
    log.rows.append(row | alone | {"decision": verdict["outcome"], "throttle_ms": verdict["throttle_ms"]})


def renewal(log: OracleLog, *ids: int) -> None:
    """A node writes ids again; the oracle does it as the store would."""
    bring(log, *ids, mode="record")
    row = log.rows[-1]
    (verdict,) = row["verdicts"]
    verdict |= {"observed": None, "remaining": None, "refreshed_ids": row["ids"], "charged_ids": []}
    row |= {"kind": "renewal", "mode": "admit"}


def ordered(log: OracleLog) -> OracleLog:
    """Give the rows of the store orders of their times, as the store does."""
    for place, row in enumerate(log.rows):
        if row["order"] is not None:
            row["order"] = row["at_ms"] * ORDERS_PER_MS + place
    return log


def test_known_ids_are_judged_by_what_was_written_last():
    log = logged()
    bring(log, 1, 2)
    for _ in range(8):
        know(log, 1, after_ms=15_000)
        renewal(log, 1)
    found = judge(ordered(log).rows)
    assert clean(found), found.cases
    assert found.total("judged") == 1 + 8 + 8


def test_renewal_of_ids_that_are_not_known_is_found():
    log = logged()
    bring(log, 1)
    renewal(log, 2)
    found = judge(ordered(log).rows)
    assert (found.total("differs"), found.total("judged")) == (1, 2)
    log = logged()
    bring(log, 1)
    log.now_ms += 82_000
    renewal(log, 1)
    assert judge(ordered(log).rows).total("differs") == 1, "its layer died two seconds before"


def test_renewal_within_a_second_of_the_end_of_its_layer_is_not_judged():
    log = logged()
    bring(log, 1)
    log.now_ms += 80_500
    renewal(log, 1)
    found = judge(ordered(log).rows)
    assert (found.total("differs"), found.total("unjudged")) == (0, 1)


def test_id_that_is_known_after_its_layer_died_is_found():
    log = logged()
    bring(log, 1)
    know(log, 1, after_ms=79_000)
    assert clean(judge(ordered(log).rows))
    bring(log, 2)
    know(log, 1, after_ms=3_000)
    assert judge(ordered(log).rows).total("differs") == 1


def test_id_that_nobody_brought_is_found():
    log = logged()
    bring(log, 1)
    know(log, 2, after_ms=5_000)
    assert judge(ordered(log).rows).total("differs") == 1


def test_refusal_that_is_repeated_is_judged_at_its_time():
    log = logged()
    for first in range(0, 40, 20):
        bring(log, *range(first, first + 20))
    bring(log, 100)
    wait = log.rows[-1]["throttle_ms"]
    assert wait > 0
    know(log, 100, after_ms=499, outcome="throttle", throttle_ms=wait - 500)
    assert clean(judge(ordered(log).rows))
    log.now_ms += 2_000
    know(log, 100, after_ms=499, outcome="throttle", throttle_ms=wait - 500)
    assert judge(ordered(log).rows).total("differs") == 1


def test_answers_of_a_node_that_did_not_notice_a_reset_yet_are_not_judged():
    log = logged()
    bring(log, 1)
    bring(log, 2)
    know(log, 1)
    rows = ordered(log).rows
    rules = AuditRules(resets={("user=a", "producer_ids_rate"): [rows[1]["order"]]})
    found = judge(rows, rules)
    assert (found.total("differs"), found.total("unjudged")) == (0, 1)


def test_verdict_given_alone_next_to_a_rate_does_not_change_what_is_known_of_the_bucket():
    log = logged()
    bring(log, 1, 2)
    log.now_ms += 25_000
    log.ask(Ask({"requests": 1}, (1,), "a", detail=True))
    ids = next(each for each in log.rows[-1]["verdicts"] if each["quota"] == "producer_ids_rate")
    ids |= {"observed": None, "remaining": None, "charged_ids": [], "refreshed_ids": []}
    log.oracle.buckets.clear()
    renewal(log, 1)
    assert not judge(ordered(log).rows).cases
