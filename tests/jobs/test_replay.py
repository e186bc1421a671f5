"""Logs reproduce themselves; other quotas give what the oracle gives; every difference has its cause."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from app.domain.ask import Ask
from app.domain.entity import Entity
from app.domain.exact_ids import ExactIds
from app.domain.ladder import MatchingRules
from app.domain.oracle import IdsBucket, Oracle
from app.domain.quota import Defaults, Quota
from tests.generate.test_write_log import ask_of
from tests.jobs.logs import SECRET, START_MS, OracleLog, Row, asks
from tests.jobs.logs import quotas as all_quotas
from tests.jobs.tampering import Traffic as RareTraffic
from workers.decision_log.read import read
from workers.decision_log.schema import SCHEMA
from workers.generate.quotas import DEFINITIONS
from workers.generate.traffic import Traffic
from workers.generate.write_log import Order, write_log
from workers.jobs.whatif.quotas import resolved
from workers.jobs.whatif.reproduction import PartialLogError, Reproduction
from workers.jobs.whatif.simulation import Assumptions
from workers.jobs.whatif.slices import RowSlice, encoded
from workers.jobs.whatif.what_if import WhatIf, what_if

WHOLE = Assumptions(is_whole=True)


class ExactOracle(Oracle):
    """The oracle with exact sets of ids, as replays have them."""

    def _absent(self, quota: Quota) -> Any:
        if quota.algorithm == "producer_ids":
            return IdsBucket(self.max_ids, ExactIds())
        return super()._absent(quota)


class Fresh(RareTraffic):
    """Traffic whose order follows from the time, decided by exact sets."""

    def __init__(self) -> None:
        super().__init__(ExactOracle(SECRET))
        self.now_ms = START_MS


def logged(seed: int, count: int = 400, gaps: tuple[int, ...] = (0, 5, 40, 120, 900)) -> Fresh:
    made = Fresh()
    made.run(asks(seed, ["a", "b", "c"]), count, gaps, seed)
    return made


def _denied(row: Row) -> Row | None:
    """A decision as ``QUOTAGATE_LOG=denied`` leaves it: refusals, and the ids that others charged."""
    if row["decision"] != "admit" or any(verdict["outcome"] != "admit" for verdict in row["verdicts"]):
        return row
    ids = [verdict for verdict in row["verdicts"] if verdict["charged_ids"]]
    return row | {"kind": "ids", "decision": None, "verdicts": ids} if ids else None


def table(rows: list[Row]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def replayed(rows: list[Row], quotas: Any = None, how: Assumptions = WHOLE) -> WhatIf:
    return what_if(encoded([table(rows)]), all_quotas() if quotas is None else quotas, how)


def halved(quotas: Any) -> Any:
    return {
        key: {
            entity: replace(quota, limit=quota.limit / 2, burst=quota.burst / 2)
            for entity, quota in by_entity.items()
        }
        for key, by_entity in quotas.items()
    }


@pytest.fixture(scope="module", params=[1, 2, 3])
def generated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Traffic, Path]:
    traffic = Traffic(seed=request.param, events=4_000, rate=5.0, principals=50)
    folder = tmp_path_factory.mktemp("generated")
    start_ms = 1_772_323_200_000 - 300_000  # before the end of an hour
    write_log(Order(traffic, start_ms, SECRET, programs=1), folder / "log", folder / "truth")
    return traffic, folder / "log"


def hours(log: Path) -> Iterator[RowSlice]:
    rows = read(log)
    at_hour = pa.compute.divide(rows["at_ms"], 3_600_000)
    for hour in sorted(set(at_hour.to_pylist())):
        yield from encoded([rows.filter(pa.compute.equal(at_hour, hour))])


def test_a_generated_log_reproduces_itself(generated: tuple[Traffic, Path]) -> None:
    traffic, log = generated
    found = what_if(hours(log), resolved(DEFINITIONS, Defaults()), WHOLE)
    assert found.reproduction.reproduced == found.reproduction.decisions == traffic.events
    assert not found.reproduction.causes
    assert found.overall.before == found.overall.after
    assert (found.overall.newly_refused, found.overall.newly_admitted) == (0, 0)
    assert found.overall.after.refused > 0, "the log must have something to reproduce"


def test_half_the_limits_give_what_the_oracle_gives(generated: tuple[Traffic, Path]) -> None:
    traffic, log = generated
    definitions = copy.deepcopy(DEFINITIONS)
    for by_key in definitions.values():
        for definition in by_key.values():
            definition["limit"] //= 2
    quotas = resolved(definitions, Defaults())
    oracle, start_ms = ExactOracle(SECRET), 1_772_323_200_000 - 300_000
    decisions: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    for event in traffic.stream():
        decided = oracle.decide(ask_of(event), quotas, MatchingRules(), start_ms + event.at_ms)
        decisions[decided.decision] += 1
        waits[event.principal or ""] += decided.throttle_ms
    found = what_if(hours(log), quotas, WHOLE)
    assert found.overall.after.decisions == decisions
    assert {name: each.after.wait_ms for name, each in found.principals.items()} == waits
    assert found.overall.newly_refused > 0


@pytest.mark.parametrize("seed", range(5))
def test_every_key_and_mode_reproduces_itself(seed: int) -> None:
    made = logged(seed)
    found = replayed(made.rows)
    assert not found.reproduction.causes, found.reproduction.examples
    assert found.reproduction.reproduced == len(made.rows)
    assert found.overall.before.decisions == found.overall.after.decisions
    assert found.overall.before.wait_ms == found.overall.after.wait_ms


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sequential", [False, True])
def test_half_of_every_limit(seed: int, sequential: bool) -> None:
    made = logged(seed)
    oracle, source = ExactOracle(SECRET, sequential=sequential), asks(seed, ["a", "b", "c"])
    quotas = halved(all_quotas())
    decisions: Counter[str] = Counter()
    wait_ms = 0
    for row in made.rows:
        ask = next(source)
        if ask.principal is None:
            ask = replace(ask, producer_ids=None)
        decided = oracle.decide(ask, quotas, MatchingRules(), row["at_ms"])
        decisions[decided.decision] += 1
        wait_ms += decided.throttle_ms
    found = replayed(made.rows, quotas, replace(WHOLE, sequential=sequential))
    assert found.overall.after.decisions == decisions
    assert found.overall.after.wait_ms == wait_ms


def test_a_log_that_was_decided_in_sequence() -> None:
    made = Fresh()
    made.oracle.sequential = True
    made.run(asks(3, ["a", "b"]), 400, (0, 5, 40), 3)
    assert not replayed(made.rows, how=replace(WHOLE, sequential=True)).reproduction.causes
    assert replayed(made.rows).reproduction.other > 0


def test_a_clock_that_is_set_back() -> None:
    made = logged(5, 200)
    made.run(asks(6, ["a", "b", "c"]), 100, (0, 40, -30), 6)
    first = made.now_ms
    made.now_ms -= 200_000
    made.run(asks(7, ["a", "b", "c"]), 200, (0, 40, 120), 7)
    for place, row in enumerate(made.rows):  # by the store's order, not by time
        row["order"] = row["order"] and (first + place) * 128_000
    found = replayed([row for row in made.rows if row["order"]])
    assert found.reproduction.causes.keys() <= {"clock"}, found.reproduction


class TestCauses:
    """Each difference is counted under its cause."""

    def test_a_false_positive(self) -> None:
        made = Fresh()
        for number in range(5):
            made.now_ms += 10
            made.ask(Ask({}, (number,), "a", detail=True))
        for row in made.rows[2:]:  # the filter takes one new id as seen, and so charges one less
            said = row["verdicts"][0]
            said["observed"] -= 1
            said["remaining"] += 1
        made.rows[2]["verdicts"][0]["charged_ids"] = []
        assert replayed(made.rows).reproduction.causes == {"false_positive": 1}

    def test_more_false_positives_than_chance_explains(self) -> None:
        made = Fresh()
        for number in range(5):
            made.now_ms += 10
            made.ask(Ask({}, tuple(range(10 * number, 10 * number + 5)), "a", detail=True))
        for row in made.rows[2:]:
            said = row["verdicts"][0]
            said["observed"] -= 3
            said["remaining"] += 3
        del made.rows[2]["verdicts"][0]["charged_ids"][2:]
        found = replayed(made.rows).reproduction
        assert (found.falsely_seen, found.new_ids, found.is_implausible) == (3, 25, True)
        assert (found.causes["false_positive"], found.other) == (0, 1)

    def test_answers_without_the_store(self) -> None:
        made = logged(1, 50)
        burst = [Ask({"requests": 40}, None, "a", detail=True) for _ in range(3)]
        for ask in burst:
            made.ask(ask)
        made.fall_back(burst[0], is_late=True)
        made.fall_back(burst[0], is_late=False)  # charged, and without a row
        made.ask(burst[0])
        found = replayed(made.rows).reproduction
        assert found.causes == {"fallback": 2, "late": 1}, found
        assert replayed(made.rows).overall.kept == 2

    def test_a_late_answer_tells_of_its_own_charge_alone(self) -> None:
        made = Fresh()
        ask = Ask({"requests": 3, "mutations": 3}, None, "a", detail=True)
        made.fall_back(ask, is_late=False)
        made.fall_back(ask, is_late=True)
        made.ask(ask)
        found = replayed(made.rows).reproduction
        assert found.causes == {"late": 1}, found

    def test_a_late_refund(self) -> None:
        made = logged(1, 50)
        made.fall_back(Ask({"requests": 2}, None, "a", mode="refund", detail=True), is_late=True)
        made.ask(Ask({"requests": 1}, None, "a", detail=True))
        assert not replayed(made.rows).reproduction.causes

    @pytest.mark.parametrize("mode", ["admit", "record", "refund"])
    @pytest.mark.parametrize("seed", range(3))
    def test_an_answer_that_was_lost(self, seed: int, mode: Any) -> None:
        """The row without the store comes after rows that show its charge."""
        made = logged(seed, 50)
        lost = _lost(made, Ask({"requests": 2, "mutations": 2}, None, "a", mode=mode, detail=True))
        made.run(asks(seed + 9, ["a"]), 5, (0, 1), seed)
        made.rows.append(lost | {"at_ms": lost["at_ms"] + 500})
        made.run(asks(seed, ["a", "b"]), 100, (0, 40, 900), seed)
        found = replayed(made.rows).reproduction
        assert found.causes["late"] > 0
        assert found.causes.keys() <= {"fallback", "late"}, found

    def test_ids_of_a_lost_answer(self) -> None:
        made = Fresh()
        for ids in ((1,), (2, 3)):
            made.now_ms += 10
            made.ask(Ask({}, ids, "a", detail=True))
        lost = _lost(made, Ask({}, (4, 5), "a", detail=True))
        for ids in ((4,), (6,)):
            made.now_ms += 10
            made.ask(Ask({}, ids, "a", detail=True))
        made.rows.append(lost | {"at_ms": lost["at_ms"] + 500})
        found = replayed(made.rows).reproduction
        assert (found.causes, found.reproduced) == ({"late": 1}, 4), found

    @pytest.mark.parametrize("hung_ms", [500, 30_000])
    def test_a_call_that_a_hung_store_carries_out_late(self, hung_ms: int) -> None:
        """Nothing asks for the bucket meanwhile, so only its next answer shows the charge."""
        made = Fresh()
        ask = Ask({"requests": 2, "mutations": 2}, None, "a", detail=True)
        made.ask(ask)
        at_ms = made.now_ms
        made.now_ms += hung_ms
        lost = _lost(made, ask)
        for step in (5, 40):
            made.now_ms += step
            made.ask(ask)
        found = replayed([*made.rows, lost | {"at_ms": at_ms + 60}]).reproduction
        assert (found.causes, found.reproduced) == ({"late": 1}, 3), found

    def test_a_peek_that_the_store_did_not_number(self) -> None:
        made = Fresh()
        made.ask(Ask({"requests": 30}, None, "a", mode="peek", detail=True), order=None)
        made.ask(Ask({"requests": 40}, None, "a", detail=True))
        assert [row["decision"] for row in made.rows] == ["admit", "admit"]
        found = replayed(made.rows).reproduction
        assert (found.causes, found.reproduced) == ({"unordered": 1}, 1)

    def test_a_kept_answer(self) -> None:
        made = Fresh()
        made.ask(Ask({"requests": 400}, None, "a", detail=True))
        made.replay("a")
        assert made.rows[-1]["decision"] == "delay"
        assert replayed(made.rows).reproduction.causes == {"replayed": 1}

    def test_a_factor_of_0(self) -> None:
        made = logged(2, 50)
        made.hold(Ask({"produce_bytes": 10}, None, "b", detail=True))
        assert replayed(made.rows).reproduction.causes == {"factor_changed": 1}

    def test_a_factor_that_scales(self) -> None:
        made = logged(2, 50)
        quota = all_quotas()["producer_byte_rate"][Entity.parse("user=*")]
        made.add(kind="factor", change={"what": "throttle_factor", "before": "1.0", "after": "0.5"})
        made.quotas["producer_byte_rate"][Entity.parse("user=*")] = replace(quota, limit=10_000)
        made.run(asks(9, ["a", "b"]), 200, (0, 40), 9)
        found = replayed(made.rows)
        assert not found.reproduction.causes
        assert found.overall.before.wait_ms == found.overall.after.wait_ms, (
            "the factor scales other quotas too"
        )

    def test_a_reset(self) -> None:
        made = logged(3, 200)
        made.reset("user=a")
        made.run(asks(4, ["a", "b"]), 200, (0, 40), 4)
        found = replayed(made.rows)
        assert not found.reproduction.causes, found.reproduction
        assert found.overall.before.decisions == found.overall.after.decisions

    def test_a_load(self) -> None:
        made = Fresh()
        loaded = '{"quotas": ["controller_mutation_rate", "request_rate"]}'
        for usage in ("mutations", "requests"):
            made.ask(Ask({usage: 3}, None, "a", detail=True))
        made.add(kind="load", order=made.order, change={"what": "user=a", "after": loaded})
        made.order += 128
        hidden = len(made.rows)
        for usage in ("mutations", "requests"):
            made.ask(Ask({usage: 10}, None, "a", detail=True))
        del made.rows[hidden:]  # what the load brought in
        for _ in range(5):
            made.now_ms += 700
            for usage in ("mutations", "requests"):
                made.ask(Ask({usage: 2}, None, "a", detail=True))
        found = replayed(made.rows).reproduction
        assert found.causes.keys() == {"load"}, found
        assert found.reproduced > 0

    def test_quotas_that_changed(self) -> None:
        made = logged(4, 200)
        made.limit("request_rate", Entity.parse("user=*"), 9)
        made.rows += made.changes
        made.run(asks(5, ["a", "b"]), 200, (0, 40), 5)
        assert not replayed(made.rows).reproduction.causes, "the verdicts name their own quotas"

    def test_charges_that_were_undone(self) -> None:
        made = logged(6, 100)
        undo = made.charge_in_vain(Ask({"mutations": 3}, None, "a", detail=True))
        made.now_ms += 100
        made.ask(Ask({"mutations": 1}, None, "a", detail=True))
        undo()
        made.run(asks(7, ["a", "b"]), 100, (0, 40), 7)
        assert replayed(made.rows).reproduction.causes.keys() <= {"slots"}

    @pytest.mark.parametrize("seed", range(5))
    def test_a_log_that_begins_in_the_middle(self, seed: int) -> None:
        made = logged(seed, 800, (0, 40, 400, 1_500))
        rest = made.rows[300:]
        found = replayed(rest, how=Assumptions()).reproduction
        assert found.causes.keys() == {"older"}, found
        assert found.reproduced > 100, found
        assert replayed(rest).reproduction.other > 0, "a whole log has no such excuse"

    @pytest.mark.parametrize("said", [None, "", "x", "[]", "nan", '{"quotas": 1}'])
    def test_changes_without_meaning(self, said: str | None) -> None:
        made = logged(1, 20)
        for kind in ("factor", "reset", "load", "quota"):
            made.add(kind=kind, change={"what": "user=a", "before": said, "after": said})
        made.run(asks(2, ["b"]), 20, (5,), 2)
        assert not replayed(made.rows).reproduction.other

    def test_a_log_of_refusals_alone(self) -> None:
        made = logged(1, 50)
        row = next(row for row in made.rows if row["ids"] and row["verdicts"][0]["charged_ids"])
        with pytest.raises(PartialLogError):
            replayed([*made.rows, row | {"kind": "ids", "order": made.order}])

    @pytest.mark.parametrize("has_ids", [True, False])
    @pytest.mark.parametrize("seed", range(3))
    def test_a_lead_in_of_refusals_alone(self, seed: int, has_ids: bool) -> None:
        """The nodes logged refusals alone at first, and then everything."""
        made, asked = Fresh(), asks(seed, ["a", "b", "c"])
        if not has_ids:
            asked = (replace(ask, producer_ids=None) for ask in asked)
        made.run(asked, 800, (0, 40, 400, 1_500), seed)
        from_ms = made.rows[300]["at_ms"] + 1
        rows = [row for row in map(_denied, made.rows[:300]) if row] + made.rows[300:]
        found = replayed(rows, how=Assumptions(from_ms=from_ms)).reproduction
        assert found.decisions == sum(row["at_ms"] >= from_ms for row in rows)
        assert found.causes.keys() == {"older"}, found
        assert found.reproduced > 100, found


def _lost(made: Fresh, ask: Ask) -> Row:
    """Charge an ask whose answer is lost; return its row without the store."""
    made.fall_back(ask, is_late=False)
    return made.rows.pop()


class TestOutageIsNoExcuse:
    """Near a row without the store, the differences that its ask cannot make are counted as other."""

    ASK = Ask({"requests": 2, "mutations": 2}, None, "a", detail=True)

    def _found(self, lost: Any, change: Any = None, after_ms: int = 500) -> Reproduction:
        """The replay of a lost charge, and of a row without the store some time later.

        Args:
            lost: the fields of the ask that differ in its row without the store.
            change: of the row in between, which shows the charge.
        """
        made = logged(1, 50)
        made.now_ms += 20_000
        made.ask(self.ASK)
        row = _lost(made, self.ASK)
        made.now_ms += 10
        made.ask(self.ASK)
        if change:
            change(made.rows[-1])
        verdicts = [said | {"usage": lost.get("usage", said["usage"])} for said in row["verdicts"]]
        row |= {"mode": lost.get("mode", "admit"), "verdicts": verdicts}
        return replayed([*made.rows, row | {"at_ms": row["at_ms"] + after_ms}]).reproduction

    def test_its_own_charge_is_late(self) -> None:
        assert self._found({}).causes == {"late": 1}

    def test_a_charge_of_more_than_its_usage(self) -> None:
        assert self._found({"usage": 1.0}).other == 1

    @pytest.mark.parametrize("mode", ["peek", "refund"])
    def test_a_charge_of_an_ask_that_charges_nothing(self, mode: str) -> None:
        assert self._found({"mode": mode}).other == 1

    def test_a_charge_long_before_it(self) -> None:
        assert self._found({}, after_ms=2_900).other == 0
        assert self._found({}, after_ms=3_100).other == 1

    def test_charges_that_are_missing(self) -> None:
        def less(row: Row) -> None:
            for said in row["verdicts"]:
                if said["algorithm"] == "token_bucket":
                    said["remaining"] += 8
                elif said["observed"] is not None:
                    units = said["limit"] * 10 - said["remaining"]
                    said["observed"] *= (units - 4) / units
                    said["remaining"] += 4

        assert self._found({}, less).other == 1

    def test_another_decision(self) -> None:
        assert self._found({}, lambda row: row.update(decision="throttle", throttle_ms=7)).other == 1

    def test_a_milder_verdict(self) -> None:
        made = logged(1, 50)
        burst = Ask({"requests": 300}, None, "a", detail=True)
        made.ask(burst)
        before = copy.deepcopy(made.oracle)
        lost = _lost(made, burst)
        made.oracle = before  # the store never got it
        made.ask(burst)
        row = made.rows[-1]
        assert row["decision"] == "delay"
        row["throttle_ms"] = 1
        for said in row["verdicts"]:
            said["throttle_ms"] = min(said["throttle_ms"], 1)
        assert replayed([*made.rows, lost]).reproduction.other == 1


class TestTampering:
    """A row that was changed is counted as other, once; the rest of the log reproduces itself."""

    def _found(self, change: Any, wanted: Any) -> WhatIf:
        rows = copy.deepcopy(logged(8, 400, (5, 40, 120)).rows)
        row = next(row for row in rows[100:] if row["mode"] == "admit" and row["verdicts"] and wanted(row))
        change(row)
        return replayed(rows)

    def test_a_decision(self) -> None:
        found = self._found(
            lambda row: row.update(decision="admit", throttle_ms=0), lambda row: row["decision"] == "throttle"
        )
        assert found.reproduction.other > 0
        assert found.reproduction.examples

    def test_a_wait(self) -> None:
        def longer(row: Row) -> None:
            row["throttle_ms"] += 1

        found = self._found(longer, lambda row: row["decision"] == "delay")
        assert found.reproduction.causes == {"other": 1}

    def test_a_wait_in_the_verdicts_too(self) -> None:
        def longer(row: Row) -> None:
            row["throttle_ms"] += 1
            for said in row["verdicts"]:
                said["throttle_ms"] += said["outcome"] == "delay"

        found = self._found(longer, lambda row: row["decision"] == "delay")
        assert found.reproduction.causes == {"other": 1}

    def test_a_usage(self) -> None:
        def more(row: Row) -> None:
            row["usage"] = (
                {name: amount + 5 for name, amount in row["usage"]}
                if isinstance(row["usage"], list)
                else {name: amount + 5 for name, amount in row["usage"].items()}
            )
            for said in row["verdicts"]:
                said["usage"] += 5

        found = self._found(more, lambda row: row["charged"] and row["usage"].get("requests"))
        assert found.reproduction.other > 0
        assert found.reproduction.reproduced > 300, "one row does not smear over the rest"


@pytest.mark.parametrize("seed", range(5))
def test_callers_times_do_not_order_rows(seed: int) -> None:
    """Peeks, and asks without a quota, have no order; the others count from 128."""
    few = {
        key: {Entity.parse("user=a"): quota for entity, quota in by_entity.items() if str(entity) == "user=*"}
        for key, by_entity in all_quotas().items()
    }
    made, oracle = OracleLog(ExactOracle(SECRET), few, now_ms=1_000_000), ExactOracle(SECRET)
    decisions: Counter[str] = Counter()
    wait_ms, dice = 0, Random(seed)
    for ask in islice(asks(seed, ["a", "b", "c"]), 300):
        made.now_ms += dice.choice((-30, 0, 0, 5, 40, 900))
        made.ask(ask, **({"order": None} if ask.mode == "peek" else {}))
        asked = ask if ask.principal else replace(ask, producer_ids=None)
        decided = oracle.decide(asked, all_quotas(), MatchingRules(), made.now_ms)
        decisions[decided.decision] += 1
        wait_ms += decided.throttle_ms
    assert sum(row["order"] is None for row in made.rows) > 100
    found = what_if(encoded([table(made.rows)], by_store=False), all_quotas(), WHOLE)
    assert found.reproduction.reproduced == found.reproduction.decisions == 300, found.reproduction
    assert (found.overall.after.decisions, found.overall.after.wait_ms) == (decisions, wait_ms)
    mixed = what_if(encoded([table(made.rows)], by_store=True), all_quotas(), WHOLE)
    assert mixed.overall.after.wait_ms != wait_ms, "the order must matter"


class TestScenarios:
    """The reactions of callers."""

    def test_a_refused_ask_comes_again_after_its_wait(self) -> None:
        made, wide = Fresh(), all_quotas()
        for _ in range(3):
            made.now_ms += 10
            made.ask(Ask({"mutations": 8}, None, "a", detail=True))
        assert made.rows[-1]["decision"] == "throttle"
        made.rows = made.rows[:2]
        user = Entity.parse("user=*")
        tight = wide | {
            "controller_mutation_rate": {
                user: replace(wide["controller_mutation_rate"][user], limit=1.0, burst=10.0)
            }
        }
        as_logged = replayed(made.rows, tight).overall
        assert (as_logged.newly_refused, as_logged.after.retries) == (1, 0)
        again = replayed(made.rows, tight, replace(WHOLE, scenario="retry-after-wait")).overall
        assert (again.newly_refused, again.after.retries) == (0, 1)
        assert again.after.wait_ms == as_logged.after.wait_ms > 0
        queued = replayed(made.rows, tight, replace(WHOLE, scenario="stop-while-waiting")).overall
        assert (queued.newly_refused, queued.after.retries) == (0, 1)
        hasty = replace(WHOLE, scenario="stop-while-waiting", patience_ms=100)
        gone = replayed(made.rows, tight, hasty).overall
        assert (gone.newly_refused, gone.after.gave_up) == (1, 1)

    @pytest.mark.parametrize("scenario", ["retry-after-wait", "stop-while-waiting"])
    def test_each_ask_is_answered_once(self, scenario: Any) -> None:
        made = logged(2, 400, (0, 5, 40))
        found = replayed(made.rows, halved(all_quotas()), replace(WHOLE, scenario=scenario))
        assert found.overall.after.decisions.total() == len(made.rows)
        assert found.overall.after.retries > 0

    def test_waiting_callers_send_no_more_than_their_rate(self) -> None:
        made = Fresh()
        for _ in range(200):
            made.now_ms += 100
            made.ask(Ask({"requests": 1}, None, "a", detail=True))
        how = replace(WHOLE, scenario="stop-while-waiting", patience_ms=10_000)
        found = replayed(made.rows, how=how).overall
        assert found.before.wait_ms > found.after.wait_ms or found.after.gave_up > 0


def test_rows_of_a_lead_in_are_not_counted() -> None:
    made = logged(1, 300)
    middle = made.rows[150]["at_ms"]
    found = replayed(made.rows, how=replace(WHOLE, from_ms=middle))
    counted = sum(row["at_ms"] >= middle for row in made.rows)
    assert found.reproduction.decisions == found.overall.before.decisions.total() == counted
    assert found.overall.before.decisions == found.overall.after.decisions
