"""`quotagate quotas undo`, with a node that answers as the test says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.commands import Command, Gate, quotagate
from tests.unit.run.test_cli_kafka import gate

__all__ = ["gate", "quotagate"]

PATH = "/v1/quotas/user=alice"
FIVE, SIX = {"request_rate": {"limit": 5}}, {"request_rate": {"limit": 6}}
SAID = "undo of the change of 2023-11-14 22:13:20Z by ops"


def answered(gate: Gate, now: dict[str, Any] | None, *changes: tuple[Any, Any]) -> None:
    """Let the node have these quotas of alice, and these changes of before and after."""
    found = {"entity": "user=alice", "quotas": now, "bounds": {}, "version": 8}
    gate.answers["GET", PATH] = (404, {"detail": "No quotas."}) if now is None else (200, found)
    history = [
        {"at_ms": 1_700_000_000_000, "who": "ops", "entity": "user=alice", "before": before, "after": after,
         "reason": None}
        for before, after in changes
    ]  # fmt: skip
    gate.answers["GET", "/v1/quotas:history"] = (200, {"changes": history, "next_cursor": None})
    gate.answers["PUT", PATH] = (200, {**found, "quotas": FIVE, "version": 9})
    gate.answers["DELETE", PATH] = (204, None)


def test_undo_puts_what_was_before_at_the_version_that_it_saw(quotagate: Command, gate: Gate) -> None:
    answered(gate, SIX, (FIVE, SIX))
    ran = quotagate("quotas", "undo", "user=alice", "--url", gate.url, "-o", "json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["quotas"] == FIVE
    assert ran.err == "user=alice is as it was before the change of 2023-11-14 22:13:20Z by ops.\n"
    put = gate.asked[-1]
    assert (put.method, put.path, put.body) == ("PUT", PATH, FIVE)
    assert (put.headers["if-match"], put.headers["x-reason"]) == ('"8"', SAID)
    assert put.headers["if-none-match"] is None


def test_undo_of_a_creation_deletes_at_that_version(quotagate: Command, gate: Gate) -> None:
    answered(gate, FIVE, (None, FIVE))
    ran = quotagate("quotas", "undo", "user=alice", "--url", gate.url, "--if-match", "7", "--reason", "oops")
    assert (ran.code, ran.out) == (0, "")
    sent = gate.asked[-1]
    assert (sent.method, sent.headers["if-match"], sent.headers["x-reason"]) == ("DELETE", '"7"', "oops")


def test_undo_of_a_removal_creates_only(quotagate: Command, gate: Gate) -> None:
    answered(gate, None, (FIVE, None))
    assert quotagate("quotas", "undo", "user=alice", "--url", gate.url).code == 0
    sent = gate.asked[-1]
    assert (sent.method, sent.body) == ("PUT", FIVE)
    assert (sent.headers["if-match"], sent.headers["if-none-match"]) == (None, "*")


@pytest.mark.parametrize(
    ("now", "changes", "said"),
    [
        (None, [], "the history has no change of user=alice"),
        (FIVE, [], "the history has no change of user=alice"),
        (FIVE, [(FIVE, SIX)], "user=alice has changed meanwhile: look at its history, and try again"),
        (None, [(FIVE, SIX)], "user=alice has changed meanwhile: look at its history, and try again"),
        (SIX, [(SIX, SIX)], "the last change of user=alice left its quotas as they were"),
    ],
)
def test_undo_changes_nothing_if_it_is_not_sure(
    quotagate: Command, gate: Gate, now: Any, changes: list[Any], said: str
) -> None:
    answered(gate, now, *changes)
    ran = quotagate("quotas", "undo", "user=alice", "--url", gate.url)
    assert (ran.code, ran.err) == (1, f"quotagate: {said}\n")
    assert {asked.method for asked in gate.asked} == {"GET"}


@pytest.mark.parametrize("entity", ["throttle_factor", "group=a", ""])
def test_undo_of_what_is_no_entity_is_wrong_use(quotagate: Command, gate: Gate, entity: str) -> None:
    ran = quotagate("quotas", "undo", entity, "--url", gate.url)
    assert ran.code == 2
    assert not gate.asked


def test_refusal_to_show_the_quotas_is_no_missing_entity(quotagate: Command, gate: Gate) -> None:
    answered(gate, FIVE, (None, FIVE))
    gate.answers["GET", PATH] = (503, {"detail": "The catalog is away."})
    ran = quotagate("quotas", "undo", "user=alice", "--url", gate.url)
    assert (ran.code, ran.err) == (1, "quotagate: 503 The catalog is away.\n")
