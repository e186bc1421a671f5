"""`quotagate volumes`: its requests, its output, and wrong use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.run.commands.volumes import bar, size
from tests.commands import Command, Gate, quotagate
from tests.unit.run.test_cli_kafka import gate

__all__ = ["gate", "quotagate"]

PATH, DRILL = "/v1/volumes", "/v1/volumes:drill"
STATUS: dict[str, Any] = {
    "factor": 0.2,
    "since_ms": 1_700_000_000_000,
    "valid_until_ms": 1_700_000_300_000,
    "reason": "drill: by admin, until 1700000600000",
    "source": "kafka",
    "next_check_ms": 1_700_000_060_000,
    "volumes": [
        {
            "broker": "1",
            "dir": "/data\x1b[31m",
            "total_bytes": 10 * 1024**3,
            "available_bytes": 2_560 * 1024**2,
            "state": "ok",
            "observed_ms": 1_700_000_000_000,
        },
        {
            "broker": "2",
            "dir": "/data",
            "total_bytes": 1_000,
            "available_bytes": 0,
            "state": "violating",
            "observed_ms": 1_700_000_000_000,
        },
        {
            "broker": "3",
            "dir": "/data",
            "total_bytes": None,
            "available_bytes": None,
            "state": "unknown",
            "observed_ms": None,
        },
    ],
    "drill": {
        "factor": 0.2,
        "since_ms": 1_700_000_000_000,
        "until_ms": 1_700_000_600_000,
        "who": "admin",
    },
}
OFF: dict[str, Any] = {
    "factor": 1.0,
    "since_ms": 0,
    "valid_until_ms": None,
    "reason": "off: nothing is observed",
    "source": None,
    "next_check_ms": None,
    "volumes": [],
    "drill": None,
}


def test_volumes_are_shown_with_bars(quotagate: Command, gate: Gate):
    gate.answers["GET", PATH] = (200, STATUS)
    ran = quotagate("volumes", "--url", gate.url)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0].split() == ["factor", "0.2"]
    assert "reason       drill: by admin, until 1700000600000" in lines
    assert "drill until  2023-11-14 22:23:20Z by admin" in lines
    assert lines[-4].split() == ["BROKER", "DIR", "USED", "LEFT", "OF", "STATE", "OBSERVED"]
    when = ["2023-11-14", "22:13:20Z"]
    used, full = "#" * 15 + "." * 5, "#" * 20
    assert lines[-3].split() == ["1", r"/data\x1b[31m", used, "75%", "2.5", "GiB", "10", "GiB", "ok", *when]
    assert lines[-2].split() == ["2", "/data", full, "100%", "0", "B", "1000", "B", "violating", *when]
    assert lines[-1].split() == ["3", "/data", "-", "-", "-", "unknown", "-"]
    assert "\x1b" not in ran.out


def test_volumes_without_a_source_show_no_table(quotagate: Command, gate: Gate):
    gate.answers["GET", PATH] = (200, OFF)
    ran = quotagate("volumes", "--url", gate.url, "--at-ms", "5")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.split("\n")[:2] == ["factor       1", "since        -"]
    assert "BROKER" not in ran.out
    assert gate.brief() == [("GET", PATH, [("at_ms", "5")])]


def test_volumes_as_json_equal_the_response(quotagate: Command, gate: Gate):
    gate.answers["GET", PATH] = (200, STATUS)
    assert json.loads(quotagate("volumes", "--url", gate.url, "-o", "json").out) == STATUS


def test_drill_starts_and_ends(quotagate: Command, gate: Gate):
    gate.answers["POST", DRILL] = (200, STATUS)
    gate.answers["DELETE", DRILL] = (204, None)
    words = ("--factor", "0.2", "--for", "PT10M", "--reason", "löschen", "--url", gate.url)
    assert quotagate("volumes", "drill", *words).out.startswith("factor       0.2")
    ended = quotagate("volumes", "drill", "--end", "--url", gate.url)
    assert (ended.code, ended.out) == (0, "")
    assert gate.brief() == [("POST", DRILL, {"factor": 0.2, "for_ms": 600_000}), ("DELETE", DRILL)]
    assert gate.asked[0].headers["X-Reason"].encode("latin-1").decode() == "löschen"
    assert gate.asked[1].headers["X-Reason"] is None
    gate.answers["DELETE", DRILL] = (404, {"detail": "There is no drill."})
    again = quotagate("volumes", "drill", "--end", "--url", gate.url)
    assert (again.code, again.err) == (1, "quotagate: 404 There is no drill.\n")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("", "--factor"),
        ("--factor 0.2", "--for"),
        ("--for PT1M", "--factor"),
        ("--factor 1.1 --for PT1M", "--factor"),
        ("--factor -0.1 --for PT1M", "--factor"),
        ("--factor nan --for PT1M", "--factor"),
        ("--factor 0,5 --for PT1M", "--factor"),
        ("--factor 0 --for 10m", "--for"),
        ("--factor 0 --for PT", "--for"),
        ("--factor 0 --for P", "--for"),
        ("--factor 0 --for P1M", "--for"),
        ("--factor 0 --for -PT1M", "--for"),
        ("--end --factor 0", "--end"),
        ("--end --for PT1M", "--end"),
    ],
)
def test_wrong_use_of_a_drill_names_the_option_without_a_request(
    quotagate: Command, gate: Gate, words: str, named: str
):
    ran = quotagate("volumes", "drill", *words.split(), "--url", gate.url)
    assert ran.code == 2
    assert named in ran.err.partition("Invalid value for")[2].partition(":")[0]
    assert gate.asked == []


def test_observation_is_pushed_from_a_file(quotagate: Command, gate: Gate, tmp_path: Path):
    gate.answers["POST", PATH] = (200, OFF)
    seen = tmp_path / "seen.json"
    seen.write_text('{"volumes": [], "complete": false}')
    assert quotagate("volumes", "push", str(seen), "--at-ms", "7", "--url", gate.url).code == 0
    assert gate.brief() == [("POST", PATH, [("at_ms", "7")], {"volumes": [], "complete": False})]
    seen.write_text("{")
    ran = quotagate("volumes", "push", str(seen), "--url", gate.url)
    assert ran.code == 2
    assert "seen.json" in "".join(ran.err.split())
    assert quotagate("volumes", "push", str(tmp_path / "none"), "--url", gate.url).code == 2
    assert len(gate.asked) == 1


def test_broker_is_forgotten(quotagate: Command, gate: Gate):
    gate.answers["DELETE", PATH] = (204, None)
    ran = quotagate("volumes", "forget", "a&b=2", "--at-ms", "7", "--url", gate.url)
    assert (ran.code, ran.out) == (0, "")
    assert gate.brief() == [("DELETE", PATH, [("broker", "a&b=2"), ("at_ms", "7")])]
    gate.answers["DELETE", PATH] = (
        404,
        {"title": "Not Found", "detail": "No volume of the broker 3 is known."},
    )
    ran = quotagate("volumes", "forget", "3", "--url", gate.url)
    assert ran.code == 1
    assert "No volume of the broker 3 is known." in ran.err


def test_history_shows_a_drill_on_one_line(quotagate: Command, gate: Gate):
    change = {"at_ms": 0, "who": "admin", "entity": "throttle_factor", "reason": "fire drill"}
    changes = [
        {**change, "before": STATUS["drill"], "after": None},
        {**change, "before": None, "after": STATUS["drill"]},
    ]
    gate.answers["GET", "/v1/quotas:history"] = (200, {"changes": changes, "next_cursor": None})
    ran = quotagate("quotas", "history", "throttle_factor", "--url", gate.url)
    assert ran.code == 0
    ended, began = ran.out.splitlines()[1:]
    assert "drill 0.2 until 2023-11-14 22:23:20Z -> none" in ended
    assert "drill none -> 0.2 until 2023-11-14 22:23:20Z" in began
    assert ("entity", "throttle_factor") in gate.asked[0].query


def test_bar_is_empty_only_at_0_and_full_only_at_1():
    assert bar(0, drawn=False) == "." * 20
    assert bar(1e-9, drawn=False) == "#" + "." * 19
    assert bar(0.999_999, drawn=False) == "#" * 19 + "."
    assert bar(1, drawn=False) == "#" * 20


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (1_024, "1 KiB"), (1_587, "1.5 KiB"), (2**63 - 1, "7.9 EiB"), (150 * 1024 + 512, "150 KiB")],
)
def test_sizes_are_rounded_down(count: int, shown: str):
    assert size(count) == shown
