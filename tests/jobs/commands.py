"""Runs a job's command in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest

from workers.jobs.__main__ import Processes
from workers.jobs.command import main


class Ran(NamedTuple):
    """A run of the command."""

    code: int
    out: str
    complaints: list[str]
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found

    def rows(self, table: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = pq.read_table(self.folder / table).to_pylist()
        return found


def run_job(job: str, out: Path, *words: str, capsys: pytest.CaptureFixture[str]) -> Ran:
    """Run a job, whose progress is no complaint."""
    code = main(Processes(), [job, "--out", str(out), "--overwrite", *words])
    said = capsys.readouterr()
    return Ran(code, said.out, [line for line in said.err.splitlines() if f"{job}: " not in line], out)
