"""Runs the audit in this process, and reads its report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest

from app.domain.decision import BYTE_RATES
from workers.jobs import folder as output
from workers.jobs.__main__ import Processes
from workers.jobs.audit import report as audit_report
from workers.jobs.audit.continued import continued
from workers.jobs.audit.judge import AuditRules, judged
from workers.jobs.command import command_line
from workers.jobs.files import row_groups
from workers.jobs.period import Period
from workers.jobs.progress import Silent
from workers.jobs.verdicts import KEY_COLUMNS, ORDERS_PER_MS, BucketRow

DRIVER = Processes()


class AuditResult:
    """One audit's report."""

    def __init__(self, report: dict[str, Any], folder: Path) -> None:
        self.report = report
        self.folder = folder
        self.held: bool = report["held"]
        self.overall: dict[str, Any] = self.rows("overall")[0]
        self.principals = {row["principal"]: row for row in self.rows("principals")}
        self.cases = sorted(self.rows("cases"), key=lambda row: (row["order"] or 0, row["bucket"] or ""))

    def rows(self, table: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = pq.read_table(self.folder / table).to_pylist()
        return found

    @property
    def not_held(self) -> dict[str | None, set[str]]:
        """The principals with findings, and the findings."""
        return {name: set(row["not_held"]) for name, row in self.principals.items() if row["not_held"]}


def arguments(log: Path, out: Path, *more: str) -> argparse.Namespace:
    return command_line(DRIVER).parse_args(["audit", "--log", str(log), "--out", str(out), *more])


def audit(log: Path, *more: str) -> AuditResult:
    """Audit a log; the report goes next to it."""
    out = log.with_name(f"{log.name}-report")
    given = arguments(log, out, "--overwrite", *more)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(output, "SETTLED_S", 0.0)  # no other run has this folder
        with output.OutputFolder(str(out), overwrite=True) as folder:
            if given.state:
                report, save = continued(DRIVER, given, Silent(), folder)
            else:
                report, save = _audited(given, folder), None
        if save is not None:
            save()
    return AuditResult(report, out)


def _audited(given: argparse.Namespace, folder: output.OutputFolder) -> dict[str, Any]:
    period = Period.of(given.from_, given.to)
    tasks = row_groups(given.log, audit_report.around(given, period))
    whole = partial(row_groups, given.log, Period())
    with DRIVER.runner(given, Silent(), sum(task.rows for task in tasks)) as runner:
        return audit_report.audit(runner, given, period, tasks, whole, folder)


def asked_of(rows: Iterable[Mapping[str, Any]]) -> list[BucketRow]:
    """The rows that ``VerdictPartition`` gives, made in plain Python."""
    found = []
    for row in rows:
        alone = row["order"] is None and row["source"] == "local" and len(row["verdicts"]) == 1
        kinds = {"decision", "late", "renewal", "lease", "settlement", "undone", "undo"}
        is_decided = row["kind"] in kinds and row["order"] is not None
        leased = row["change"] if row["kind"] in {"lease", "settlement"} else None
        if (is_decided or alone) and not row["replayed"]:
            delays = [
                said["throttle_ms"]
                for said in row["verdicts"]
                if said["quota"] in BYTE_RATES and said["outcome"] == "delay" and not said["shadow"]
            ]
            whole = {
                **row,
                "order": (row["at_ms"] + 1) * ORDERS_PER_MS - 1 if alone else row["order"],
                "is_refused": row["decision"] in {"throttle", "reject"},
                "byte_delay_ms": max(delays, default=0),
                "lease": leased and leased["what"],
                "lease_ms": leased and json.loads(leased["after"])["lease_ms"],
            }
            in_part = any(verdict["bucket_order"] is not None for verdict in row["verdicts"])
            for verdict in row["verdicts"]:
                if in_part and verdict["bucket_order"] is None:
                    continue  # given by a look in a slot of a cluster, or in a row of its own
                counts_ids = verdict["algorithm"] == "producer_ids"
                is_alone = counts_ids and verdict["observed"] is None and row["kind"] != "renewal"
                named = {"renewal", "lease", "settlement", "undone", "undo"}
                how = row["kind"] if row["kind"] in named else "alone" if is_alone else ""
                ids = row["ids"] if counts_ids else None
                said = {**whole, **verdict, "ids": ids, "key": _key(verdict), "how": how}
                said["order"] = verdict["bucket_order"] if in_part else whole["order"]
                found.append(BucketRow(**{name: said[name] for name in BucketRow._fields}))
    return sorted(found, key=lambda one: (one.key, one.order))


def _key(verdict: Mapping[str, Any]) -> str:
    sampled = verdict["algorithm"] != "producer_ids"
    parts = [str(verdict[name] if sampled or not name.startswith("sample") else 0) for name in KEY_COLUMNS]
    return "\t".join(parts)


def judge(rows: Iterable[Mapping[str, Any]], rules: AuditRules | None = None) -> Findings:
    """Judge the buckets of some rows."""
    found: list[dict[str, Any]] = [
        row
        for _, bucket in groupby(asked_of(rows), attrgetter("key"))
        for row in judged(bucket, rules or AuditRules())
    ]
    return Findings(
        {(row["quota"], row["bucket"], row["principal"]): row for row in found if row["case"] == "tally"},
        [row for row in found if row["case"] != "tally"],
    )


class Findings(NamedTuple):
    """The tallies by quota, bucket and principal, and the cases."""

    tallies: dict[tuple[str, str, str | None], dict[str, Any]]
    cases: list[dict[str, Any]]

    def total(self, count: str) -> Any:
        return sum(tally[count] for tally in self.tallies.values())
