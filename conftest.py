"""Configures a test run: its tier, the tests that share a worker, the order of files, and the summary."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from collections import defaultdict
from collections.abc import Generator, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import Phase, settings
from xdist.scheduler import LoadScopeScheduling

from tests.report import reported
from tests.tiers import ROOT, is_full, is_full_throughout

# kafka-python reads its schemas with a function that the standard library once deprecated and then kept.
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "(read|open)_text is deprecated", DeprecationWarning)
    import kafka  # noqa: F401

# No example has a deadline: on a busy machine any of them may be slow.
settings.register_profile("without deadline", deadline=None)
# For mutants: a failing test is enough, so Hypothesis does not shrink its example.
settings.register_profile(
    "first-failure", deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate)
)
settings.load_profile("without deadline")

# A shell makes its background jobs ignore Ctrl-C, and the programs under test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TOGETHER: Final = frozenset({"tests/kafka", "tests/kafka_proxy", "tests/spark"})
"""Folders whose tests share something that takes long to start: brokers, a Spark session."""
LONGEST_FIRST: Final = (
    "tests/kafka",
    "tests/contract/test_machine.py",
    "tests/clients",
    "tests/spark",
    "tests/system",
    "tests/load",
    "tests/http/test_protocol.py",
)
"""These tests take longest and begin first, so that no worker is left with one of them at the end."""

SHOWN_S: Final = 10.0
"""Files that take less time in total are not listed."""

PROCESSOR_S: Final = "processor_s"
"""The attribute of a report with the processor time since the previous report."""
MEASURED: Final = pytest.StashKey[float]()
"""The key of the processor time at the last report of this process."""

_reports: dict[str, list[str]] = defaultdict(list)
_seconds: dict[str, float] = defaultdict(float)
"""The duration of each file's tests, with their fixtures."""
_processor_s: dict[str, float] = defaultdict(float)
"""The processor time of each file's tests, and of the child programs that ended."""


class FolderScheduling(LoadScopeScheduling):  # type: ignore[misc]  # which is not typed
    """With several workers (`-n 3`), all tests of a file, or of a folder in `TOGETHER`, run on one worker.

    pytest 9.2 ignores xdist's own groups (pytest-dev/pytest-xdist, issue 1386).
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((folder for folder in TOGETHER if file.startswith(f"{folder}/")), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Three workers for two cores, because tests wait for a third of their time without using a processor."""
    return max(1, (os.cpu_count() or 1) * 3 // 2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FolderScheduling:
    """Give files to free workers in the order of collection."""
    config.option.loadscopereorder = False
    return FolderScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude the collected tests from garbage collection, because they stay until the end.

    The collector would visit all six thousand tests again and again: 13 s of the 32 s of a state machine.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In the first tier, skip files without a test of that tier.

    They import packages that only the full tier installs.
    """
    if "not full" not in config.option.markexpr or not collection_path.is_relative_to(ROOT):
        return None
    return is_full_throughout(collection_path.relative_to(ROOT).as_posix()) or None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the full tier, and sort the longest tests to the front."""
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if is_full(item.nodeid, [each for each in parameters if isinstance(each, str)]):
            item.add_marker("full")
    items.sort(key=lambda item: _rank(item.nodeid))


def _rank(test: str) -> int:
    return next((at for at, path in enumerate(LONGEST_FIRST) if test.startswith(path)), len(LONGEST_FIRST))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Leave out the programs that all tests of a worker shared, such as brokers, which end after its last."""
    yield
    if nextitem is None:
        item.config.stash[MEASURED] = sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Store in each report the processor time since the previous report."""
    report = yield
    now = sum(os.times()[:4])
    vars(report)[PROCESSOR_S] = now - item.config.stash.get(MEASURED, now)
    item.config.stash[MEASURED] = now
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the duration and the processor time of each file, and keep the lines reported with `say`."""
    file = report.nodeid.partition("::")[0]
    _seconds[file] += report.duration
    _processor_s[file] += vars(report).get(PROCESSOR_S, 0.0)  # none if a worker died
    if report.when == "call":
        for name, output in report.sections:
            if name.startswith("Captured stdout"):
                _reports[report.nodeid] += reported(output)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the files that took long, and the lines that the tests reported."""
    if long := {file: seconds for file, seconds in _seconds.items() if seconds >= SHOWN_S}:
        terminalreporter.section("seconds of each file, and of a processor")
        for file, seconds in sorted(long.items(), key=itemgetter(1), reverse=True):
            terminalreporter.write_line(f"{seconds:7.1f} {_processor_s[file]:7.1f} {file}")
    if any(_reports.values()):
        terminalreporter.section("what the tests reported")
        for test, lines in _reports.items():
            if lines:
                terminalreporter.write_line(test.removeprefix("tests/"))
                for line in lines:
                    terminalreporter.write_line(f"  {line.strip()}")
