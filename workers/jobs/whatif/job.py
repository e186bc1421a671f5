"""The command line of the job `whatif`; ``report`` does the work."""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from workers.jobs.options import add_replay_options, check_replay_options

if TYPE_CHECKING:
    from workers.jobs.command import Driver

SCENARIOS: Final = ("as-logged", "retry-after-wait", "stop-while-waiting")

DESCRIPTION: Final = """\
Replay the log under other quotas: which asks would be refused, and how long would callers wait?
First the log is replayed under its own quotas, and has to reproduce itself.

Needs a log of QUOTAGATE_LOG=all. Writes OUT/report.html, OUT/summary.json for programs, OUT/report.json and
OUT/tables.json for the console, and OUT/principals and OUT/quotas as Parquet. Exit code 1 if the log does not
reproduce itself, or for --fail-if-refused.

examples:
  quotagate quotas export > quotas.yaml
  %(prog)s --quotas quotas.yaml --out report
  %(prog)s --quotas quotas.yaml --quotas recommended/quotas.yaml --out report
  %(prog)s --quotas quotas.yaml --scenario retry-after-wait --fail-if-refused 0 --out report --overwrite
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the what-if."""
    parser.description = DESCRIPTION
    parser.add_argument("--out", required=True, help="output folder of the report; must not exist yet")
    parser.add_argument("--from", dest="from_", metavar="INSTANT", help="count from this instant (ISO 8601)")
    parser.add_argument("--to", metavar="INSTANT", help="count until before this instant")
    parser.add_argument(
        "--quotas",
        required=True,
        action="append",
        metavar="FILE",
        help="all quotas that would be in force, as `quotagate quotas export` writes them; given again, the "
        "quotas of this file's entities replace theirs, as `quotas apply --only-named` would",
    )
    parser.add_argument(
        "--scenario",
        choices=SCENARIOS,
        default=SCENARIOS[0],
        help="the reaction of callers: every ask comes when it came; one that is newly throttled comes again "
        "after its wait, up to three times; or a caller sends nothing while it waits, for up to a minute; "
        "default: %(default)s",
    )
    parser.add_argument(
        "--fail-if-refused",
        type=_count,
        metavar="N",
        help="exit with 1 if more than N asks that were admitted would be refused",
    )
    add_replay_options(parser)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number")
    return int(text)


def run(arguments: argparse.Namespace, driver: Driver) -> int:
    """Replay a log; returns 0, or 1 if it differs or if too many asks would be refused."""
    from workers.jobs.folder import OutputFolder  # pyarrow is slow to import, and --help does not need it
    from workers.jobs.period import Period
    from workers.jobs.progress import progress
    from workers.jobs.whatif.log import around
    from workers.jobs.whatif.quotas import proposed
    from workers.jobs.whatif.report import report
    from workers.jobs.whatif.terminal import differences, summary

    quotas = proposed(arguments.quotas, arguments.max_ids)
    check_replay_options(arguments)
    period = Period.of(arguments.from_, arguments.to)
    began = time.monotonic()
    with OutputFolder(arguments.out, overwrite=arguments.overwrite) as folder, progress("whatif") as bar:
        tasks = driver.row_groups(arguments.log, around(period))
        whole = partial(driver.row_groups, arguments.log, Period())
        with driver.runner(arguments, bar, sum(task.rows for task in tasks)) as runner:
            found = report(runner, bar, arguments, quotas, period, tasks, whole, folder)
    if found.what_if.reproduction.other:
        raise differences(
            found.what_if.reproduction,
            found.missing_batches,
            found.missing_rows,
            "its asks were not tried under other quotas",
            f" Counts are in {arguments.out}/summary.json.",
        )
    print(summary(found, arguments.quotas, arguments.out, time.monotonic() - began))  # noqa: T201  the result
    allowed = arguments.fail_if_refused
    return 1 if allowed is not None and found.what_if.overall.newly_refused > allowed else 0
