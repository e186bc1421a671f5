"""Large logs: an audit agrees with the known truth, and with DuckDB over the same files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest

from app.domain.decision import OUTCOMES
from tests import proofs
from tests.jobs.audits import audit

FEW = 20_000
"""How many decisions `make test-all` judges."""
MANY = int(os.environ.get("DECISIONS", "10000000"))
"""How many decisions the proof judges, after half as many."""

COUNTED = """
    select principal, count(*) as asks,
      {outcomes},
      count_if(source = 'fallback') as fallback,
      sum(len([v for v in verdicts if v.correction > 0])) as corrections,
      sum(case when "order" is null then 0 else len(verdicts) end) as verdicts,
      sum(list_sum([coalesce(len(v.charged_ids), 0) for v in verdicts])) as charged_ids
    from read_parquet('{log}/*/*/*.parquet') where kind = 'decision' group by all
"""


def generate(folder: Path, decisions: int) -> Path:
    log = folder / f"log-{decisions}"
    command = ["generate", "log", "--to", str(log), "--events", str(decisions), "--seed", "7"]
    subprocess.run([sys.executable, "-m", "app.run.cli", *command], check=True, capture_output=True)
    return log


def counted_by_duckdb(log: Path) -> dict[str | None, dict[str, int]]:
    outcomes = ", ".join(f"count_if(decision = '{outcome}') as {outcome}" for outcome in OUTCOMES)
    found = duckdb.execute(COUNTED.format(outcomes=outcomes, log=log)).fetchall()
    names = ("asks", *OUTCOMES, "fallback", "corrections", "verdicts", "charged_ids")
    return {row[0]: dict(zip(names, (int(each or 0) for each in row[1:]), strict=True)) for row in found}


def truth_of(log: Path) -> dict[str, Any]:
    totals: dict[str, Any] = json.loads((log.with_name(f"{log.name}-truth") / "totals.json").read_text())
    return totals


@pytest.mark.timeout(900)
def test_few_decisions(tmp_path: Path):
    log = generate(tmp_path, FEW)
    found = audit(log)
    assert found.held, found.not_held
    assert found.overall["asks"] == FEW
    assert found.overall["judged"] == found.overall["verdicts"] > 2 * FEW
    assert found.overall["charged_ids"] == truth_of(log)["overall"]["charged"]
    assert not found.cases
    theirs = counted_by_duckdb(log)
    ours = {name: {count: row[count] for count in theirs[name]} for name, row in found.principals.items()}
    assert ours == theirs


@pytest.mark.prove
@pytest.mark.timeout(14_400)
def test_many_decisions(tmp_path: Path):
    rows = []
    for decisions in (MANY // 2, MANY):
        log = generate(tmp_path, decisions)
        out = tmp_path / f"report-{decisions}"
        began = time.monotonic()
        command = [sys.executable, "-m", "workers.jobs", "audit", "--log", str(log), "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        took_s = time.monotonic() - began
        assert done.returncode == 0, done.stdout + done.stderr
        [total] = pq.read_table(out / "overall").to_pylist()
        theirs = counted_by_duckdb(log).values()
        for count in ("asks", *OUTCOMES, "fallback", "corrections", "verdicts", "charged_ids"):
            assert total[count] == sum(each[count] for each in theirs), count
        assert total["judged"] == total["verdicts"]
        rows.append((decisions, total["judged"], took_s))
    proofs.print_table(
        "Many decisions",
        f"DECISIONS={MANY} make prove T=tests/jobs/test_audit_size.py",
        ("decisions", "verdicts judged", "seconds", "seconds a million"),
        [(f"{n:,}", f"{judged:,}", f"{took:.0f}", f"{took / n * 1e6:.0f}") for n, judged, took in rows],
    )
    assert rows[1][2] <= 2.2 * rows[0][2], "twice the data costs at most 2.2 times the time"
