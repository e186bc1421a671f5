"""An audit that goes on from the state of an earlier one, and reports as an audit of the whole log does."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from app.terminal import count
from workers.jobs.audit.covered_files import OtherLogError, compare
from workers.jobs.audit.replay import LateRowsError
from workers.jobs.audit.report import audit
from workers.jobs.audit.state import AuditState, refused
from workers.jobs.files import log_files
from workers.jobs.folder import OutputFolder
from workers.jobs.period import Period
from workers.jobs.progress import WHOLE, Progress
from workers.jobs.runner import Runner

if TYPE_CHECKING:
    from workers.jobs.command import Driver

OPTIONS: Final = ("max_ids", "combine_delays", "clock", "older", "grace")
"""The options that have to stay the same, as earlier findings depend on them."""

BYTES_OF_A_ROW: Final = 46
HASHED_AT_ONCE: Final = 100
"""Hashing so many rows costs about as much as auditing one."""

COMPARE: Final = 10.0
"""The share of comparing the files in the time of an audit, in per cent."""


class _Scaled:
    """Progress of an audit that also compares files."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._done = progress, 0.0

    def advance(self, share: float) -> None:
        """Count a further share as done."""
        part = share * WHOLE / (WHOLE + COMPARE)
        self._done += part
        self._progress.advance(part)

    def begin(self) -> None:
        """Begin again at zero."""
        self._progress.advance(-self._done)
        self._done = 0.0


def continued(
    driver: Driver, arguments: argparse.Namespace, progress: Progress, folder: OutputFolder
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Audit a log with a state; returns the page's values, and a function that saves the new state.

    Raises:
        JobError: the log cannot be read, or the state is refused.
    """
    options = {f"--{name.replace('_', '-')}": getattr(arguments, name) for name in OPTIONS}
    state = AuditState.load(arguments.state, options)
    files = log_files(arguments.log)
    rows = sum(files.values()) // BYTES_OF_A_ROW
    if state is not None:
        new = sum(size for path, size in files.items() if not path.endswith(tuple(state.files)))
        rows = rows // HASHED_AT_ONCE + new // BYTES_OF_A_ROW
    scaled = _Scaled(progress)
    with driver.runner(arguments, scaled, rows) as runner:
        report, state = _audited(runner, arguments, files, folder, state, scaled.begin)
    return report, partial(state.save, arguments.state, options)


def _audited(
    runner: Runner,
    arguments: argparse.Namespace,
    files: Mapping[str, int],
    folder: OutputFolder,
    state: AuditState | None,
    begin_again: Callable[[], None],
) -> tuple[dict[str, Any], AuditState]:
    """The report, and the state after it."""
    said = []
    if state is not None:
        try:
            return _from(state, runner, arguments, files, folder)
        except LateRowsError as why:
            if state.hours_removed:
                raise refused(arguments.state, f"{why}, and the log no longer has all hours before") from None
            said = [f"  --state: the log was read whole, because {why}"]
            begin_again()
    report, after = _from(AuditState(), runner, arguments, files, folder)
    return report | {"state": said}, after


def _from(
    state: AuditState,
    runner: Runner,
    arguments: argparse.Namespace,
    files: Mapping[str, int],
    folder: OutputFolder,
) -> tuple[dict[str, Any], AuditState]:
    try:
        found = compare(runner, arguments.log, files, state.files, state.key, COMPARE)
    except OtherLogError as error:
        raise refused(arguments.state, error) from None
    before = state.files
    state.hours_removed += found.removed
    if found.differing is not None:
        raise LateRowsError(found.differing)
    report = audit(runner, arguments, Period(), found.tasks, lambda: found.tasks, folder, state)
    state.files = dict(found.files)
    new = len(found.files.keys() - before.keys())
    read = count(new, "new file", "new files")
    said = [f"  --state: read {read} of {len(found.files):,}"] if before else []
    if state.hours_removed:
        hours = count(state.hours_removed, "hour that was", "hours that were")
        said.append(f"  --state: the report has {hours} removed from the log")
    return report | {"state": said}, state
