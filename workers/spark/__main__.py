"""`python -m workers.spark JOB ...`: a job on Spark, which spark-submit starts too."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from workers.jobs import command

if TYPE_CHECKING:
    from workers.jobs.files import FooterCheck, LogPart
    from workers.jobs.period import Period
    from workers.jobs.progress import Progress
    from workers.jobs.runner import Runner


class Spark:
    """Runs jobs on Spark: on this machine, or on the master that Spark's settings name."""

    program = "quotagate spark"
    description = "Jobs over the decision log, on Spark."
    has_files = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of the session."""
        parser.add_argument(
            "--master",
            type=_master,
            help="where to run: spark://..., k8s://..., yarn; default: Spark's settings, else local[*]",
        )
        parser.add_argument(
            "--memory",
            type=_memory,
            help="memory of the Java on this machine; default: Spark's settings, else 2g",
        )
        parser.add_argument("--java", default="", metavar="OPTIONS", help="further options for that Java")
        parser.add_argument(
            "--conf",
            action="append",
            default=[],
            type=_setting,
            metavar="KEY=VALUE",
            help="a setting of Spark, as for spark-submit; may be given several times",
        )

    def row_groups(self, url: str, period: Period, check: FooterCheck | None = None) -> Sequence[LogPart]:
        """The row groups of the log's files."""
        from workers.jobs.files import row_groups  # pyarrow is slow to import, and --help does not need it

        return row_groups(url, period, check)

    @contextmanager
    def runner(self, arguments: argparse.Namespace, progress: Progress, _rows: int, /) -> Iterator[Runner]:
        """A runner with a session of its own."""
        from workers.spark.runner import SparkRunner  # Spark is slow to import, and --help does not need it
        from workers.spark.session import spark_session

        name, settings = f"quotagate {arguments.job}", dict(arguments.conf)
        with spark_session(name, arguments.master, arguments.memory, arguments.java, settings) as spark:
            yield SparkRunner(spark, progress)

    def explain(self, error: Exception, /) -> str | None:
        """The cause of an error of Spark."""
        if not type(error).__module__.startswith(("pyspark.", "py4j.")):
            return None
        from workers.spark.errors import explain

        return explain(str(error))


def _master(text: str) -> str:
    if "@" in text:  # Spark's own error shows it
        raise argparse.ArgumentTypeError("must be a master such as spark://HOST:PORT, without a login")
    return text


def _memory(text: str) -> str:
    if not re.fullmatch(r"[1-9][0-9]*[kmgt]b?", text, re.IGNORECASE):  # Java's own error shows it
        raise argparse.ArgumentTypeError("must be a size such as 512m or 2g")
    return text


def _setting(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name.startswith("spark."):
        raise argparse.ArgumentTypeError("must be a setting of Spark such as spark.executor.memory=4g")
    return name, value


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job on Spark; returns the exit code."""
    command.prepare()
    return command.main(Spark(), argv)


if __name__ == "__main__":
    sys.exit(main())
