"""The command line of the job `audit`; ``report`` does the work."""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from workers.jobs.errors import JobUsageError
from workers.jobs.options import add_replay_options, check_replay_options

if TYPE_CHECKING:
    from workers.jobs.command import Driver
    from workers.jobs.period import Period

LEAD_IN_HOURS: Final = 3.0
GRACE_S: Final = 2.0

DESCRIPTION: Final = """\
Recompute from the raw asks what should have been decided, compare it with what was decided, and report
whether the limits held: exit code 0 if all bounds held, 1 if not, with the principals named.

Needs a log of QUOTAGATE_LOG=all. Writes OUT/report.html, OUT/summary.json for programs, OUT/report.json and
OUT/tables.json for the console, and OUT/principals, OUT/buckets, OUT/cases and OUT/overall as Parquet.

examples:
  %(prog)s --out report
  %(prog)s --from 2026-11-21T10:00:00Z --to 2026-11-21T11:00:00Z --out report --overwrite
  %(prog)s --state audit.state --out report --overwrite     (every hour: it reads only the last one)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the audit."""
    parser.description = DESCRIPTION
    parser.add_argument("--out", required=True, help="output folder of the report; must not exist yet")
    parser.add_argument("--from", dest="from_", metavar="INSTANT", help="judge from this instant (ISO 8601)")
    parser.add_argument("--to", metavar="INSTANT", help="judge until before this instant")
    parser.add_argument(
        "--lead-in",
        type=float,
        default=LEAD_IN_HOURS,
        metavar="HOURS",
        help="hours to read before --from, to know what the buckets held; default: %(default)s",
    )
    parser.add_argument(
        "--older",
        action="store_true",
        help="the log was switched on while the store was in use, so buckets may be older than the log: "
        "count an id as new only if that is certain. Implied by --from, and if the log's beginning was "
        "removed",
    )
    parser.add_argument(
        "--state",
        metavar="FILE",
        help="go on from the state that an earlier audit of this log left in this file, and leave a new one: "
        "only files that are new since then are read, and the report is on all; a path or URL, made by the "
        "first audit",
    )
    parser.add_argument(
        "--allow-lost", action="store_true", help="ignore lost charges, after a known failover of the store"
    )
    parser.add_argument(
        "--allow-missing",
        action="store_true",
        help="ignore rows that are missing from the log and charges that the log does not have; and, if rows "
        "are missing, new ids taken as seen",
    )
    parser.add_argument(
        "--allow-clock",
        action="store_true",
        help="ignore rows whose time does not fit their place in the store's order: the store's clock is "
        "known to have been set back",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=GRACE_S,
        metavar="SECONDS",
        help="how long before and after a change of a quota the old and the new limit are both right; "
        "default: %(default)s",
    )
    add_replay_options(parser)


def run(arguments: argparse.Namespace, driver: Driver) -> int:
    """Audit a log; returns 0 if all bounds held, else 1."""
    from workers.jobs.audit.report import (  # pyarrow is slow to import, and --help does not need it
        around,
        audit,
    )
    from workers.jobs.audit.terminal import summary
    from workers.jobs.folder import OutputFolder
    from workers.jobs.period import Period
    from workers.jobs.progress import progress

    check_replay_options(arguments)
    if not 0 <= arguments.grace < math.inf or not 0 <= arguments.lead_in < math.inf:
        raise JobUsageError("--grace and --lead-in: must be 0 or more")
    period = Period.of(arguments.from_, arguments.to)
    if arguments.state is not None:
        _check_state(arguments, period, driver)
    began = time.monotonic()
    with OutputFolder(arguments.out, overwrite=arguments.overwrite) as folder, progress("audit") as bar:
        if arguments.state:
            from workers.jobs.audit.continued import continued

            report, save = continued(driver, arguments, bar, folder)
        else:
            tasks = driver.row_groups(arguments.log, around(arguments, period))
            whole = partial(driver.row_groups, arguments.log, Period())
            with driver.runner(arguments, bar, sum(task.rows for task in tasks)) as runner:
                report = audit(runner, arguments, period, tasks, whole, folder)
    if arguments.state:
        save()
    print(summary(report, arguments.out, time.monotonic() - began))  # noqa: T201  the result
    return 0 if report["held"] else 1


def _check_state(arguments: argparse.Namespace, period: Period, driver: Driver) -> None:
    """Check an audit with a state.

    Raises:
        JobUsageError: the log, or the place of the state, does not go with it.
        JobError: a place cannot be reached.
    """
    from workers.jobs.files import location_of, opened

    if not arguments.state:
        raise JobUsageError("--state: must name a file")
    if period.from_ms is not None or period.to_ms is not None:
        raise JobUsageError("--state: an audit with a state is of the whole log, without --from and --to")
    if not driver.has_files:
        raise JobUsageError("--state: a state covers files of the log, and a data frame has none")
    _, state = opened(location_of(arguments.state))
    _, out = opened(location_of(arguments.out))
    if state.startswith(f"{out.rstrip('/')}/"):
        raise JobUsageError("--state: must not be in the folder of --out, which each run replaces")
