"""`python -m workers.jobs JOB ...`: a job in the processes of this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from workers.jobs import command

if TYPE_CHECKING:
    from workers.jobs.files import FooterCheck, LogPart
    from workers.jobs.period import Period
    from workers.jobs.progress import Progress
    from workers.jobs.runner import ProcessRunner


class Processes:
    """Runs jobs in the processes of this machine."""

    program = "quotagate"
    description = "Jobs over the decision log, in the processes of this machine."
    has_files = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the option for the number of processes."""
        parser.add_argument(
            "--processes",
            type=command.positive,
            help="at most so many processes; default: one for each processor",
        )

    def row_groups(self, url: str, period: Period, check: FooterCheck | None = None) -> Sequence[LogPart]:
        """The row groups of the log's files."""
        from workers.jobs.files import row_groups  # pyarrow is slow to import, and --help does not need it

        return row_groups(url, period, check)

    def runner(self, arguments: argparse.Namespace, progress: Progress, rows: int) -> ProcessRunner:
        """Processes, or this one alone for few rows."""
        from workers.jobs.runner import ProcessRunner

        return ProcessRunner(progress, rows, arguments.processes)

    def explain(self, _error: Exception, /) -> str | None:
        """Explain nothing: errors of this code are shown whole."""
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job in the processes of this machine; returns the exit code."""
    command.prepare()
    return command.main(Processes(), argv)


if __name__ == "__main__":
    sys.exit(main())
