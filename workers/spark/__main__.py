"""The command line of the jobs: `python -m workers.spark JOB ...`, which spark-submit starts too.

Exit codes: 0 done, and every check passed; 1 refused or failed, or a check did not pass; 2 wrong use.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Final, cast

from app.terminal import escape_output, plain
from workers.arguments import PlainArgumentParser
from workers.spark import backfill
from workers.spark.audit import job as audit
from workers.spark.errors import JobError, JobUsageError, explain

JOBS: Final = {
    "backfill": (backfill, "compute what every filter and window should hold at a moment"),
    "audit": (audit, "prove from the log that the limits held"),
}
"""Module and summary of each job, by name. A module has ``add_arguments`` and ``run``; only ``run`` imports
Spark, so that its help appears at once."""

EXIT_CODES: Final = "0 done, and everything checked held; 1 refused, failed, or did not hold; 2 wrong use."


def command_line() -> PlainArgumentParser:
    """The parser of all jobs' arguments."""
    parser = PlainArgumentParser(
        prog="quotagate spark",
        description="Spark jobs over the decision log.",
        epilog=f"Exit codes: {EXIT_CODES}",
    )
    jobs = parser.add_subparsers(dest="job", metavar="JOB", required=True)
    for name, (job, summary) in JOBS.items():
        subparser = jobs.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        _add_common_arguments(subparser)
        job.add_arguments(subparser)
        subparser.set_defaults(run=job.run)
    return parser


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--master",
        type=_master,
        help="where to run: spark://..., k8s://..., yarn; default: spark-submit's, else local[*]",
    )
    parser.add_argument(
        "--memory",
        type=_memory,
        default="2g",
        help="memory of the Java on this machine; default: %(default)s",
    )
    parser.add_argument("--java", default="", metavar="OPTIONS", help="further options for that Java")
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
        type=_positive,
        default=os.environ.get("QUOTAGATE_MAX_IDS_PER_PRINCIPAL", "1000000"),
        help="ids remembered for each principal; default: QUOTAGATE_MAX_IDS_PER_PRINCIPAL, %(default)s",
    )


def _master(text: str) -> str:
    if "@" in text:  # Spark's own error shows it
        raise argparse.ArgumentTypeError("must be a master such as spark://HOST:PORT, without a login")
    return text


def _memory(text: str) -> str:
    if not re.fullmatch(r"[1-9][0-9]*[kmgt]b?", text, re.IGNORECASE):  # Java's own error shows it
        raise argparse.ArgumentTypeError("must be a size such as 512m or 2g")
    return text


def _positive(text: str) -> int:
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number above 0")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job; returns the exit code."""
    escape_output()
    parser = command_line()
    arguments = parser.parse_args(argv)
    try:
        return cast("int", arguments.run(arguments))
    except JobUsageError as error:
        print(plain(f"quotagate: {parser.redacted(str(error))}"), file=sys.stderr)  # noqa: T201
        return error.exit_code
    except JobError as error:
        print(plain(f"quotagate: {error}"), file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not type(error).__module__.startswith(("pyspark.", "py4j.")):
            raise
        print(f"quotagate: {explain(str(error))}", file=sys.stderr)  # noqa: T201
        return 1


if __name__ == "__main__":
    sys.exit(main())
