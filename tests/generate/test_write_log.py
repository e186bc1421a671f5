"""Generated logs: their rows are compared with the oracle, and their truth with an independent count."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from app.domain.ask import Ask
from app.domain.digest import digest
from app.domain.entity import Entity
from app.domain.exact_ids import ExactIds
from app.domain.ladder import MatchingRules
from app.domain.oracle import IdsBucket, Oracle
from tests.disks import mounted
from tests.programs import lives
from tests.service import eventually
from workers.decision_log.schema import SCHEMA, footer, partition
from workers.generate import quotas
from workers.generate.__main__ import cli
from workers.generate.traffic import LISTENER, Event, Traffic
from workers.generate.truth import USES
from workers.generate.write_log import Order, write_log

START_MS = 1_772_323_200_000 - 600_000  # ten minutes before the end of an hour
SECRET = bytes(range(32))
TRAFFIC = Traffic(seed=3, events=12_000, rate=5.0, principals=200)
"""Forty minutes: four windows of producer ids, eight storms, two partitions."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    write_log(Order(TRAFFIC, START_MS, SECRET, programs=2), folder / "log", folder / "truth")
    return folder


def rows_of(log: Path) -> list[dict[str, Any]]:
    found = ds.dataset(log, partitioning=None).to_table()
    decided = found.filter(pa.compute.equal(found["kind"], "decision")).sort_by("order")
    rows: list[dict[str, Any]] = decided.to_pylist()
    return rows


def uses_of(truth: Path) -> list[dict[str, Any]]:
    files = sorted(truth.glob("uses-*.parquet"))
    uses: list[dict[str, Any]] = ds.dataset(files).to_table().sort_by("event").to_pylist()
    return uses


class ExactOracle(Oracle):
    """The oracle with exact sets of ids, so that no unseen id is taken as seen."""

    def _absent(self, quota):
        if quota.algorithm == "producer_ids":
            return IdsBucket(self.max_ids, ExactIds())
        return super()._absent(quota)


def ask_of(event: Event) -> Ask:
    if event.principal is None:
        return Ask({"connections": 1}, ip=event.ip, broker=event.broker, listener=LISTENER, detail=True)
    return Ask(
        {"requests": 1, "produce_bytes": event.produce_bytes},
        event.ids,
        event.principal,
        event.client_id,
        detail=True,
    )


def test_each_row_equals_the_oracles_decision(written):
    resolved: dict[str, dict[Entity, Any]] = defaultdict(dict)
    for entity, by_key in quotas.DEFINITIONS.items():
        for key in by_key:
            resolved[key][Entity.parse(entity)] = quotas.quota(entity, key)
    oracle = ExactOracle(SECRET)
    outcomes: Counter[tuple[str, str | None]] = Counter()
    for event, row in zip(TRAFFIC.stream(), rows_of(written / "log"), strict=True):
        now_ms = START_MS + event.at_ms
        expected = oracle.decide(ask_of(event), resolved, MatchingRules(), now_ms)
        by = expected.limited_by
        outcomes[expected.decision, by.quota if by else None] += 1
        assert (row["at_ms"], row["principal"], row["ip"]) == (now_ms, event.principal, event.ip)
        assert (row["decision"], row["throttle_ms"]) == (expected.decision, expected.throttle_ms), event
        assert (row["charged"], row["applied"], row["source"]) == (
            expected.charged,
            expected.applied,
            expected.source,
        )
        wanted = by and {"quota": by.quota, "entity": by.entity, "bucket": by.bucket, "reason": by.reason}
        assert row["limited_by"] == wanted
        assert expected.quotas is not None
        for verdict, logged in zip(expected.quotas, row["verdicts"], strict=True):
            for name in ("quota", "entity", "bucket", "limit", "enforcement", "shadow", "outcome"):
                assert logged[name] == getattr(verdict, name), (event, name)
            for name in ("throttle_ms", "observed", "remaining", "reason"):
                assert logged[name] == getattr(verdict, name), (event, name)
    assert outcomes.keys() == {("admit", None), ("throttle", "producer_ids_rate")}


