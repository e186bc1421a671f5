"""Both replays of a log, side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from app.domain.ladder import Quotas
from app.domain.quota import Quota
from workers.jobs.verdicts import ORDERS_PER_MS
from workers.jobs.whatif.causes import EARLY_MS
from workers.jobs.whatif.compared import Compared, QuotaOutcome, UsageSeries
from workers.jobs.whatif.reproduction import Reproduction, ReproductionCheck
from workers.jobs.whatif.rows import LoggedAsk, LoggedChange, LoggedRow
from workers.jobs.whatif.simulation import Assumptions, Simulation
from workers.jobs.whatif.slices import RowDecoder, RowSlice


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The result of a what-if.

    Attributes:
        reproduction: whether the log reproduces itself. If ``other`` is above 0, the rest is empty.
        principals: by name; asks without a principal, such as connections, have the name ``""``.
        quotas: by entity and key.
        series: of the first principals, at most ``MOST_SERIES``.
        limits: the other quotas of these principals, by principal and key; of several of a key the first.
    """

    reproduction: Reproduction
    overall: Compared
    principals: Mapping[str, Compared]
    quotas: Mapping[tuple[str, str], QuotaOutcome]
    series: Mapping[str, UsageSeries]
    limits: Mapping[str, Mapping[str, Quota]]


def what_if(
    slices: Iterable[RowSlice], quotas: Quotas, assumptions: Assumptions, to_ms: int | None = None
) -> WhatIf:
    """Replay a log under its own quotas and under others; the latter ends where the former differs.

    Args:
        slices: the rows of the log, each row once, by the places of their first rows.
        quotas: the other quotas.
        to_ms: rows from this time on only explain earlier ones; None without such rows.

    Raises:
        PartialLogError: the log leaves decisions out.
    """
    check = ReproductionCheck(
        assumptions.max_ids, is_whole=assumptions.is_whole, sequential=assumptions.sequential
    )
    simulation = Simulation(quotas, assumptions)
    decoder, found = RowDecoder(), check.found
    for row in _each(decoder.rows(slices), check, to_ms):
        if isinstance(row, LoggedChange):
            check.change(row)
            simulation.change(row)
        else:
            check.follow(row, counts=row.at_ms >= assumptions.from_ms)
            if not found.causes["other"]:
                simulation.take(row)
    check.finish()
    if found.other:
        simulation = Simulation({}, assumptions)
    simulation.finish()
    overall, principals = simulation.results()
    outcomes = simulation.outcomes([each.applied for each in decoder.quotas.values()])
    return WhatIf(found, overall, principals, outcomes, simulation.series, simulation.limits)


def _each(rows: Iterable[LoggedRow], check: ReproductionCheck, to_ms: int | None) -> Iterator[LoggedRow]:
    """The rows before a time. The check expects the asks without the store ``EARLY_MS`` before their rows."""
    held: deque[LoggedRow] = deque()
    for row in rows:
        while held and held[0].place <= row.place - EARLY_MS * ORDERS_PER_MS:
            yield held.popleft()
        if isinstance(row, LoggedAsk) and row.kind == "decision" and row.source == "fallback":
            check.expect(row)
        if to_ms is None or row.at_ms < to_ms:
            held.append(row)
    yield from held
