"""The log files of a real node and worker: charges without admissions, changes, and no plain ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.decision_log import worker
from tests.logged import SECRET, logged_id
from tests.service import eventually, running
from workers.decision_log.read import read

ID, TEXT_ID = 8_675_309_425_113, "an id that must not be shown"
RATE = "request_rate"


def settings(folder: Path, **more: str) -> dict[str, str]:
    return {
        "QUOTAGATE_LOG_URL": str(folder),
        "QUOTAGATE_HASH_SECRET": SECRET.hex(),
        **more,
    }


def until(folder: Path, found: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """Wait until the log meets a condition; return its rows in the order of batches."""

    def look() -> list[dict[str, Any]]:
        rows = read(folder).to_pylist() if folder.exists() else []
        return rows if found(rows) else []

    return eventually(look, within_s=60)


def kinds(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(row["kind"] for row in rows)


def test_log_has_changes_of_quotas_and_of_the_factor_and_resets(tmp_path: Path):
    folder = tmp_path / "log"
    source = {"QUOTAGATE_VOLUME_SOURCE": "push", "QUOTAGATE_VOLUME_MIN_AVAILABLE_BYTES": "1000"}
    with running(environment=settings(folder, QUOTAGATE_LOG="all", **source)) as node:
        node.put("user=alice", request_rate={"limit": 10})
        node.put("user=alice", request_rate={"limit": 5})
        assert node.ask(principal="alice", usage={"requests": 1})["decision"] == "admit"
        full = {"broker": "1", "dir": "/d", "total_bytes": 10_000, "available_bytes": 9}
        pushed = node.http.post("/v1/volumes", json={"volumes": [full]})
        assert pushed.is_success, pushed.text
        reset = node.http.post("/v1/buckets:reset", json={"bucket": "user=alice"})
        assert reset.is_success, reset.text
        with worker.inside(node.store_url, folder, limits={"age_s": 0.2}):
            rows = until(folder, lambda rows: {"quota", "reset", "factor", "decision"} <= set(kinds(rows)))
    first, second = (row for row in rows if row["kind"] == "quota")
    assert json.loads(first["change"]["after"])[RATE]["limit"] == 10
    assert json.loads(second["change"]["before"])[RATE]["limit"] == 10
    assert json.loads(second["change"]["after"])[RATE]["limit"] == 5
    (decision,) = (row for row in rows if row["kind"] == "decision")
    assert [verdict["limit"] for verdict in decision["verdicts"]] == [5]
    (emptied,) = (row for row in rows if row["kind"] == "reset")
    assert (emptied["change"]["what"], emptied["order"] > decision["order"]) == ("user=alice", True)
    factor = next(row for row in rows if row["kind"] == "factor")
    assert factor["change"]["what"] == "throttle_factor"


def test_charges_are_logged_without_admissions_and_ids_only_as_digests(tmp_path: Path):
    folder = tmp_path / "log"
    with running(environment=settings(folder)) as node:  # `denied` is the default
        node.put("user=*", producer_ids_rate={"limit": 2}, request_rate={"limit": 1, "shadow": True})
        ask = {"principal": "alice", "usage": {"requests": 1_000, "producer_ids": [ID, TEXT_ID]}}
        first, again = node.ask(**ask), node.ask(**ask)
        refused = node.ask(principal="alice", usage={"producer_ids": [ID, 2]})
        assert (first["decision"], again["decision"], refused["decision"]) == ("admit", "admit", "throttle")
        for _ in range(2):
            assert node.ask(principal="bob", usage={"producer_ids": [ID]})["decision"] == "admit"
        with worker.inside(node.store_url, folder, limits={"age_s": 0.2}):
            rows = until(folder, lambda rows: {"decision", "ids", "quota"} <= set(kinds(rows)))
    files = list(folder.rglob("*.parquet"))
    assert files
    for text in (str(ID), TEXT_ID):
        assert not [path for path in files if text.encode() in path.read_bytes()]
    assert not [row for row in rows if row["plain_ids"]]
    (alone,) = (row for row in rows if row["kind"] == "ids")
    assert (alone["principal"], alone["decision"]) == ("bob", None)
    assert alone["verdicts"][0]["charged_ids"] == [logged_id("bob", ID)]
    charged = [
        each for row in rows for verdict in row["verdicts"] or () for each in verdict["charged_ids"] or ()
    ]
    assert logged_id("alice", ID) in charged
    assert len(charged) == len(set(charged)) == 3
    shown = [verdict["outcome"] for row in rows for verdict in row["verdicts"] or () if verdict["shadow"]]
    assert "delay" in shown
