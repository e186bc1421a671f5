"""The errors that end a job; each has the exit code, and its message is for the person who started the job.

JobError            exit code 1: the job cannot be done, or a file is invalid
└── JobUsageError   exit code 2: the command line or a setting can never work
"""

from __future__ import annotations


class JobError(Exception):
    """The job cannot be done. Each argument is one line, for a terminal."""

    exit_code = 1

    def __init__(self, *lines: str) -> None:
        super().__init__(*lines)

    def __str__(self) -> str:
        return "\n".join(self.args)


class JobUsageError(JobError):
    """The command line or a setting can never work."""

    exit_code = 2
