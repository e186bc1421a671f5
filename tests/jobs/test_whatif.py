"""`quotagate whatif` on logs of generated and of random traffic: results, exit codes, and its output."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app import quota_file
from app.domain.ask import Ask
from app.domain.ladder import MatchingRules
from app.domain.quota import Defaults
from app.node import reports
from app.node.settings import load
from app.run.commands import programs
from app.run.wiring import defaults
from tests.generate.test_write_log import ask_of
from tests.jobs.commands import Ran, run_job
from tests.jobs.logs import SECRET, START_MS, asks
from tests.jobs.logs import quotas as all_quotas
from tests.jobs.test_replay import ExactOracle, Fresh
from workers.decision_log.schema import HOUR_MS
from workers.generate.quotas import DEFINITIONS
from workers.generate.traffic import Traffic
from workers.generate.write_log import Order, write_log
from workers.jobs import files
from workers.jobs import folder as output
from workers.jobs.__main__ import Processes
from workers.jobs.batches import each_once
from workers.jobs.command import main
from workers.jobs.files import row_groups
from workers.jobs.period import Period, format_instant
from workers.jobs.progress import Silent
from workers.jobs.runner import ProcessRunner
from workers.jobs.whatif import quotas as proposed_quotas
from workers.jobs.whatif import slices
from workers.jobs.whatif.quotas import resolved
from workers.jobs.whatif.slices import RowDecoder, in_order

TRAFFIC = Traffic(seed=2, events=1_500, rate=5.0, principals=30)
BEGIN_MS = 1_772_323_200_000 - 150_000  # the traffic goes on in the next hour

ALL = """
quotas:
  user=*:
    producer_ids_rate: {limit: 40, window_ms: 60000}
    request_rate: 5
    producer_byte_rate: 20000
    controller_mutation_rate: {limit: 2.5, burst: 20}
  client-id=*:
    consumer_byte_rate: 30000
  user=*,client-id=*:
    request_percentage: 30
  ip=*:
    request_rate: {limit: 20, shadow: true}
    connection_creation_rate: 3
  listener=*:
    max_connection_creation_rate: 8
