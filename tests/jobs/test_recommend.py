"""`quotagate recommend` on logs with planted abusers, and on logs that are made to mislead it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import quota_file
from app.domain.ask import Ask
from app.domain.entity import Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import Defaults
from app.node import reports
from tests.generate.test_write_log import ask_of
from tests.jobs.abuse import AbusedTraffic, drawn, is_abuser
from tests.jobs.commands import Ran, run_job
from tests.jobs.logs import SECRET, asks
from tests.jobs.test_replay import ExactOracle, Fresh
from workers.generate.traffic import Event
from workers.generate.write_log import Order, write_log
from workers.jobs import folder as output
from workers.jobs.whatif.quotas import resolved

BEGIN_MS = 1_772_323_200_000 - 40_000  # the traffic goes on in the next hour

REFUSED = 0.25
"""The least share of the asks of each abuser that is refused."""

TRAFFIC = AbusedTraffic(seed=71, events=4_000, rate=40, principals=60, zipf=1.1)


class Recommended(Ran):
    """A run of the command."""

    @property
    def text(self) -> str:
        return (self.folder / "quotas.yaml").read_text()

    @property
    def quotas(self) -> dict[str, Any]:
        """The quotas of the file, which has no faults."""
        contents = quota_file.read(self.text)
        assert contents.faults == []
        return dict(contents.quotas)

    @property
    def outliers(self) -> set[str]:
        """The names of the outliers."""
        return {str(Entity.parse(row["entity"]).parts[0][1]) for row in self.rows("outliers")}


class Command:
    """Runs the command in this process."""

    def __init__(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder = tmp_path
        self._capsys = capsys

    def __call__(self, log: Path, *more: str) -> Recommended:
        words = ("--log", str(log), *more)
        return Recommended(*run_job("recommend", self._folder / "recommended", *words, capsys=self._capsys))


@pytest.fixture
def recommend(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setattr(output, "SETTLED_S", 0.0)
    return Command(tmp_path, capsys)


def write(traffic: AbusedTraffic, folder: Path) -> Path:
    write_log(Order(traffic, BEGIN_MS, SECRET, programs=1), folder / "log", folder / "truth")
    return folder / "log"


def name_of(event: Event) -> str | None:
    return event.principal or event.ip


@pytest.mark.parametrize("seed", range(4))
def test_abusers_are_refused_and_hardly_anybody_else(seed: int, recommend: Command, tmp_path: Path):
    """In traffic of any shape; `make prove` tries many more."""
    traffic = drawn(seed)
    ran = recommend(write(traffic, tmp_path))
    refused = check_bounds(traffic, ran)
    assert ran.summary == {
        "entities": len(ran.quotas),
        "outliers": len(ran.outliers),
        "refused_asks": refused,
    }
    for name in ran.outliers:
        assert f"={name}:" in ran.text.partition("\nquotas:")[0], "the file names outliers in its head"
        assert f"={name}:" not in ran.text.partition("\nquotas:")[2], "and gives them no limit"
        assert f"={name}: " in ran.out


def check_bounds(traffic: AbusedTraffic, ran: Recommended) -> int:
    """The bounds that recommended limits keep, by the rules of the domain; returns the number of refusals."""
    assert (ran.code, ran.complaints) == (0, [])
    oracle, quotas = ExactOracle(SECRET), resolved(ran.quotas, Defaults())
    held, total, refused = Counter[str | None](), Counter[str | None](), Counter[str | None]()
    for event in traffic.stream():
        decided = oracle.decide(ask_of(event), quotas, MatchingRules(), BEGIN_MS + event.at_ms)
        name = name_of(event)
        total[name] += 1
        held[name] += decided.decision != "admit"
        refused[name] += decided.decision in {"throttle", "reject"}
    abusers = {name for name in total if is_abuser(name)}
    others = total.keys() - abusers
    assert len(abusers) == 3 * traffic.abusers
    for name in abusers:
        assert refused[name] > REFUSED * total[name], name
    assert sum(held[name] for name in others) <= 0.001 * sum(total[name] for name in others)
    for row in ran.rows("limits"):
        assert 1.0 <= row["limit"] / row["need"] <= 1.5, row
    return refused.total()


def test_limits_rest_on_needs(recommend: Command, tmp_path: Path):
    ran = recommend(write(TRAFFIC, tmp_path), "--headroom", "0.3")
    rows = ran.rows("limits")
    quotas = {
        (entity, key): each["limit"] for entity, by_key in ran.quotas.items() for key, each in by_key.items()
    }
    assert {(row["entity"], row["quota"]): row["limit"] for row in rows} == quotas
    for row in rows:
        assert row["limit"] / row["need"] <= 1.5, row
        assert row["confidence"] == "low", "a log of two minutes"
    assert any(row["entity"] not in {"user=*", "ip=*", "listener=*"} for row in rows)
    lines = ran.text.splitlines()
    for at, line in enumerate(lines):
        if line.startswith("    ") and not line.startswith("    #"):
            assert lines[at - 1].startswith("    # rests on a need of "), line
    assert ran.quotas["user=*"]["producer_ids_rate"]["window_ms"] == 600_000, "as in the log"
    page = (ran.folder / "report.html").read_text()
    assert "<script" not in page
    assert "per-batch-0" in page
    read = reports.read_report(ran.folder.parent, ran.folder.name)
    by_name = {table.name: table for table in read.tables}
    assert read.kind == "recommend"
    assert {(row[0], row[1]): row[2] for row in by_name["limits"].rows} == quotas
    assert "user=per-batch-0" in {row[0] for row in by_name["outliers"].rows}


def test_chosen_keys_and_period(recommend: Command, tmp_path: Path):
    log = write(TRAFFIC, tmp_path)
    ran = recommend(log, "--keys", "request_rate,controller_mutation_rate", "--quantile", "1")
    assert {key for by_key in ran.quotas.values() for key in by_key} == {"request_rate"}
    assert ran.summary["outliers"] == 0
    whole = sum(row["asks"] for row in ran.rows("limits"))
    late = recommend(log, "--keys", "request_rate", "--from", "2026-03-01T00:00:00Z")
    assert 0 < sum(row["asks"] for row in late.rows("limits")) < whole


@pytest.mark.parametrize(
    "options",
    [
        ("--keys", "requests"),
        ("--quantile", "0.2"),
        ("--quantile", "nan"),
        ("--headroom", "-1"),
        ("--headroom", "x"),
    ],
)
def test_wrong_options(options: tuple[str, str], recommend: Command, tmp_path: Path):
    with pytest.raises(SystemExit) as exit_:
        recommend(tmp_path, *options)
    assert exit_.value.code == 2


NAMES = ["null", "a: b #c", "*", "ü", "x,y=z", "<script>", "- {q}", "'\"", "%2A", "true"]


def test_names_of_every_kind_are_written_and_read_back(recommend: Command, tmp_path: Path):
    made = Fresh()
    for number in range(40):
        for place, name in enumerate(NAMES):
            made.now_ms += 500
            if place >= number // 4:  # their needs differ, so that some get limits of their own
                made.ask(Ask({"requests": 3 + place}, None, name, detail=True))
    ran = recommend(made.write(tmp_path / "log"))
    assert (ran.code, ran.complaints) == (0, [])
    own = {Entity.parse(entity).parts[0][1] for entity in ran.quotas if entity != "user=*"}
    assert own
    assert own < set(NAMES)
    assert {row["entity"] for row in ran.rows("limits")} == ran.quotas.keys()
    assert "<script" not in (ran.folder / "report.html").read_text()
    assert "Too few entities" not in ran.out


def test_forms_of_the_log_are_kept(recommend: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QUOTAGATE_MAX_DEBT", "PT2S")
    made = Fresh()
    by_entity, user = made.quotas["request_rate"], Entity.parse("user=*")
    by_entity[user] = replace(by_entity[user], samples=5, enforcement="deny", shadow=True)
    made.run(asks(4, ["a", "b", "c"]), 200, (0, 5, 40, 120, 900), 4)
    ran = recommend(made.write(tmp_path / "log"))
    assert ran.code == 0
    rate = ran.quotas["user=*"]["request_rate"]
    assert rate == {"limit": rate["limit"], "enforcement": "deny", "samples": 5}, "and shadow is not"
    assert ran.quotas.keys() >= {"user=*", "ip=*", "listener=*"}
    assert ran.quotas["user=*"].keys() == {
        "request_rate",
        "request_percentage",
        "producer_byte_rate",
        "consumer_byte_rate",
        "controller_mutation_rate",
    }
    assert "Too few entities to find outliers by their peers, at most 3: producer_ids_rate" in ran.out
    assert "No limit for producer_ids_rate: all of its 3 entities are outliers." in ran.out
    assert "No limit of these applies to " in ran.out


def test_log_of_refusals_is_wrong_use(recommend: Command, tmp_path: Path):
    made = Fresh()
    made.run(asks(4, ["a", "b", "c"]), 200, (0, 5, 40), 4)
    denied = [row for row in made.rows if row["decision"] != "admit"]
    ran = recommend(made.write(tmp_path / "log", denied))
    assert (ran.code, ran.out) == (2, "")
    assert "needs every decision, a log of QUOTAGATE_LOG=all" in ran.complaints[0]
    assert not ran.folder.exists()


def test_empty_log(recommend: Command, tmp_path: Path):
    (tmp_path / "log").mkdir()
    ran = recommend(tmp_path / "log")
    assert (ran.code, ran.out) == (1, "")
    assert ran.complaints
    assert not ran.folder.exists()


def test_log_without_usage(recommend: Command, tmp_path: Path):
    made = Fresh()
    made.ask(Ask({"requests": 1}, None, "a", mode="peek", detail=True))
    ran = recommend(made.write(tmp_path / "log"))
    assert (ran.code, ran.out) == (1, "")
    assert "uses anything that a quota could limit" in ran.complaints[0]
    assert not ran.folder.exists()


def test_changed_log_is_not_used(recommend: Command, tmp_path: Path):
    made = Fresh()
    made.run(asks(4, ["a", "b", "c"]), 200, (0, 5, 40, 120), 4)
    row = next(row for row in made.rows[50:] if row["decision"] == "delay")
    row["throttle_ms"] += 1
    ran = recommend(made.write(tmp_path / "log"))
    assert (ran.code, ran.out) == (1, "")
    assert "does not reproduce itself, so no limits were recommended" in ran.complaints[0]
    assert not ran.folder.exists()