def test_storms_are_limited_by_address_and_by_listener(tmp_path):
    busy = Traffic(seed=3, events=16_000, rate=2_000.0, principals=6)
    write_log(Order(busy, START_MS, SECRET, programs=1), tmp_path / "log", tmp_path / "truth")
    resolved = {
        key: {Entity.parse(entity): quotas.quota(entity, key)}
        for entity, by_key in quotas.DEFINITIONS.items()
        for key in by_key
    }
    oracle = ExactOracle(SECRET)
    limited: Counter[str] = Counter()
    for event, row in zip(busy.stream(), rows_of(tmp_path / "log"), strict=True):
        expected = oracle.decide(ask_of(event), resolved, MatchingRules(), START_MS + event.at_ms)
        assert (row["decision"], row["throttle_ms"]) == (expected.decision, expected.throttle_ms), event
        if expected.limited_by is not None:
            assert row["limited_by"]["bucket"] == expected.limited_by.bucket
            limited[expected.limited_by.quota] += 1
    assert limited.keys() >= {
        "producer_byte_rate",
        "connection_creation_rate",
        "max_connection_creation_rate",
    }


def test_each_row_of_the_fastest_traffic_has_its_own_place_in_the_order(tmp_path):
    fastest = Traffic(seed=1, events=3_000, rate=1e6, principals=20)
    write_log(Order(fastest, START_MS, SECRET, programs=1), tmp_path / "log", tmp_path / "truth")
    orders = [row["order"] for row in rows_of(tmp_path / "log")]
    assert orders == [(START_MS * 1_000 + number) * 128 for number in range(3_000)]


