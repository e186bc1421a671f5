"""How long the store may be silent, depending on how busy the node is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from app.admission.gathering import patience
from app.admission.gathering.patience import BUSY_PATIENCE_S, Moment, Patience


def test_node_that_idles_half_of_the_time_is_quiet():
    judged = Patience(0.05)
    assert judged.lasts_s(Moment(10.0, 1.0), Moment(11.0, 1.5)) == 0.05
    assert judged.lasts_s(Moment(10.0, 1.0), Moment(11.0, 1.501)) == BUSY_PATIENCE_S


def test_larger_budget_is_kept_on_a_busy_node():
    judged = Patience(2.0)
    assert judged.lasts_s(Moment(10.0, 1.0), Moment(10.1, 1.1)) == 2.0


def test_busy_time_grows_with_work():
    judged = Patience(0.05)
    began, ran_s = judged.now(time.perf_counter()), time.thread_time()
    while time.thread_time() < ran_s + 0.02 or judged.now(0).busy_s < began.busy_s + 0.02:
        pass  # the kernel updates its account a few milliseconds late
    worked = judged.now(time.perf_counter())
    assert worked.busy_s - began.busy_s >= 0.02
    judged.close()


def test_thread_time_is_used_without_the_kernels_accounting(monkeypatch):
    monkeypatch.setattr(patience, "SCHEDSTAT", "/nowhere/schedstat")
    judged = Patience(0.05)
    before = time.thread_time()
    assert before <= judged.now(0.0).busy_s <= time.thread_time()


def test_crowded_machine_counts_as_busy():
    """The loop is idle while it waits for a store that waits for a processor."""
    judged = Patience(0.05)
    assert judged.lasts_s(Moment(10.0, 1.0, 5.0), Moment(11.0, 1.1, 5.25)) == 0.05
    assert judged.lasts_s(Moment(10.0, 1.0, 5.0), Moment(11.0, 1.1, 5.251)) == BUSY_PATIENCE_S
    judged.close()


def test_only_the_loop_counts_without_pressure_accounting(monkeypatch):
    monkeypatch.setattr(patience, "PRESSURE", "/nowhere/pressure")
    judged = Patience(0.05)
    assert judged.now(0.0).crowded_s == 0
    judged.close()


def test_node_that_was_busy_before_the_call_is_busy(monkeypatch: pytest.MonkeyPatch):
    judged = Patience(0.05)
    busy_s = [0.0]
    monkeypatch.setattr(judged, "now", lambda at: Moment(at, busy_s[0]))
    for n in range(30):  # 100 ms apart, busy for 60 of them
        began = judged.begin(n / 10)
        busy_s[0] += 0.06
    busy_s[0] -= 0.06
    assert judged.lasts_s(began, Moment(began.at + 0.06, began.busy_s)) == BUSY_PATIENCE_S
    for n in range(30, 60):  # and quiet again
        began = judged.begin(n / 10)
    assert judged.lasts_s(began, Moment(began.at + 0.06, began.busy_s)) == 0.05


def test_time_that_the_kernel_accounts_for_is_in_seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The loop's thread ran for 3 s and waited for 2.5 s; any thread of the machine waited for 7.25 s."""
    schedstat, pressure = tmp_path / "schedstat", tmp_path / "cpu"
    schedstat.write_text("3000000000 2500000000 17\n")
    pressure.write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=7250000\nfull avg10=0.00 total=1\n")
    monkeypatch.setattr(patience, "SCHEDSTAT", str(schedstat))
    monkeypatch.setattr(patience, "PRESSURE", str(pressure))
    judged = Patience(0.05)
    assert judged.now(9.0) == Moment(9.0, 5.5, 7.25)
    judged.close()
