"""How many cores a process may use, and how many API processes there are by default."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.node import cores
from app.node.settings import MAX_PROCESSES, Settings


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with eight cores, and a folder of control groups without a limit."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    monkeypatch.setattr(cores, "CONTROL_GROUPS", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max 100000", 8),
        ("400000 100000", 4),
        ("250000 100000", 3),
        ("50000 100000", 1),
        ("1600000 100000", 8),
        ("", 8),
        ("400000 0", 8),
    ],
)
def test_a_containers_limit_counts(eight: Path, limit: str, expected: int):
    (eight / "cpu.max").write_text(f"{limit}\n")
    assert cores.available() == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", 8), ("200000", 2)])
def test_limits_of_the_first_version_count_too(eight: Path, quota: str, expected: int):
    (eight / "cpu").mkdir()
    (eight / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (eight / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cores.available() == expected


def test_auto_leaves_one_core_to_the_store(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QUOTAGATE_PROCESSES", "auto")
    assert Settings().processes == 7
    for count, expected in ((1, 1), (2, 1), (3, 2), (1_000, MAX_PROCESSES)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid, count=count: set(range(count)))
        assert Settings().processes == expected


def test_a_number_stays_what_it_is(monkeypatch: pytest.MonkeyPatch):
    assert Settings().processes == 1
    monkeypatch.setenv("QUOTAGATE_PROCESSES", "12")
    assert Settings().processes == 12
