"""The errors that end a job; each has the exit code, and its message is for the person who started the job.

JobError            exit code 1: the job cannot be done, or a file is invalid
└── JobUsageError   exit code 2: the command line or a setting can never work
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote

from app.redaction import url_without_secrets

NO_CONNECTOR: Final = re.compile(
    r'No FileSystem for scheme "?(?P<scheme>\w+)|Class \S*?\.fs\.(?P<package>\w+)\.\w+ not found'
)
FAILED_FILE: Final = re.compile(r"\[FAILED_READ_FILE\S*\] Encountered error while reading file (\S+?)\.? ")
NOISE: Final = re.compile(
    r"An error occurred while calling|at \S+\(|\.\.\. \d+ more|JVM stacktrace:|SQLSTATE:"
)
EXCEPTION: Final = re.compile(r"^(?:: )?(?:[\w$]+\.)+(?:\w*(?:Exception|Error))(?:: |$)")
SHOWN_LINES: Final = 6


class JobError(Exception):
    """The job cannot be done."""

    exit_code = 1


class JobUsageError(JobError):
    """The command line or a setting can never work."""

    exit_code = 2


def translate(error: Exception, url: str = "") -> str:
    """Return the cause of an error of Spark or Hadoop for people, without Java's classes and stack.

    Args:
        url: a URL whose secrets the error may contain.
    """
    java = getattr(error, "java_exception", None)
    text = f"{error}" if java is None else f"{java.toString()}\n{error}"
    if url:
        text = text.replace(url, url_without_secrets(url))
    if found := NO_CONNECTOR.search(text):
        scheme = found["scheme"] or found["package"]
        return (
            f"Spark has no connector for {scheme}://; start the job by spark-submit, with --packages or"
            " --jars that bring it"
        )
    if "PATH_NOT_FOUND" in text or "FileNotFoundException" in text:
        return "there is no such file or folder"
    if "AccessControlException" in text or "Permission denied" in text:
        return "may not be read: permission denied"
    lines = [EXCEPTION.sub("", line.strip()) for line in text.splitlines() if not NOISE.match(line.strip())]
    return next((line for line in lines if line), type(error).__name__)


def explain(message: str) -> str:
    """A short form of Spark's error message: the file that cannot be read, else the first lines."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if match := FAILED_FILE.search(f"{message} "):
        hint = message[match.end() - 1 :].partition("\n")[0].partition("SQLSTATE")[0].strip()
        return f"{unquote(match[1]).removeprefix('file://')}: {hint or 'is damaged: it cannot be read'}"
    if NO_CONNECTOR.search(message):
        return f"the job failed: {translate(RuntimeError(message))}"
    shown = [EXCEPTION.sub("", line) for line in lines if not NOISE.match(line)]
    return "\n  ".join(["the job failed:", *shown[:SHOWN_LINES]])
