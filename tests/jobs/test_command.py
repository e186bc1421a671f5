"""`python -m workers.jobs`: arguments and settings reach the job, and its exit codes come back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from app.domain.oracle import Oracle
from tests.jobs import faults
from tests.jobs.logs import SECRET, OracleLog, asks
from workers.jobs import folder as output
from workers.jobs.__main__ import Processes
from workers.jobs.command import main

PROGRESS = re.compile(r"quotagate: audit: \d+ % after \d+ s")


def program(*arguments: str, cwd: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("QUOTAGATE_")}
    return subprocess.run(
        [sys.executable, "-m", "workers.jobs", *arguments],
        cwd=cwd,
        env={**ours, "PYTHONPATH": str(Path(__file__).parents[2]), **settings},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def complaints(stderr: str) -> list[str]:
    """The lines that are no progress, which a slow machine shows."""
    return [line for line in stderr.splitlines() if not PROGRESS.fullmatch(line)]


@pytest.fixture
def log(tmp_path: Path) -> OracleLog:
    made = OracleLog(Oracle(SECRET))
    made.run(asks(1, ["a", "b"]), 50, (0, 10))
    made.write(tmp_path / "home" / "log")
    return made


class Run:
    """Runs the program in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._capsys = capsys
        self.folder = folder

    def __call__(self, *arguments: str) -> tuple[int, str, list[str]]:
        code = self.job("audit", "--log", str(self.folder / "home" / "log"), *arguments)
        said = self._capsys.readouterr()
        return code, said.out, complaints(said.err)

    def job(self, *arguments: str) -> int:
        try:
            return main(Processes(), arguments)
        except SystemExit as ended:  # argparse's way
            return int(ended.code or 0)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(output, "SETTLED_S", 0.0)
    return Run(capsys, tmp_path)


@pytest.mark.parametrize("arguments", [("--help",), ("audit", "--help")])
def test_help_lists_jobs_and_options(
    arguments: tuple[str, ...], run: Run, capsys: pytest.CaptureFixture[str]
):
    assert run.job(*arguments) == 0
    said = capsys.readouterr().out
    assert "audit" in said
    assert "--processes" in said or "audit" not in arguments


