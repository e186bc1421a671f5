"""The command line of the job `recommend`; ``report`` does the work."""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from app.domain.quota import KEYS
from workers.jobs.options import add_replay_options, check_replay_options

if TYPE_CHECKING:
    from workers.jobs.command import Driver

QUANTILE: Final = 0.999
HEADROOM: Final = 0.2
MOST_HEADROOM: Final = 10.0

DESCRIPTION: Final = """\
Recommend limits for each quota key from a period of the log: a default for most entities, limits of their
own for the few with more traffic. Outliers are named apart, and get none.

Needs a log of QUOTAGATE_LOG=all. Writes OUT/quotas.yaml for `quotagate quotas plan` and `apply`,
OUT/report.html, OUT/summary.json for programs, OUT/report.json and OUT/tables.json for the console, and
OUT/limits and OUT/outliers as Parquet. Exit code 1 if the log does not reproduce itself.

examples:
  %(prog)s --from 2026-11-14 --to 2026-11-21 --out recommended
  %(prog)s --keys producer_ids_rate,request_rate --headroom 0.5 --out recommended --overwrite
  quotagate quotas plan -f recommended/quotas.yaml --only-named
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the recommendation."""
    parser.description = DESCRIPTION
    parser.add_argument("--out", required=True, help="output folder of the limits; must not exist yet")
    parser.add_argument("--from", dest="from_", metavar="INSTANT", help="count from this instant (ISO 8601)")
    parser.add_argument("--to", metavar="INSTANT", help="count until before this instant")
    parser.add_argument(
        "--quantile",
        type=_quantile,
        default=QUANTILE,
        metavar="Q",
        help="the share of the asks of each entity that its limits must not hold up; default: %(default)s",
    )
    parser.add_argument(
        "--headroom",
        type=_headroom,
        default=HEADROOM,
        metavar="PART",
        help="the part of the need that is added to it; default: %(default)s",
    )
    parser.add_argument(
        "--keys",
        type=_keys,
        default=list(KEYS),
        metavar="KEY,...",
        help="the quota keys; default: all whose usage occurs in the log",
    )
    add_replay_options(parser)


def _quantile(text: str) -> float:
    return _number(text, 0.5, 1.0, "0.5 to 1")


def _headroom(text: str) -> float:
    return _number(text, 0.0, MOST_HEADROOM, f"0 to {MOST_HEADROOM:g}")


def _number(text: str, least: float, most: float, named: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from {named}")
    return number


def _keys(text: str) -> list[str]:
    keys = text.split(",")
    if unknown := [key for key in keys if key not in KEYS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} must be one of {', '.join(KEYS)}")
    return [key for key in KEYS if key in keys]


def run(arguments: argparse.Namespace, driver: Driver) -> int:
    """Recommend limits; returns 0."""
    from workers.jobs.folder import OutputFolder  # pyarrow is slow to import, and --help does not need it
    from workers.jobs.period import Period
    from workers.jobs.progress import progress
    from workers.jobs.recommend.report import report
    from workers.jobs.recommend.text import summary
    from workers.jobs.whatif.log import around
    from workers.jobs.whatif.quotas import defaults, rules

    check_replay_options(arguments)
    known, matching = defaults(arguments.max_ids), rules()
    period = Period.of(arguments.from_, arguments.to)
    began = time.monotonic()
    with OutputFolder(arguments.out, overwrite=arguments.overwrite) as folder, progress("recommend") as bar:
        tasks = driver.row_groups(arguments.log, around(period))
        whole = partial(driver.row_groups, arguments.log, Period())
        with driver.runner(arguments, bar, sum(task.rows for task in tasks)) as runner:
            found = report(runner, bar, arguments, known, matching, period, tasks, whole, folder)
    print(summary(found, arguments.out, time.monotonic() - began))  # noqa: T201  the result
    return 0
