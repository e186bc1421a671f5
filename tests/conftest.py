"""How a run of all tests goes: who runs with whom, what is shown at its end, what has to be loaded first."""

from __future__ import annotations

import signal
import warnings
from collections import defaultdict
from typing import Any, Final

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.said import said

# kafka-python reads its schemas with a function of the standard library that was once to go, and is to stay.
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "(read|open)_text is deprecated", DeprecationWarning)
    import kafka  # noqa: F401

# A shell lets what it starts in the background ignore Ctrl-C, and programs under test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TOGETHER: Final = frozenset({"tests/kafka", "tests/spark"})
"""Folders whose tests share something that takes long to start: brokers, a Spark session."""
FIRST: Final = "tests/kafka"
"""What takes longest, and mostly waits, begins beside what computes."""

_told: dict[str, list[str]] = defaultdict(list)


class Together(LoadScopeScheduling):  # type: ignore[misc]  # which is not typed
    """With several workers (`-n 2`), one of them runs all of a file, or of a folder that shares something.

    xdist's own groups mean nothing to pytest 9.2 (pytest-dev/pytest-xdist, issue 1386).
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((folder for folder in TOGETHER if file.startswith(f"{folder}/")), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together:
    """Files go to whichever worker is free, in the order in which they were collected."""
    config.option.loadscopereorder = False
    return Together(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first."""
    items.sort(key=lambda item: not item.nodeid.startswith(f"{FIRST}/"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what a test told."""
    if report.when == "call":
        for name, output in report.sections:
            if name.startswith("Captured stdout"):
                _told[report.nodeid] += said(output)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what the tests told."""
    if any(_told.values()):
        terminalreporter.section("what the tests met")
        for test, lines in _told.items():
            if lines:
                terminalreporter.write_line(test.removeprefix("tests/"))
                for line in lines:
                    terminalreporter.write_line(f"  {line.strip()}")
