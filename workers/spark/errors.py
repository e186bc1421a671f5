"""Errors of Spark, as people need them: the cause, without Java's classes and stack."""

from __future__ import annotations

import re
from itertools import takewhile
from typing import Final

NOISE: Final = re.compile(
    r"An error occurred while calling|at \S+\(|\.\.\. \d+ more|JVM stacktrace:|SQLSTATE:"
)
EXCEPTION: Final = re.compile(r"^(?:: )?(?:[\w$]+\.)+(?:\w*(?:Exception|Error))(?:: |$)")
TRACEBACK: Final = "Traceback (most recent call last):"
SHOWN_LINES: Final = 6


def explain(message: str) -> str:
    """A short form of Spark's error message: its first lines."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if TRACEBACK in lines:  # of this code on an executor: its last line says why
        why = takewhile(lambda line: not NOISE.match(line), lines[lines.index(TRACEBACK) + 1 :])
        return f"the job failed: {list(why)[-1]}"
    shown = [EXCEPTION.sub("", line) for line in lines if not NOISE.match(line)]
    return "\n  ".join(["the job failed:", *shown[:SHOWN_LINES]])
