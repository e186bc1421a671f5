"""An audit that goes on from a state reports what an audit of the whole log does, or refuses the state."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.audits import AuditResult, audit
from tests.jobs.tampering import KINDS, Kind, Row, Rows, Traffic, traffic
from workers.jobs.audit import report

TABLES = ("overall", "principals", "buckets", "cases")
Honest = tuple[Traffic, dict[str, Rows]]


@pytest.fixture(scope="module")
def honest() -> Honest:
    return traffic(["one"])


def tampered(honest: Honest, kind: Kind | None) -> tuple[Traffic, Rows]:
    made, parts = copy.deepcopy(honest)
    if kind is not None:
        whose = kind.of or "one"
        parts[whose] = kind.does(parts[whose])
    return made, [row for part in parts.values() for row in part]


def arrived(rows: Rows, dice: random.Random) -> Rows:
    """The rows in the order in which they reach the log: by themselves, or with their batches."""
    if dice.random() < 0.5:
        return sorted(rows, key=lambda row: row["at_ms"])
    last: dict[str, int] = {}
    for row in rows:
        last[row["batch"]] = max(last.get(row["batch"], 0), row["at_ms"])
    return sorted(rows, key=lambda row: (last[row["batch"]], row["batch"]))


def in_parts(rows: Rows, dice: random.Random) -> list[Rows]:
    """The rows cut into two to four parts."""
    cuts = sorted(dice.randrange(len(rows)) for _ in range(dice.choice((1, 2, 3))))
    return [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]


def found(result: AuditResult) -> dict[str, Any]:
    """The tables of a report, in an order that does not depend on the order of reading."""
    tables = {name: result.rows(name) for name in TABLES}
    return {
        name: sorted(rows, key=lambda row: [str(each) for each in row.values()])
        for name, rows in tables.items()
    }


def continued(made: Traffic, parts: Sequence[Sequence[Row]], folder: Path) -> list[AuditResult]:
    """The audits of a log that grows, with a state."""
    results = []
    for number, rows in enumerate(parts):
        made.write(folder / "log", rows, f"part-{number}")
        if any(row["kind"] == "decision" for part in parts[: number + 1] for row in part):
            results.append(audit(folder / "log", "--state", str(folder / "state")))
    return results


def read_whole(result: AuditResult) -> bool:
    return any("whole" in line for line in result.report["state"])


@pytest.mark.parametrize("settled_ms", [0, 300, 60_000])
@pytest.mark.parametrize("kind", [None, *KINDS], ids=lambda kind: kind.name if kind else "nothing")
def test_runs_with_a_state_find_what_one_run_over_the_whole_log_finds(
    kind: Kind | None, settled_ms: int, honest: Honest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(report, "SETTLED_MS", settled_ms)
    dice = random.Random(f"{kind and kind.name} {settled_ms}")
    made, rows = tampered(honest, kind)
    last = continued(made, in_parts(arrived(rows, dice), dice), tmp_path)[-1]
    whole = audit(made.write(tmp_path / "whole", rows))
    assert found(last) == found(whole)
