"""`quotagate spark`: arguments and settings reach the job, and its exit codes come back."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from app.domain.oracle import Oracle
from tests.spark import faults
from tests.spark.java import quick_start
from tests.spark.logs import SECRET, OracleLog, asks
from workers.spark import session
from workers.spark.__main__ import main


def quotagate(*arguments: str, cwd: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("QUOTAGATE_")}
    return subprocess.run(
        [sys.executable, "-m", "app.run.cli", "spark", *arguments],
        cwd=cwd,
        env={**ours, "PYTHONPATH": str(Path(__file__).parents[2]), **settings},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.fixture
def log(tmp_path: Path) -> OracleLog:
    made = OracleLog(Oracle(SECRET))
    made.run(asks(1, ["a", "b"]), 50, (0, 10))
    made.write(tmp_path / "home" / "log")
    return made


@pytest.mark.parametrize("arguments", [(), ("--help",), ("audit", "--help")])
def test_help_lists_jobs_and_options(arguments: tuple[str, ...], tmp_path: Path):
    done = quotagate(*arguments, cwd=tmp_path)
    assert done.returncode == 0
    assert "audit" in done.stdout
    assert "--master" in done.stdout or "audit" not in arguments


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nothing",), "invalid choice: '...' (choose from"),
        (("audit",), "--out"),
        (("audit", "--out", "x", "--memory", "much"), "--memory: must be a size such as 512m or 2g"),
        (("audit", "--out", "x", "--master", "spark://me:pw@h:1"), "--master: must be a master such as"),
        (("audit", "--out", "x", "--from", "soon"), "--from: '...' must be an instant"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], says: str, tmp_path: Path):
    done = quotagate(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


@pytest.mark.parametrize(
    ("job", "name", "value", "says"),
    [
        ("audit", "COMBINE_DELAYS", "sum", "--combine-delays: must be max or sequential"),
        ("audit", "MAX_IDS_PER_PRINCIPAL", "many", "--max-ids: 'many' must be a whole number above 0"),
        ("backfill", "MAX_IDS_PER_PRINCIPAL", "-1", "--max-ids: '-1' must be a whole number above 0"),
        ("backfill", "PRODUCER_ID_WINDOW_MS", "1h", "--window-ms: invalid int value: '1h'"),
        ("backfill", "PRODUCER_ID_LAYERS", "thick", "--layers: 'thick' must be one of layered"),
        ("backfill", "HASH_SECRET", "abc", "QUOTAGATE_HASH_SECRET: must be 32 bytes, written as 64 "),
    ],
)
def test_settings_in_the_environment_are_checked(
    job: str,
    name: str,
    value: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """`quotagate spark` checks the settings; spark-submit on a cluster does not."""
    monkeypatch.setenv(f"QUOTAGATE_{name}", value)
    try:
        code: object = main([job, "--log", "nowhere", "--out", "x"])
    except SystemExit as ended:  # argparse's way
        code = ended.code
    assert code == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_invalid_setting_is_refused_by_name(tmp_path: Path):
    done = quotagate("audit", "--out", "x", cwd=tmp_path, QUOTAGATE_LOG="some")
    assert done.returncode == 1
    assert "QUOTAGATE_LOG: " in done.stderr


def test_audit_exits_1_and_names_the_principal_when_a_bound_is_broken(tmp_path: Path):
    made = OracleLog(faults.FaultyOracle(SECRET, {"b": faults.impatient}))
    made.run(asks(1, ["a", "b"]), 400, (0, 1))
    made.write(tmp_path / "log")
    options = ("--out", "report", "--master", "local[2]", "--memory", "1g", f"--java={quick_start()}")
    done = quotagate("audit", *options, cwd=tmp_path, QUOTAGATE_LOG_URL=str(tmp_path / "log"))
    assert (done.returncode, done.stderr) == (1, "")
    assert "  b: verdicts that are not the exact ones" in done.stdout
    assert "  a: " not in done.stdout
    assert (tmp_path / "report" / "report.html").is_file()
    assert not list(tmp_path.glob("_*")), "no temporary folder is left"


class Run:
    """Runs the program in this process, with the tests' own Spark session."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._capsys = capsys
        self.folder = folder

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        code = main(["audit", "--log", str(self.folder / "home" / "log"), *arguments])
        said = self._capsys.readouterr()
        return code, said.out, said.err


@pytest.fixture
def run(
    spark: SparkSession,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    monkeypatch.setattr(session, "spark_session", lambda *_: nullcontext(spark))
    return Run(capsys, tmp_path)


def test_audit_exits_0_when_all_bounds_hold(log: OracleLog, run: Run, tmp_path: Path):
    out = tmp_path / "report"
    code, said, complained = run("--out", str(out))
    assert (code, complained) == (0, "")
    assert said.startswith("All bounds held: 50 decisions, ")
    assert (out / "report.html").is_file()
    code, said, complained = run("--out", str(out))
    assert (code, said) == (1, "")
    assert f"{out}: exists already; --overwrite replaces it" in complained


def test_audit_refuses_log_of_denied_asks(log: OracleLog, run: Run, tmp_path: Path):
    denied = [row for row in log.rows if row["decision"] != "admit"]
    for row in log.rows:
        if row["decision"] == "admit" and row["order"] and any(v["charged_ids"] for v in row["verdicts"]):
            ids = [v for v in row["verdicts"] if v["charged_ids"]]
            denied.append({**row, "kind": "ids", "decision": None, "verdicts": ids})
    log.write(tmp_path / "denied", denied)
    code, said, complained = run("--log", str(tmp_path / "denied"), "--out", str(tmp_path / "report"))
    assert (code, said) == (2, "")
    assert "QUOTAGATE_LOG=all" in complained
    assert len(complained.splitlines()) == 1
    assert not (tmp_path / "report").exists()


def test_corrupt_file_leaves_no_output(log: OracleLog, run: Run, tmp_path: Path):
    [file] = (tmp_path / "home" / "log").rglob("*.parquet")
    data = bytearray(file.read_bytes())
    data[4 : len(data) // 2] = bytes(len(data) // 2 - 4)
    file.write_bytes(data)
    code, said, complained = run("--out", str(tmp_path / "report"))
    assert (code, said) == (1, "")
    assert complained.startswith(f"quotagate: {file}: ")
    assert not (tmp_path / "report").exists()
    assert not list(tmp_path.glob("_*"))


def test_audit_refuses_period_without_decisions(log: OracleLog, run: Run, tmp_path: Path):
    code, _, complained = run("--out", str(tmp_path / "report"), "--to", "2026-11-21T10:00:00Z")
    assert code == 1
    assert "no row in the period from the beginning to 2026-11-21 10:00" in complained
    assert not (tmp_path / "report").exists()
