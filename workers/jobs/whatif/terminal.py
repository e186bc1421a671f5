"""The printed summary of a what-if, or the first differences of a log that does not reproduce itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from app.domain.decision import OUTCOMES
from app.terminal import count, duration, plain
from workers.jobs.errors import JobError
from workers.jobs.period import format_instant
from workers.jobs.whatif.compared import Compared
from workers.jobs.whatif.page import most_touched, name_of
from workers.jobs.whatif.report import WhatIfReport
from workers.jobs.whatif.reproduction import Reproduction

NAMED: Final = 10
"""How many principals are printed; the report has all."""


def summary(report: WhatIfReport, files: Sequence[str], out: str, took_s: float) -> str:
    """The text for the terminal.

    Args:
        files: the names of the files of quotas.
    """
    found = report.what_if
    reproduction, overall = found.reproduction, found.overall
    counts = f"{reproduction.reproduced:,} of {reproduction.decisions:,}"
    lines = [
        f"{counts} decisions reproduced{_causes(reproduction)}",
        *_table(overall),
        f"{count(overall.newly_refused, 'ask that was', 'asks that were')} admitted would be refused",
        f"{count(overall.newly_admitted, 'ask that was', 'asks that were')} refused would be admitted",
    ]
    touched = most_touched(found)
    if touched:
        lines.append(f"{len(touched):,} of {len(found.principals):,} principals are touched; most of all:")
        lines += [f"  {plain(name_of(name))}: {_change(each)}" for name, each in touched[:NAMED]]
    gone, shadow = [], []
    for (entity, key), outcome in found.quotas.items():
        if outcome.limits_before and outcome.limit_after is None:
            gone.append(f"{entity} {key}")
        if outcome.shadow_after:
            shadow.append(f"{entity} {key}")
    of = "file" if len(files) == 1 else "files"
    if gone:
        one = f"quota of the log is not in the {of}, so it limits nobody"
        more = f"quotas of the log are not in the {of}, so they limit nobody"
        lines.append(f"{count(len(gone), one, more)}: {_named(gone)}")
    if shadow:
        one = f"quota of the {of} is in shadow, so it refuses nobody"
        more = f"quotas of the {of} are in shadow, so they refuse nobody"
        lines.append(f"{count(len(shadow), one, more)}: {_named(shadow)}")
    lines.append(f"{took_s:.0f} s; the report is {out}/report.html")
    if len(files) == 1:
        lines.append(f"next: quotagate quotas plan -f {files[0]}")
    else:
        lines += [f"next: quotagate quotas plan -f {file} --only-named" for file in files[1:]]
    return "\n".join(lines)


def _named(quotas: Sequence[str]) -> str:
    return ", ".join([*map(plain, quotas[:NAMED]), *(["…"] if len(quotas) > NAMED else [])])


def differences(
    found: Reproduction, missing_batches: int, missing_rows: int, consequence: str, more: str = ""
) -> JobError:
    """The error for a log that does not reproduce itself.

    Args:
        missing_batches, missing_rows: what the log lacks, by its numbers.
        consequence: the work that was left out for this reason.
        more: a sentence on where to read more.
    """
    if missing_batches or missing_rows:
        batches = count(missing_batches, "batch", "batches")
        rows = count(missing_rows, "row", "rows")
        reason = f"{batches}, and {rows} of others, are missing from the log"
    elif found.is_implausible:
        seen = f"{found.falsely_seen:,} of {found.new_ids:,} new ids were taken as seen"
        reason = f"{seen}, more than chance explains"
    else:
        reason = (
            "rows were changed, or --combine-delays or --max-ids are not those of the nodes; "
            "`quotagate audit` says more"
        )
    return JobError(
        f"the log does not reproduce itself, so {consequence}: "
        f"{found.other:,} of {found.decisions:,} decisions differ for no known cause: {reason}.{more}",
        *_examples(found),
    )


def _examples(found: Reproduction) -> Iterator[str]:
    for each in found.examples:
        of = f", {each.quota} of {each.bucket}" if each.quota else ""
        batch, place = each.identity
        yield (
            f"  {format_instant(each.at_ms)}, {name_of(each.principal or '')}{of}: logged {each.logged}, "
            f"exact {each.exact} (batch {batch}, place {place})"
        )


def _causes(found: Reproduction) -> str:
    counts = ", ".join(f"{cause} {times:,}" for cause, times in found.causes.most_common() if times)
    return f"; the others by cause: {counts}" if counts else ""


def _table(overall: Compared) -> Iterator[str]:
    yield f"{'':9} {'before':>13} {'after':>14}"
    for outcome in OUTCOMES:
        before, after = overall.before.decisions[outcome], overall.after.decisions[outcome]
        yield f"{outcome:9} {before:13,} {after:14,}"
    waits = (duration(each.wait_ms) for each in (overall.before, overall.after))
    yield f"{'all waits':9} {next(waits):>13} {next(waits):>14}"


def _change(each: Compared) -> str:
    waits = f"all waits {duration(each.before.wait_ms)} before, {duration(each.after.wait_ms)} after"
    return f"{each.newly_refused:,} newly refused, {each.newly_admitted:,} newly admitted, {waits}"