def test_rows_are_numbered_and_identified(written):
    rows = rows_of(written / "log")
    assert len({(row["batch"], row["place"]) for row in rows}) == TRAFFIC.events
    orders = [row["order"] for row in rows]
    assert orders == sorted(set(orders))
    assert [row["at_ms"] for row in rows] == sorted(row["at_ms"] for row in rows)
    assert [order // 128_000 for order in orders] == [row["at_ms"] for row in rows]
    produced = [(event, row) for event, row in zip(TRAFFIC.stream(), rows, strict=True) if event.ids]
    for event, row in produced[:500]:
        digests = [digest(SECRET, event.principal or "", each) for each in event.ids]
        assert row["ids"] == [int.from_bytes(each, "big", signed=True) for each in digests]
        assert dict(row["usage"]) == {"requests": 1, "produce_bytes": event.produce_bytes}


def test_files_have_the_layout_and_schema_of_the_log(written):
    files = sorted((written / "log").rglob("*.parquet"))
    assert len({path.parent for path in files}) == 2
    for path in files:
        footer(str(path))
        table = pq.read_table(path, partitioning=None)
        assert table.cast(SCHEMA).schema.names == table.schema.names
        assert {partition(at_ms) for at_ms in table["at_ms"].to_pylist()} == {"/".join(path.parts[-3:-1])}
    changes = ds.dataset(files, partitioning=None).to_table(filter=ds.field("kind") == "quota").to_pylist()
    assert {
        row["change"]["what"]: json.loads(row["change"]["after"]) for row in changes
    } == quotas.DEFINITIONS
    assert sorted(path.name for path in written.iterdir()) == ["log", "truth"], "nothing is left aside"


def test_same_order_gives_same_bytes_for_any_number_of_programs(written, tmp_path):
    for programs in (2, 3):
        again = tmp_path / str(programs)
        again.mkdir()
        write_log(Order(TRAFFIC, START_MS, SECRET, programs), again / "log", again / "truth")
        mine = {str(p.relative_to(again)): p.read_bytes() for p in again.rglob("*") if p.is_file()}
        if programs == 2:
            assert mine == {
                str(p.relative_to(written)): p.read_bytes() for p in written.rglob("*") if p.is_file()
            }
        told_apart = ("batch", "place", "node", "batch_rows")
        assert [
            {name: value for name, value in row.items() if name not in told_apart}
            for row in rows_of(again / "log")
        ] == [
            {name: value for name, value in row.items() if name not in told_apart}
            for row in rows_of(written / "log")
        ]
        assert uses_of(again / "truth") == uses_of(written / "truth")


class Counted:
    """Charges and remembered ids of one principal, counted in the simplest way."""

    def __init__(self) -> None:
        self.quota = quotas.quota("user=*", "producer_ids_rate")
        self.layers: list[tuple[int, set[int]]] = []
        self.charges: list[int] = []

    def asks(self, ids: list[int], now_ms: int) -> tuple[list[bool], bool]:
        """Return the new ids, and whether the ask passes."""
        alive = [ids for start, ids in self.layers if now_ms < start + self.quota.layers.ttl_ms]
        new = [not any(each in layer for layer in alive) for each in ids]
        recent = sum(now_ms - self.quota.window_ms < at <= now_ms for at in self.charges)
        passes = not any(new) or recent + sum(new) <= self.quota.limit
        for each, is_new in zip(ids, new, strict=True):
            if passes or not is_new:
                if not self.layers or now_ms >= self.layers[-1][0] + self.quota.layers.interval_ms:
                    self.layers.append((now_ms, set()))
                self.layers[-1][1].add(each)
        self.charges += [now_ms] * (sum(new) if passes else 0)
        return new, passes


def test_truth_equals_an_independent_count(written):
    """Count new uses, charged uses and sums from the events alone, with other code."""
    counted: dict[str, Counted] = defaultdict(Counted)
    wanted: list[tuple[Any, ...]] = []
    charges: Counter[str] = Counter()
    for event in TRAFFIC.stream():
        if event.principal is None:
            continue
        now_ms = START_MS + event.at_ms
        new, passes = counted[event.principal].asks(list(event.ids), now_ms)
        for each, cause, is_new in zip(event.ids, event.causes, new, strict=True):
            wanted.append((event.number, now_ms, event.principal, each, cause, is_new, is_new and passes))
            charges[event.principal] += is_new and passes
    uses = uses_of(written / "truth")
    names = ("event", "at_ms", "principal", "id", "cause", "new", "charged")
    assert sorted(tuple(use[name] for name in names) for use in uses) == sorted(wanted)
    assert 0 < sum(charges.values()) < sum(use["new"] for use in uses), "some pass, some are throttled"
    firsts = Counter(use["id"] for use in uses if use["charged"])
    assert max(firsts.values()) > 1, "some are forgotten and charged again"
    totals = json.loads((written / "truth" / "totals.json").read_text())
    assert {name: sums["charged"] for name, sums in totals["principals"].items()} == charges


def test_totals_are_the_sums_of_the_log(written):
    totals = json.loads((written / "truth" / "totals.json").read_text())
    rows = rows_of(written / "log")
    decided = Counter((row["principal"], row["decision"]) for row in rows)
    charged: Counter[str | None] = Counter()
    uses: Counter[str | None] = Counter()
    for row in rows:
        uses[row["principal"]] += len(row["ids"] or ())
        charged[row["principal"]] += sum(len(verdict["charged_ids"] or ()) for verdict in row["verdicts"])
    everybody = {**totals["principals"], None: totals["connections"]}
    for name, sums in everybody.items():
        assert {o: sums[o] for o in ("admit", "delay", "throttle", "reject")} == {
            o: decided[name, o] for o in ("admit", "delay", "throttle", "reject")
        }
        assert (sums["uses"], sums["charged"]) == (uses[name], charged[name])
    assert totals["overall"]["asks"] == sum(sums["asks"] for sums in everybody.values()) == TRAFFIC.events
    assert totals["quotas"] == quotas.DEFINITIONS
    assert ds.dataset(written / "truth" / "uses-0.parquet").schema.equals(USES)


def generate(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("QUOTAGATE_")}
    return subprocess.run(
        [sys.executable, "-P", "-m", "app.run.cli", "generate", *arguments],
        env={**bare, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_command_writes_a_log_and_prints_its_place(tmp_path):
    ran = generate("log", "--to", str(tmp_path / "log"), "--events", "300", "--from", "2026-03-01T10:30:00Z")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith(f"{tmp_path / 'log'}: 300 decisions (admit 300), ")
    assert str(tmp_path / "log-truth") in ran.stdout
    assert len(rows_of(tmp_path / "log" / "date=2026-03-01" / "hour=10")) == 300


def test_ids_are_hashed_with_the_deployments_secret_if_given(tmp_path):
    given = generate(
        "log", "--to", str(tmp_path / "log"), "--events", "50", QUOTAGATE_HASH_SECRET=SECRET.hex()
    )
    assert given.returncode == 0, given.stderr
    assert SECRET.hex() not in given.stdout
    for use in uses_of(tmp_path / "log-truth"):
        expected = int.from_bytes(digest(SECRET, use["principal"], use["id"]), "big", signed=True)
        assert use["digest"] == expected
    wrong = generate("log", "--to", str(tmp_path / "no"), "--events", "50", QUOTAGATE_HASH_SECRET="abc")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert "QUOTAGATE_HASH_SECRET: must be 32 bytes, written as 64 hexadecimal digits" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--events", "10"], "--to"),
        (["--to", "new", "--events", "0"], "--events"),
        (["--to", "new", "--events", "10", "--rate", "0"], "--rate"),
        (["--to", "new", "--events", "10", "--principals", "70000"], "--principals"),
        (["--to", "new", "--events", "10", "--from", "yesterday"], "--from"),
        (
            ["--to", "new", "--events", "10", "--from", "1969-12-31T23:59:59"],
            "--from: 1969-12-31 is before 1970",
        ),
        (["--to", "new", "--events", "10", "--from", "0001-01-01"], "--from: 1-01-01 is before 1970"),
        (
            ["--to", "new", "--events", "500", "--from", "4252-12-31T23:59:59"],
            "--from: 500 asks at 500 a second",
        ),
        (["--to", "new", "--events", "10", "--truth", "new"], "--truth"),
        (["--to", ".", "--events", "10"], "--to"),
        (["--to", "new", "--events", "10", "--truth", "."], "--truth"),
    ],
)
def test_wrong_option_is_named_and_nothing_is_written(tmp_path, monkeypatch, arguments, named):
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(cli, ["log", *arguments], env={"COLUMNS": "200"})
    assert ran.exit_code == 2, ran.output
    assert named in ran.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("begin", "events", "hour"),
    [("1970-01-01", 9, "date=1970-01-01/hour=00"), ("4252-12-31T23:59:59", 499, "date=4252-12-31/hour=23")],
)
def test_first_and_last_hour_of_a_log_are_written(tmp_path, begin, events, hour):
    ran = generate("log", "--to", str(tmp_path / "log"), "--events", str(events), "--from", begin)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert len(rows_of(tmp_path / "log" / hour)) == events


