"""An audit enters the code that docs/architecture.md names."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.domain.oracle import Oracle
from tests.documented import first_entries, steps, watching
from tests.jobs.logs import SECRET, OracleLog, asks
from workers.jobs import folder
from workers.jobs.__main__ import Processes
from workers.jobs.command import main

ON_SPARK = "workers/spark/runner.py"


def test_an_audit_enters_the_documented_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folder, "SETTLED_S", 0.0)
    log = OracleLog(Oracle(SECRET))
    log.run(asks(1, ["a", "b"]), 60, (0, 10))
    log.rows[30]["verdicts"][0] |= {"outcome": "throttle", "throttle_ms": 5}  # for the rules and the judge
    log.write(tmp_path / "log")
    named = [each for each in steps("A row of the decision log", 7, 9) if each != ON_SPARK]
    with watching() as entered:
        assert main(Processes(), ["audit", "--log", f"{tmp_path}/log", "--out", f"{tmp_path}/out"]) == 1
    assert len(named) > 12
    assert [name for name, place in first_entries(named, entered).items() if place < 0] == []
