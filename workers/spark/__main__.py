"""The command line of the jobs: `python -m workers.spark JOB ...`, and what spark-submit starts.

Exit codes: 0 done, and what was to be shown held; 1 refused, failed, or did not hold; 2 wrong use.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Final, Protocol, cast

from workers.spark.refused import Refused

JOBS: Final[dict[str, tuple[str, str]]] = {
    "backfill": ("workers.spark.backfill", "say what every filter and window should hold at a moment"),
    "audit": ("workers.spark.audit.job", "prove from the log that the limits held"),
}
"""Jobs by name: where each is, and what it does in one line."""

FAILED_FILE: Final = re.compile(r"\[FAILED_READ_FILE\S*\] Encountered error while reading file (\S+?)\.? ")
SHOWN_LINES: Final = 6


class Job(Protocol):
    """A module that is a job; it imports Spark only once it runs, so that its help comes at once."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """What the job takes beside what every job takes."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it; the exit code."""


def command_line() -> argparse.ArgumentParser:
    """What the jobs take, each after its name."""
    parser = argparse.ArgumentParser(
        prog="quotagate spark",
        description="Spark jobs over the decision log.",
        epilog="Exit codes: 0 done, and what was to be shown held; 1 refused, failed, or did not hold; "
        "2 wrong use.",
    )
    jobs = parser.add_subparsers(dest="job", metavar="JOB", required=True)
    for name, (module, says) in JOBS.items():
        job = cast("Job", importlib.import_module(module))
        about = jobs.add_parser(
            name, help=says, description=says, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        _add_arguments(about)
        job.add_arguments(about)
        about.set_defaults(run=job.run)
    return parser


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every job takes."""
    parser.add_argument(
        "--master",
        help="where to run: spark://..., k8s://..., yarn; default: spark-submit's, else local[*]",
    )
    parser.add_argument("--memory", default="2g", help="of the Java on this machine; default: %(default)s")
    parser.add_argument("--java", default="", metavar="OPTIONS", help="further options of that Java")
    parser.add_argument(
        "--log", default=os.environ.get("QUOTAGATE_LOG_URL"), help="the log; default: QUOTAGATE_LOG_URL"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the folder of an earlier run")
    parser.add_argument(
        "--max-ids",
        type=_positive,
        default=os.environ.get("QUOTAGATE_MAX_IDS_PER_PRINCIPAL", "1000000"),
        help="ids remembered for a principal; default: QUOTAGATE_MAX_IDS_PER_PRINCIPAL, %(default)s",
    )


def _positive(text: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job; the exit code."""
    arguments = command_line().parse_args(argv)
    try:
        return cast("int", arguments.run(arguments))
    except Refused as refused:
        print(f"quotagate: {refused}", file=sys.stderr)  # noqa: T201
        return refused.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not type(error).__module__.startswith(("pyspark.", "py4j.")):
            raise
        print(f"quotagate: {explained(str(error))}", file=sys.stderr)  # noqa: T201
        return 1


def explained(message: str) -> str:
    """What Spark's message says to somebody who has never seen Spark: the file, or its first lines."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if found := FAILED_FILE.search(f"{message} "):
        causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
        why = causes[-1] if causes else "cannot be read as Parquet"
        return f"{found[1].removeprefix('file://')}: {why}"
    return "\n  ".join(["the job failed:", *lines[:SHOWN_LINES]])


if __name__ == "__main__":
    sys.exit(main())