def test_failed_write_is_reported_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("no folder")
    ran = generate("log", "--to", str(tmp_path / "file" / "log"), "--events", "10")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert str(tmp_path / "file") in ran.stderr
    assert "Traceback" not in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_command_leaves_no_log_and_no_program(tmp_path, sent):
    command = [sys.executable, "-P", "-m", "app.run.cli", "generate", "log", "--events", "50000000"]
    with subprocess.Popen(
        [*command, "--to", str(tmp_path / "log"), "--programs", "2"], stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            eventually(lambda: len(list(tmp_path.rglob("uses-*.parquet"))) == 2, within_s=60)
            writing = children_of(running.pid)
            assert len(writing) >= 2
            running.send_signal(sent)
            _, errors = running.communicate(timeout=60)
        finally:
            running.kill()
        assert running.returncode in (1, 130, -signal.SIGKILL)
        assert "Traceback" not in errors
    eventually(lambda: not any(lives(pid) for pid in writing), within_s=60)
    assert not (tmp_path / "log").exists()
    assert not (tmp_path / "log-truth").exists()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_full_disk_is_reported_and_leaves_nothing(tmp_path):
    with mounted(tmp_path / "disk", 1024 * 1024) as disk:
        ran = generate("log", "--to", str(disk / "log"), "--events", "120000", "--programs", "2")
        assert (ran.returncode, ran.stdout) == (1, "")
        assert "No space left on device" in ran.stderr
        assert "Traceback" not in ran.stderr
        assert list(disk.iterdir()) == []
