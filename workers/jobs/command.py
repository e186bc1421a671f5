"""The command line of the jobs, for both drivers: `quotagate JOB` and `quotagate spark JOB`.

Exit codes: 0 done, and every check passed; 1 refused or failed, or a check did not pass; 2 wrong use.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, Protocol, cast

from app.terminal import escape_output, plain_lines
from workers.arguments import PlainArgumentParser
from workers.jobs.audit import job as audit
from workers.jobs.backfill import job as backfill
from workers.jobs.errors import JobError, JobUsageError
from workers.jobs.recommend import job as recommend
from workers.jobs.whatif import job as whatif

if TYPE_CHECKING:  # pyarrow is slow to import, and --help does not need it
    from workers.jobs.files import FooterCheck, LogPart
    from workers.jobs.period import Period
    from workers.jobs.progress import Progress
    from workers.jobs.runner import Runner

JOBS: Final = {
    "backfill": (backfill, "compute what every filter and window should hold at a moment"),
    "audit": (audit, "prove from the log that the limits held"),
    "whatif": (whatif, "replay the log under other quotas"),
    "recommend": (recommend, "recommend limits from the log"),
}
"""Module and summary of each job, by name. A module has ``add_arguments`` and ``run``; only ``run`` imports
modules that compute, so that its help appears at once."""

EXIT_CODES: Final = "0 done, and everything checked held; 1 refused, failed, or did not hold; 2 wrong use."


class Driver(Protocol):
    """Where jobs run: in the processes of this machine, or on Spark."""

    program: str
    description: str
    has_files: bool
    """Whether the log is files, and not a data frame."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the driver's own arguments."""

    def row_groups(self, url: str, period: Period, check: FooterCheck | None = None) -> Sequence[LogPart]:
        """The parts of the log that jobs read, for the hours of a period.

        Raises:
            JobError: there are no rows, or a part is invalid.
        """

    def runner(
        self, arguments: argparse.Namespace, progress: Progress, rows: int
    ) -> AbstractContextManager[Runner]:
        """A runner for a job that reads about ``rows`` rows."""

    def explain(self, _error: Exception, /) -> str | None:
        """The cause of an error of the driver, for people; None if the error is not the driver's."""


def command_line(driver: Driver) -> PlainArgumentParser:
    """The parser of all jobs' arguments."""
    parser = PlainArgumentParser(
        prog=driver.program, description=driver.description, epilog=f"Exit codes: {EXIT_CODES}"
    )
    jobs = parser.add_subparsers(dest="job", metavar="JOB", required=True)
    for name, (job, summary) in JOBS.items():
        subparser = jobs.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        driver.add_arguments(subparser)
        _add_common_arguments(subparser)
        job.add_arguments(subparser)
        subparser.set_defaults(run=job.run)
    return parser


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log",
        default=os.environ.get("QUOTAGATE_LOG_URL"),
        help="URL of the decision log; default: QUOTAGATE_LOG_URL",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the output folder of an earlier run"
    )
    parser.add_argument(
        "--max-ids",
        type=positive,
        default=os.environ.get("QUOTAGATE_MAX_IDS_PER_PRINCIPAL", "1000000"),
        help="ids remembered for each principal; default: QUOTAGATE_MAX_IDS_PER_PRINCIPAL, %(default)s",
    )


def prepare() -> None:
    """Prepare this process for a job, which it ends with."""
    escape_output()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the files in the scratch folder go


def positive(text: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0")
    return int(text)


def main(driver: Driver, argv: Sequence[str] | None = None) -> int:
    """Run a job; returns the exit code."""
    parser = command_line(driver)
    arguments = parser.parse_args(argv)
    try:
        return cast("int", arguments.run(arguments, driver))
    except JobUsageError as error:
        print(f"quotagate: {plain_lines(map(parser.redacted, error.args))}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except JobError as error:
        print(f"quotagate: {plain_lines(error.args)}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if (cause := driver.explain(error)) is None:
            raise
        print(f"quotagate: {cause}", file=sys.stderr)  # noqa: T201
        return 1
