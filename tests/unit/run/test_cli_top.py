"""`quotagate top`: one snapshot without a terminal, and the increments that it reads at one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import pytest
import yaml

from app.run.commands import top
from app.run.commands.node.requests import Node
from app.store.samples import COUNTED
from tests.commands import Command, Gate, quotagate
from tests.unit.run.test_cli_kafka import gate

__all__ = ["gate", "quotagate"]

NOW_MS = 1_700_000_100_000
BOUNDS = [1, 2, 5]


def entry(at_s: int, admit: int = 0, throttle: int = 0, latency: tuple[int, ...] = (0, 0, 0, 0)) -> Any:
    """An entry that ends some seconds before the time of the overview."""
    counts = dict.fromkeys(COUNTED, 0) | {"admit": admit, "throttle": throttle}
    return {**counts, "at_ms": NOW_MS + at_s * 1000, "queue_asks": 4, "latency": [*latency]}


def overview(*series: Any, now_ms: int = NOW_MS, throttled: int = 0) -> dict[str, Any]:
    bucket = {"quota": "request_rate", "bucket": "user=alice\x1b[31m", "throttle_ms": 2_500 * throttled}
    return {
        "now_ms": now_ms,
        "nodes": [{"node": "host-1", "version": "0.2.0", "seen_ms": now_ms - 1_200}],
        "series": [*series],
        "latency_ms": BOUNDS,
        "throttled": [bucket | {"asks": throttled}] if throttled else [],
        "stores": [
            {"primary": "a:1", "memory_bytes": 1024**2, "max_bytes": 4 * 1024**2, "faults": ["full", "b"]},
            {"primary": "b:2", "memory_bytes": None, "max_bytes": None, "faults": []},
        ],
        "throttle_factor": 0.5,
    }


class Answers:
    """A node whose answers are laid out by ``since_ms``."""

    def __init__(self, answers: Mapping[int, dict[str, Any]]) -> None:
        self.asked: list[int] = []
        self.answers = dict(answers)

    def get(self, path: str, since_ms: int) -> dict[str, Any]:
        assert path == "/v1/overview"
        self.asked.append(since_ms)
        return self.answers[since_ms]


def recent(answers: Mapping[int, dict[str, Any]]) -> tuple[top.Recent, Answers]:
    node = Answers({top.END_MS: overview(), **answers})
    return top.Recent(cast("Node", node)), node


def rows(out: str) -> dict[str, list[str]]:
    """The words of each line after its first."""
    return {words[0]: words[1:] for line in out.splitlines() if (words := line.split())}


def test_fields_are_those_of_samples():
    assert top.COUNTED == COUNTED


def test_snapshot_has_rates_sums_percentiles_buckets_stores_and_nodes(quotagate: Command, gate: Gate):
    gate.answers["GET", top.PATH] = (
        200,
        overview(
            entry(-5, 900, latency=(890, 10, 0, 0)),
            entry(-3, 100, 30, latency=(0, 0, 129, 1)),  # the second between is a gap
            throttled=114,
        ),
    )
    ran = quotagate("top", "--url", gate.url)
    assert (ran.code, ran.err) == (0, "")
    found = rows(ran.out)
    assert found["2023-11-14"] == ["22:15:00Z", "1", "0.5"]
    assert found["admit"] == ["50", "1,000"]
    assert found["throttle"] == ["15", "30"]
    assert found["shed"] == ["0", "0"]
    assert found["waiting"] == ["4", "-"]
    assert found["p50"] == ["≤", "5", "ms", "≤", "1", "ms"]
    assert found["p99"] == ["≤", "5", "ms", "≤", "5", "ms"]
    assert found[r"user=alice\x1b[31m"] == ["request_rate", "2", "2.5", "s"]  # 116 in 57 s
    assert found["a:1"] == ["#####...............", "25%", "1", "MiB", "4", "MiB", "full,", "b"]
    assert found["b:2"] == ["-", "-", "-", "-"]
    assert found["host-1"] == ["0.2.0", "1.2", "s", "ago"]
    assert [one.query for one in gate.asked] == [
        [("since_ms", str(top.END_MS))],
        [("since_ms", str(NOW_MS - top.SPAN_MS))],
    ]


def test_deployment_without_entries_is_shown(quotagate: Command, gate: Gate):
    gate.answers["GET", top.PATH] = (200, overview(now_ms=0))
    ran = quotagate("top", "--url", gate.url)
    assert (ran.code, ran.err) == (0, "")
    assert rows(ran.out)["admit"] == ["-", "0"]
    assert rows(ran.out)["p99"] == ["-", "-"]
    assert "BUCKET" not in ran.out


def test_json_and_yaml_are_the_answer(quotagate: Command, gate: Gate):
    shown = overview(entry(-10, 1), throttled=1)
    gate.answers["GET", top.PATH] = (200, shown)
    for output, read in (("json", json.loads), ("yaml", yaml.safe_load)):
        ran = quotagate("top", "-o", output, "--url", gate.url)
        assert (ran.code, read(ran.out)) == (0, shown)
    assert [one.query for one in gate.asked] == [[], []]


def test_older_node_is_an_error(quotagate: Command, gate: Gate):
    gate.answers["GET", top.PATH] = (404, {"detail": "There is no such path."})
    ran = quotagate("top", "--url", gate.url)
    assert (ran.code, ran.out, ran.err) == (1, "", "quotagate: 404 There is no such path.\n")


def test_increments_add_up_to_the_last_minute():
    first, second = NOW_MS - top.SPAN_MS, NOW_MS - 2_000
    found, node = recent(
        {
            first: overview(entry(-57, 1), entry(-2, 2), throttled=5),
            second: overview(entry(-1, 3), now_ms=NOW_MS + 1_000, throttled=2),
            second + 1_000: overview(now_ms=NOW_MS + 2_000),
        }
    )
    for _ in range(3):
        found.read()
    assert node.asked == [top.END_MS, first, second, second + 1_000]
    assert [each["admit"] for each in found.series] == [1, 2, 3]
    assert [asks for *_, asks, _ in found.throttled()] == [7]
    node.answers[second + 1_000] = overview(entry(55, 4), now_ms=NOW_MS + 57_000, throttled=1)
    found.read()
    assert [each["admit"] for each in found.series] == [2, 3, 4], "the part began before the last minute"
    node.answers[NOW_MS + 55_000] = overview(now_ms=NOW_MS + 58_000)
    found.read()
    assert [asks for *_, asks, _ in found.throttled()] == [3], "the first part has ended"


def test_store_whose_clock_went_back_is_read_anew():
    first = NOW_MS - top.SPAN_MS
    back_ms = NOW_MS - 3_600_000
    found, node = recent(
        {
            first: overview(entry(-1, 1)),
            NOW_MS - 1_000: overview(now_ms=back_ms),
            back_ms - top.SPAN_MS: overview(entry(-3_601, 7), now_ms=back_ms),
        }
    )
    found.read()
    found.read()
    assert [each["admit"] for each in found.series] == [7]
    assert node.asked[-2:] == [NOW_MS - 1_000, back_ms - top.SPAN_MS]


def test_seconds_without_samples_are_gaps(quotagate: Command, gate: Gate):
    gate.answers["GET", top.PATH] = (200, overview(entry(-30, 900), entry(-29, 100)))
    found = rows(quotagate("top", "--url", gate.url).out)
    assert found["admit"] == ["-", "1,000"]
    assert found["waiting"] == ["-", "-"]
    assert found["p50"] == ["-", "-"]


@pytest.mark.parametrize("columns", ["72", "120"])
def test_curve_fits_beside_the_counts(monkeypatch: pytest.MonkeyPatch, columns: str):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    drawn = top.curve({at * 1000: at for at in range(60)}, 59_000)
    assert len(drawn) == min(60, int(columns) - top.COUNTS_COLUMNS)
    assert drawn.endswith("█")


def test_node_that_has_not_read_the_store_yet_does_not_begin_the_last_minute():
    first = NOW_MS - top.SPAN_MS
    found, node = recent({top.END_MS: overview(now_ms=0), first: overview(entry(-30, 1), throttled=30)})
    for _ in range(2):
        found.read()
        assert not found.parts
    node.answers[top.END_MS] = overview()
    found.read()
    assert found.parts[0].since_ms == first