def test_help_imports_nothing_that_computes(tmp_path: Path):
    said = (
        "import sys; from workers.jobs import command, __main__\n"
        "try: command.main(__main__.Processes(), ['audit', '--help'])\n"
        "finally: assert not {'pyspark', 'rich', 'numpy', 'pyarrow'} & set(sys.modules), sorted(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run(
        [sys.executable, "-c", said], cwd=tmp_path, env=environment, check=True, capture_output=True
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "arguments are required: JOB"),
        (("nothing",), "invalid choice: '...' (choose from"),
        (("audit",), "--out"),
        (("audit", "--out", "x"), "--log or QUOTAGATE_LOG_URL must be the URL of the decision log"),
        (("audit", "--out", "x", "--processes", "0"), "--processes: '0' must be a whole number above 0"),
        (("audit", "--log", "x", "--out", "x", "--grace", "-1"), "--grace and --lead-in: must be 0 or more"),
        (("audit", "--log", "x", "--out", "x", "--lead-in", "nan"), "--grace and --lead-in: must be 0 or"),
        (("audit", "--log", "x", "--out", "x", "--from", "soon"), "--from: '...' must be an instant"),
    ],
)
def test_wrong_use(
    arguments: tuple[str, ...],
    says: str,
    run: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("QUOTAGATE_LOG_URL", raising=False)
    assert run.job(*arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert says in " ".join(said.err.split())


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("COMBINE_DELAYS", "sum", "--combine-delays: must be max or sequential"),
        ("CLOCK", "sun", "--clock: must be store or caller"),
        ("MAX_IDS_PER_PRINCIPAL", "many", "--max-ids: 'many' must be a whole number above 0"),
        ("MAX_IDS_PER_PRINCIPAL", "0", "--max-ids: '0' must be a whole number above 0"),
    ],
)
def test_settings_in_the_environment_are_checked(
    name: str,
    value: str,
    says: str,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv(f"QUOTAGATE_{name}", value)
    assert run.job("audit", "--log", "nowhere", "--out", "x") == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("way", [("--combine-delays", "sequential"), ()], ids=["option", "setting"])
def test_audit_combines_delays_as_the_nodes_do(
    way: tuple[str, ...], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = OracleLog(Oracle(SECRET, sequential=True))
    made.run(asks(1, ["a", "b"]), 600, (0, 0, 1, 2, 5, 20))
    made.write(tmp_path / "home" / "log")
    assert run("--out", str(tmp_path / "one"))[0] == 1
    if not way:
        monkeypatch.setenv("QUOTAGATE_COMBINE_DELAYS", "sequential")
    assert run("--out", str(tmp_path / "two"), *way)[0] == 0


def test_audit_exits_1_and_names_the_principal_when_a_bound_is_broken(tmp_path: Path):
    made = OracleLog(faults.FaultyOracle(SECRET, {"b": faults.impatient}))
    made.run(asks(1, ["a", "b"]), 400, (0, 1))
    made.write(tmp_path / "log")
    done = program("audit", "--out", "report", cwd=tmp_path, QUOTAGATE_LOG_URL=str(tmp_path / "log"))
    assert (done.returncode, complaints(done.stderr)) == (1, [])
    assert "  b: verdicts that are not the exact ones" in done.stdout
    assert "  a: " not in done.stdout
    assert (tmp_path / "report" / "report.html").is_file()
    assert not list(tmp_path.glob("_*")), "no temporary folder is left"


def test_audit_exits_0_when_all_bounds_hold(log: OracleLog, run: Run, tmp_path: Path):
    out = tmp_path / "report"
    code, said, complained = run("--out", str(out))
    assert (code, complained) == (0, [])
    assert said.startswith("All bounds held: 50 decisions, ")
    assert (out / "report.html").is_file()
    code, said, complained = run("--out", str(out))
    assert (code, said) == (1, "")
    assert complained == [f"quotagate: {out}: exists already; --overwrite replaces it"]
    assert run("--out", str(out), "--overwrite")[0] == 0


def test_audit_refuses_log_of_denied_asks(log: OracleLog, run: Run, tmp_path: Path):
    denied = [row for row in log.rows if row["decision"] != "admit"]
    for row in log.rows:
        if row["decision"] == "admit" and row["order"] and any(v["charged_ids"] for v in row["verdicts"]):
            ids = [v for v in row["verdicts"] if v["charged_ids"]]
            denied.append({**row, "kind": "ids", "decision": None, "verdicts": ids})
    log.write(tmp_path / "denied", denied)
    code, said, complained = run("--log", str(tmp_path / "denied"), "--out", str(tmp_path / "report"))
    assert (code, said, len(complained)) == (2, "", 1)
    assert "QUOTAGATE_LOG=all" in complained[0]
    assert "--from" in complained[0]
    assert not (tmp_path / "report").exists()


def test_corrupt_file_leaves_no_output(log: OracleLog, run: Run, tmp_path: Path):
    [file] = (tmp_path / "home" / "log").rglob("*.parquet")
    content = bytearray(file.read_bytes())
    content[4 : len(content) // 2] = bytes(len(content) // 2 - 4)
    file.write_bytes(content)
    code, said, complained = run("--out", str(tmp_path / "report"))
    assert (code, said, len(complained)) == (1, "", 1)
    assert complained[0].startswith(f"quotagate: {file}: ")
    assert not (tmp_path / "report").exists()
    assert not list(tmp_path.glob("_*"))


def test_audit_refuses_period_without_decisions(log: OracleLog, run: Run, tmp_path: Path):
    code, _, complained = run("--out", str(tmp_path / "report"), "--to", "2026-11-21T10:00:00Z")
    assert code == 1
    assert "no decision in the period from the beginning to 2026-11-21 10:00" in complained[0]
    assert not (tmp_path / "report").exists()
