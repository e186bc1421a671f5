"""Finds the verdicts of a log whose limit was not in force; ``limits`` has the rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from workers.jobs.audit.bucket_findings import SCHEMA
from workers.jobs.audit.limits import (
    FactorChange,
    JudgedPeriod,
    LimitChange,
    LimitUse,
    StaleLimit,
    stale_limits,
)
from workers.jobs.period import Period
from workers.jobs.verdicts import flags, integers, quotas_of, values

Stale = Mapping[tuple[str, str], Sequence[StaleLimit]]
"""The limits that were not in force when nodes used them, by quota key and entity."""

COLUMNS: Final = ("node", "principal", "at_ms", "order", "outcome")


def stale_uses(
    uses: pa.Table,
    changes: Mapping[str, Sequence[LimitChange]],
    factors: Mapping[str, Sequence[FactorChange]],
    times: JudgedPeriod,
) -> Stale:
    """The limits that nodes used while they were not in force.

    Args:
        uses: quota, entity, node, limit, verdicts, first_ms and last_ms of each use.
        changes: the changes of quotas by entity.
        factors: the throttle factors that each node began to apply.
    """
    used: dict[tuple[str, str], list[LimitUse]] = defaultdict(list)
    for use in uses.to_pylist():
        used[use.pop("quota"), use.pop("entity")].append(LimitUse(**use))
    found = {
        (quota, entity): list(stale_limits(quota, some, changes.get(entity, ()), factors, times))
        for (quota, entity), some in used.items()
    }
    return {where: some for where, some in found.items() if some}


def stale_verdicts(stale: Stale, period: Period, pieces: Iterable[pa.Table]) -> pa.Table:
    """The verdicts of a partition that ``stale_uses`` covers, as findings: counts, each with an example.

    There is one row for each principal, bucket and limit.
    """
    found: dict[tuple[Any, ...], list[Any]] = {}
    for piece in pieces:
        applied = _column(piece, "applied")
        quotas = quotas_of(applied)
        of_stale = np.array([(quota["quota"], quota["entity"]) in stale for quota in quotas], bool)
        judged = period.mask(integers(_column(piece, "at_ms"))) & flags(_column(piece, "by_store"))
        rows = piece.filter(pa.array(of_stale[integers(applied.indices)] & judged))
        columns = (values(_column(rows, name)) for name in COLUMNS)
        places = integers(_column(rows, "applied").indices).tolist()
        for place, node, principal, at_ms, order, outcome in zip(places, *columns, strict=True):
            quota = quotas[place]
            for use in stale[quota["quota"], quota["entity"]]:
                if (use.node, use.limit) != (node, quota["limit"]) or not use.from_ms <= at_ms <= use.to_ms:
                    continue
                where = principal, quota["quota"], quota["bucket"], quota["limit"]
                example = at_ms, order, outcome, quota["entity"], use.exact
                known = found.setdefault(where, [example, 0])
                known[:] = min(known[0], example), known[1] + 1
    return pa.Table.from_pylist([_finding(where, *counted) for where, counted in found.items()], SCHEMA)


def _finding(where: tuple[Any, ...], example: tuple[Any, ...], times: int) -> dict[str, Any]:
    principal, quota, bucket, limit = where
    at_ms, order, outcome, entity, exact = example
    return {
        "case": "stale",
        "principal": principal,
        "quota": quota,
        "bucket": bucket,
        "at_ms": at_ms,
        "order": order,
        "amount": float(times),
        "logged": f"{outcome}, limit {_number(limit)} of {entity}",
        "exact": exact,
        "stale": times,
    }


def _number(limit: float) -> str:
    """A number as text, without a fraction if it is whole."""
    return str(int(limit)) if limit.is_integer() and limit < 2**53 else str(limit)


def _column(table: pa.Table, name: str) -> pa.Array:
    return table.column(name).combine_chunks()
