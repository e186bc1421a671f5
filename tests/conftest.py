"""How a run of all tests goes: who runs with whom, what is shown at its end, what has to be loaded first."""

from __future__ import annotations

import signal
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Final

import pytest

from tests.said import said

# kafka-python reads its schemas with a function of the standard library that was once to go, and is to stay.
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "(read|open)_text is deprecated", DeprecationWarning)
    import kafka  # noqa: F401

# A shell lets what it starts in the background ignore Ctrl-C, and programs under test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

HERE: Final = Path(__file__).parent
TOGETHER: Final = frozenset({"kafka", "spark"})
"""Folders whose tests share something that takes long to start: brokers, a Spark session."""

_told: dict[str, list[str]] = defaultdict(list)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers (`-n 2`), one of them runs all of a file, or of a folder that shares something."""
    for item in items:
        parts = item.path.relative_to(HERE).parts if item.path.is_relative_to(HERE) else item.path.parts
        group = parts[0] if parts[0] in TOGETHER else "/".join(parts)
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what a test told."""
    if report.when == "call":
        for name, output in report.sections:
            if name.startswith("Captured stdout"):
                _told[report.nodeid.partition("@")[0]] += said(output)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what the tests told."""
    if any(_told.values()):
        terminalreporter.section("what the tests met")
        for test, lines in _told.items():
            if lines:
                terminalreporter.write_line(test.removeprefix("tests/"))
                for line in lines:
                    terminalreporter.write_line(f"  {line.strip()}")
