"""Progress without a terminal: now and then a line with the share of the work and the time."""

from __future__ import annotations

import re

import pytest

from tests.service import eventually
from workers.jobs import progress as shown
from workers.jobs.progress import progress


def test_lines_tell_the_share_of_the_whole_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shown, "LINE_EVERY_S", 0.01)
    said: list[str] = []

    def lines() -> list[str]:
        said.extend(capsys.readouterr().err.splitlines())
        return said

    with progress("audit") as bar:
        eventually(lambda: any(": 0 % " in line for line in lines()))
        bar.advance(2.5)
        bar.advance(40)
        eventually(lambda: any(": 42 % " in line for line in lines()))
    assert all(re.fullmatch(r"quotagate: audit: \d+ % after \d+ s", line) for line in said)
    shares = [int(line.split()[2]) for line in said]
    assert shares == sorted(shares)


def test_quick_job_shows_no_line(capsys: pytest.CaptureFixture[str]):
    assert shown.LINE_EVERY_S == 10.0
    with progress("audit") as bar:
        bar.advance(100)
    assert capsys.readouterr().err == ""