"""
"""The quotas of ``tests.jobs.logs`` as a file."""


class Command:
    """Runs the command in this process, with settings of the deployment as it passes them on."""

    def __init__(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder = tmp_path
        self._capsys = capsys

    def __call__(self, log: Path, quotas: str, *more: str) -> Ran:
        file = self._folder / "quotas.yaml"
        file.write_text(quotas)
        words = ("--log", str(log), "--quotas", str(file), *more)
        return run_job("whatif", self._folder / "report", *words, capsys=self._capsys)


@pytest.fixture
def whatif(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setattr(output, "SETTLED_S", 0.0)
    return Command(tmp_path, capsys)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated")
    write_log(Order(TRAFFIC, BEGIN_MS, SECRET, programs=1), folder / "log", folder / "truth")
    return folder / "log"


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Fresh:
    """Asks of every kind around the end of an hour, with the longest debt of their quotas."""
    monkeypatch.setenv("QUOTAGATE_MAX_DEBT", "PT2S")
    made = Fresh()
    made.now_ms = START_MS + HOUR_MS - 20_000
    made.run(asks(4, ["a", "b", "c"]), 300, (0, 5, 40, 120, 900), 4)
    return made


def text_of(definitions: Any) -> str:
    return "".join(quota_file.quota_lines(list(definitions.items())))


def halved() -> Any:
    definitions = copy.deepcopy(DEFINITIONS)
    for by_key in definitions.values():
        for definition in by_key.values():
            definition["limit"] //= 2
    return definitions


def test_quotas_of_the_log_change_nothing(generated: Path, whatif: Command):
    ran = whatif(generated, text_of(DEFINITIONS))
    assert (ran.code, ran.complaints) == (0, [])
    summary = ran.summary
    assert summary["before"] == summary["after"]
    assert summary["before"]["throttle"] > 0, "the log must have something to reproduce"
    assert summary | {"before": 0, "after": 0} == {
        "decisions": TRAFFIC.events,
        "reproduced": TRAFFIC.events,
        "causes": {},
        "other": 0,
        "before": 0,
        "after": 0,
        "newly_refused": 0,
        "newly_admitted": 0,
    }
    for row in ran.rows("principals"):
        for name in ("admit", "delay", "throttle", "reject", "refused", "wait_ms", "usage"):
            assert row[f"{name}_before"] == row[f"{name}_after"]
    for row in ran.rows("quotas"):
        assert row["limits_before"] == [row["limit_after"]]
        assert row["refused_before"] == row["refused_after"]
    page = (ran.folder / "report.html").read_text()
    assert "<script" not in page
    assert "0 asks that were admitted would be refused" in page
    assert ran.out.startswith("1,500 of 1,500 decisions reproduced\n")


def test_half_of_the_limits_are_decided_as_the_oracle_does(generated: Path, whatif: Command):
    quotas = resolved(halved(), Defaults())
    oracle = ExactOracle(SECRET)
    decisions: Counter[str] = Counter()
    waits: Counter[str | None] = Counter()
    for event in TRAFFIC.stream():
        decided = oracle.decide(ask_of(event), quotas, MatchingRules(), BEGIN_MS + event.at_ms)
        decisions[decided.decision] += 1
        waits[event.principal] += decided.throttle_ms
    ran = whatif(generated, text_of(halved()))
    assert {name: count for name, count in ran.summary["after"].items() if count} == decisions
    principals = ran.rows("principals")
    assert {row["principal"]: row["wait_ms_after"] for row in principals} == waits
    assert sum(row["newly_refused"] for row in principals) == ran.summary["newly_refused"] > 0
    refused = sum(row["refused_after"] for row in ran.rows("quotas"))
    assert refused == decisions["throttle"] + decisions["reject"]
    page = (ran.folder / "report.html").read_text()
    assert 'class="usage"' in page
    assert 'class="after"' in page
    assert "newly refused" in ran.out
    assert "not in the file" not in ran.out
    assert ran.out.endswith(f"next: quotagate quotas plan -f {ran.folder.parent / 'quotas.yaml'}\n")
    read = reports.read_report(ran.folder.parent, ran.folder.name)
    assert (read.kind, msgspec.json.decode(read.summary)) == ("whatif", ran.summary)
    by_name = {table.name: table for table in read.tables}
    assert {row[0]: row[2] for row in by_name["decisions"].rows} == ran.summary["after"]
    first = next(table for table in read.tables if table.name == "refused_over_time")
    assert sum(int(row[2] or 0) for row in first.rows) > 0, "who is touched most is refused"
    assert read.from_ms is not None
    assert next(row[0] for row in first.rows) == read.from_ms // 10_000 * 10_000, "slices of ten seconds"


def test_quotas_that_the_file_lacks_are_named(generated: Path, whatif: Command):
    ran = whatif(generated, text_of({"user=*": DEFINITIONS["user=*"]}))
    gone = "ip=* connection_creation_rate, listener=* max_connection_creation_rate"
    assert f"2 quotas of the log are not in the file, so they limit nobody: {gone}\n" in ran.out


def test_entities_of_a_further_file_replace_those_of_the_first(
    generated: Path, whatif: Command, tmp_path: Path
):
    """As `quotas apply --only-named` would; quotas of an entity that the further file lacks are gone."""
    named = {
        "user=*": {"request_rate": {"limit": 25}},
        "user=team-0001": {"producer_byte_rate": {"limit": 9}},
    }
    file = tmp_path / "named.yaml"
    file.write_text(text_of(named))
    both = whatif(generated, text_of(DEFINITIONS), "--quotas", str(file))
    assert (both.code, both.complaints) == (0, [])
    assert f"next: quotagate quotas plan -f {file} --only-named\n" in both.out
    assert "2 quotas of the log are not in the files, so they limit nobody: " in both.out
    rows, summary = both.rows("quotas"), both.summary
    one = whatif(generated, text_of(DEFINITIONS | named))
    assert one.rows("quotas") == rows
    assert {row["entity"] for row in rows if row["limit_after"] is not None} == {*DEFINITIONS, *named}
    assert one.summary == summary
    assert summary["before"] != summary["after"]


def test_quotas_in_shadow_refuse_nobody_and_are_named(generated: Path, whatif: Command):
    shadow = halved()
    shadow["user=*"]["request_rate"] = {"limit": 0, "enforcement": "deny", "shadow": True}
    ran = whatif(generated, text_of(shadow))
    after = ran.summary["after"]
    assert "1 quota of the file is in shadow, so it refuses nobody: user=* request_rate\n" in ran.out
    assert "0, in shadow" in (ran.folder / "report.html").read_text()
    assert [row["entity"] for row in ran.rows("quotas") if row["shadow_after"]] == ["user=*"]
    del shadow["user=*"]["request_rate"]
    without = whatif(generated, text_of(shadow))
    assert without.summary["after"] == after
    assert "in shadow" not in without.out


def test_too_many_refusals_are_exit_code_1(generated: Path, whatif: Command):
    ran = whatif(generated, text_of(halved()))
    refused = ran.summary["newly_refused"]
    assert (ran.code, refused > 0) == (0, True)
    assert whatif(generated, text_of(halved()), "--fail-if-refused", str(refused)).code == 0
    ran = whatif(generated, text_of(halved()), "--fail-if-refused", str(refused - 1))
    assert (ran.code, ran.complaints) == (1, [])
    assert (ran.folder / "report.html").is_file()


@pytest.mark.parametrize("number", ["-1", "few", "1.5", ""])
def test_number_of_refusals_must_be_a_whole_number(
    number: str, generated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    given = ("--log", str(generated), "--quotas", "quotas.yaml", "--out", str(tmp_path / "out"))
    with pytest.raises(SystemExit) as ended:
        main(Processes(), ["whatif", *given, f"--fail-if-refused={number}"])
    assert ended.value.code == 2
    assert "argument --fail-if-refused: " in capsys.readouterr().err


@pytest.mark.parametrize("scenario", ["retry-after-wait", "stop-while-waiting"])
def test_callers_that_react_ask_at_other_times(scenario: str, generated: Path, whatif: Command):
    quotas = text_of(halved()).replace("request_rate: 25", "request_rate: {limit: 25, enforcement: deny}")
    as_logged = whatif(generated, quotas).rows("principals")
    ran = whatif(generated, quotas, "--scenario", scenario)
    assert sum(ran.summary["after"].values()) == TRAFFIC.events
    principals = ran.rows("principals")
    assert [row["wait_ms_after"] for row in principals] != [row["wait_ms_after"] for row in as_logged]
    assert (sum(row["retries"] for row in principals) > 0) is (scenario == "retry-after-wait")


def test_only_the_period_is_counted(generated: Path, whatif: Command):
    ran = whatif(generated, text_of(DEFINITIONS), "--from", "2026-03-01T00:00:00Z")
    counted = sum(BEGIN_MS + event.at_ms >= 1_772_323_200_000 for event in TRAFFIC.stream())
    assert 0 < ran.summary["decisions"] == counted < TRAFFIC.events
    assert ran.summary["before"] == ran.summary["after"]


def test_every_key_and_mode_in_files_that_overlap(
    traffic: Fresh, whatif: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(files, "FEWEST_ROWS", 1)  # a task for each file
    monkeypatch.setattr(slices, "ROWS_OF_A_SLICE", 7)
    log = tmp_path / "log"
    for number in range(3):
        traffic.write(log, traffic.rows[number::3], name=f"part-{number}")
    assert resolved(quota_file.read(ALL).quotas, proposed_quotas.defaults(1_000_000)) == all_quotas()
    ran = whatif(log, ALL)
    assert (ran.code, ran.complaints) == (0, [])
    assert ran.summary["reproduced"] == ran.summary["decisions"] == 300
    assert ran.summary["before"] == ran.summary["after"]
    tasks = each_once(row_groups(str(log), Period()), Period(), [])
    assert len(tasks) == 6
    with ProcessRunner(Silent(), 300) as runner:
        decoded = list(RowDecoder().rows(in_order(runner, tasks, 100.0, by_store=True)))
    assert [row.place for row in decoded] == sorted(row.place for row in decoded)
    assert len(decoded) == 300


def test_page_escapes_names(whatif: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QUOTAGATE_MAX_DEBT", "PT2S")
    made = Fresh()
    made.run(asks(4, ["<script>", "b"]), 100, (0, 5, 40), 4)
    ran = whatif(
        made.write(tmp_path / "log"), ALL.replace("producer_byte_rate: 20000", "producer_byte_rate: 9")
    )
    page = (ran.folder / "report.html").read_text()
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 3, "in the table, above the chart and in it"


def test_changed_log_is_not_tried(traffic: Fresh, whatif: Command, tmp_path: Path):
    row = next(row for row in traffic.rows[100:] if row["decision"] == "delay")
    row["throttle_ms"] += 1
    ran = whatif(traffic.write(tmp_path / "log"), ALL)
    assert (ran.code, ran.out) == (1, "")
    said = "\n".join(ran.complaints)
    assert "the log does not reproduce itself" in said
    assert "1 of 300 decisions differ" in said
    assert f"batch {row['batch']}, place {row['place']}" in said
    assert f"logged delay {row['throttle_ms']} ms, exact delay {row['throttle_ms'] - 1} ms" in said
    assert (ran.summary["other"], ran.summary["reproduced"], ran.summary["after"]) == (1, 299, {})
    assert not (ran.folder / "report.html").exists()


def with_a_lost_answer(traffic: Fresh) -> int:
    """Add traffic with a charge whose row, without the store, comes half a second after others show it.

    Returns:
        the time of that row.
    """
    traffic.fall_back(Ask({"requests": 2}, None, "a", detail=True), is_late=False)
    lost = traffic.rows.pop()
    lost["at_ms"] += 500
    traffic.run(asks(5, ["a", "b"]), 20, (5, 20), 5)
    assert traffic.now_ms < lost["at_ms"]
    traffic.rows.append(lost)
    traffic.now_ms = lost["at_ms"]
    traffic.run(asks(6, ["a", "b", "c"]), 100, (5, 40, 120), 6)
    return int(lost["at_ms"])


def test_charge_whose_answer_was_lost_is_known(traffic: Fresh, whatif: Command, tmp_path: Path):
    with_a_lost_answer(traffic)
    ran = whatif(traffic.write(tmp_path / "log"), ALL)
    assert (ran.code, ran.complaints) == (0, [])
    assert ran.summary["causes"]["late"] > 0
    assert ran.summary["causes"].keys() <= {"fallback", "late"}


def test_charge_whose_answer_was_lost_at_the_end_of_the_period(
    traffic: Fresh, whatif: Command, tmp_path: Path
):
    at_ms = with_a_lost_answer(traffic)
    ran = whatif(traffic.write(tmp_path / "log"), ALL, "--to", format_instant(at_ms).removesuffix(" UTC"))
    assert (ran.code, ran.complaints) == (0, [])
    assert ran.summary["decisions"] == sum(row["at_ms"] < at_ms for row in traffic.rows)
    assert sum(ran.summary["before"].values()) == ran.summary["decisions"]
    assert ran.summary["causes"].keys() == {"late"}


@pytest.mark.parametrize("place", [100, 305])
def test_changed_decision_is_refused_also_near_an_outage(
    place: int, traffic: Fresh, whatif: Command, tmp_path: Path
):
    with_a_lost_answer(traffic)
    row = next(row for row in traffic.rows[place:] if row["decision"] == "admit" and row["verdicts"])
    row |= {"decision": "throttle", "throttle_ms": 1_000}
    ran = whatif(traffic.write(tmp_path / "log"), ALL)
    assert (ran.code, ran.summary["after"]) == (1, {})
    assert ran.summary["other"] > 0
    assert "of 421 decisions differ for no known cause" in "\n".join(ran.complaints)


def test_log_with_missing_rows_says_so(traffic: Fresh, whatif: Command, tmp_path: Path):
    charged = next(
        place
        for place, row in enumerate(traffic.rows)
        if place > 50 and row["decision"] == "admit" and row["usage"].get("mutations")
    )
    del traffic.rows[charged]
    ran = whatif(traffic.write(tmp_path / "log"), ALL)
    assert ran.code == 1
    assert "0 batches, and 1 row of others, are missing" in "\n".join(ran.complaints)


def test_log_of_refusals_is_wrong_use(traffic: Fresh, whatif: Command, tmp_path: Path):
    denied = [row for row in traffic.rows if row["decision"] != "admit"]
    ran = whatif(traffic.write(tmp_path / "log", denied), ALL)
    assert (ran.code, ran.out) == (2, "")
    assert "needs every decision, a log of QUOTAGATE_LOG=all" in ran.complaints[0]
    assert not ran.folder.exists()


def test_faults_of_the_file_are_shown_with_their_lines(generated: Path, whatif: Command, tmp_path: Path):
    text = "quotas:\n  user=*:\n    request_rate: fast\n  usr=a:\n    request_rate: 5\n"
    ran = whatif(generated, text)
    assert (ran.code, ran.out) == (2, "")
    file = tmp_path / "quotas.yaml"
    faults = [f"{file}:{fault.line}: {fault.message}" for fault in quota_file.read(text).faults]
    assert ran.complaints == [f"quotagate: {file} has faults; nothing was replayed", *faults]
    assert len(faults) == 2
    assert not ran.folder.exists()


def test_file_that_is_not_there_is_named(generated: Path, whatif: Command):
    ran = whatif(generated, text_of(DEFINITIONS), "--quotas", "nowhere.yaml")
    assert (ran.code, ran.complaints) == (2, ["quotagate: --quotas: nowhere.yaml: No such file or directory"])


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("SAMPLES", "many", "QUOTAGATE_SAMPLES: must be a whole number"),
        ("MAX_DEBT", "soon", "QUOTAGATE_MAX_DEBT: must be an ISO 8601 duration, such as PT1H"),
        ("COMBINE_DELAYS", "sum", "--combine-delays: must be max or sequential"),
    ],
)
def test_settings_are_checked(
    name: str, value: str, says: str, generated: Path, whatif: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(f"QUOTAGATE_{name}", value)
    ran = whatif(generated, text_of(DEFINITIONS))
    assert ran.code == 2
    assert says in ran.complaints[0]


def test_defaults_are_those_of_the_deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    given = {
        "SAMPLES": "5",
        "SAMPLE_MS": "2000",
        "PRODUCER_ID_WINDOW_MS": "60000",
        "PRODUCER_ID_LAYERS": "kip936",
        "MAX_IDS_PER_PRINCIPAL": "5000",
        "MAX_DEBT": "PT90.5S",
        "IPV6_PREFIX": "56",
        "INTER_BROKER_LISTENER": "INTERNAL",
    }
    for name, value in given.items():
        monkeypatch.setenv(f"QUOTAGATE_{name}", value)
    settings = load()
    for name, value in programs._settings(settings, "whatif").items():
        monkeypatch.setenv(name, value)
    assert proposed_quotas.defaults(5_000) == defaults(settings)
    (tmp_path / "quotas.yaml").write_text("quotas: {}")
    assert proposed_quotas.proposed(["quotas.yaml"], 5_000).rules == MatchingRules("INTERNAL", 56)
