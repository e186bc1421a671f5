"""The errors that end a job; each has the exit code, and its message is for the person who started the job.

JobError            exit code 1: the job cannot be done, or a file is invalid
└── JobUsageError   exit code 2: the command line or a setting can never work
"""

from __future__ import annotations


class JobError(Exception):
    """The job cannot be done."""

    exit_code = 1


class JobUsageError(JobError):
    """The command line or a setting can never work."""

    exit_code = 2
