"""`quotagate quotas import` without Kafka: plans in parts, the question at a terminal, settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest

from app.kafka import quotas as kafka_quotas
from app.kafka.quotas import Broker, EntityQuotas, KafkaQuotas
from app.run.commands.quotas import plans
from tests.commands import Command, Gate, noting, quotagate

__all__ = ["quotagate"]

FROM = ("quotas", "import", "--from-kafka", "kafka:9092")


@pytest.fixture
def gate() -> Iterator[Gate]:
    with noting() as noted:
        yield noted


def said(monkeypatch: pytest.MonkeyPatch, users: int) -> None:
    """A fake cluster of one broker, with quotas of this many users."""
    entries = tuple(EntityQuotas((("user", f"u{n}"),), {"producer_byte_rate": 5.0}) for n in range(users))
    kafka = KafkaQuotas(entries, (Broker("1", {}),), {})
    monkeypatch.setattr(kafka_quotas, "read", lambda *_: kafka)


class Node(dict):
    """Answers plans and changes; each change increases the version, and one after `most` is refused."""

    def __init__(self, gate: Gate, most: int) -> None:
        super().__init__({("GET", "/v1/quotas"): (200, {"quotas": [], "next_cursor": None})})
        self._gate = gate
        self._left = most
        self._version = 7

    def get(self, asked: Any, default: Any = None) -> Any:
        if asked != ("POST", "/v1/quotas:apply"):
            return super().get(asked, default)
        body = self._gate.asked[-1].body
        if not body["validate_only"]:
            if not self._left:
                return 412, {"detail": "changed"}
            self._left -= 1
            self._version += 1
        changes = [
            {"entity": one["entity"], "quota": quota, "change": "added", "before": None, "after": after,
             "buckets": "kept"}
            for one in body["alterations"]
            for quota, after in one["quotas"].items()
        ]  # fmt: skip
        return 200, {"version": self._version, "changes": changes}


def sent(gate: Gate) -> list[tuple[str | None, int, bool]]:
    """The requested changes: at which version, for how many entities, and whether only planned."""
    return [
        (one.headers["If-Match"], len(one.body["alterations"]), one.body["validate_only"])
        for one in gate.asked
        if one.method == "POST"
    ]


def test_large_import_is_sent_in_parts(quotagate: Command, gate: Gate, monkeypatch: pytest.MonkeyPatch):
    said(monkeypatch, plans.MAX_ALTERATIONS + 1)
    gate.answers = Node(gate, most=9)
    ran = quotagate(*FROM, "--url", gate.url, "-o", "json")
    assert (ran.code, ran.err) == (0, "")
    report = json.loads(ran.out)
    assert (report["version"], len(report["changes"])) == (9, plans.MAX_ALTERATIONS + 1)
    assert sent(gate) == [
        ('"7"', 10_000, True),
        ('"7"', 1, True),
        ('"7"', 10_000, False),
        ('"8"', 1, False),
    ]


def test_failed_part_reports_the_entities_imported_before(
    quotagate: Command, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    said(monkeypatch, plans.MAX_ALTERATIONS + 1)
    gate.answers = Node(gate, most=1)
    ran = quotagate(*FROM, "--url", gate.url, "-o", "json")
    assert (ran.code, ran.out) == (1, "")
    assert "10,000 entities were imported before that." in ran.err
    assert "the catalog changed since the plan" in ran.err


@pytest.mark.parametrize(("typed", "applied"), [("n\n", False), ("y\n", True)])
def test_import_asks_at_a_terminal(
    quotagate: Command, gate: Gate, monkeypatch: pytest.MonkeyPatch, typed: str, applied: bool
):
    said(monkeypatch, 2)
    gate.answers = Node(gate, most=1)
    terminal = StringIO(typed)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    ran = quotagate(*FROM, "--url", gate.url)
    assert f"Apply 2 changes to {gate.url}?" in ran.err
    assert (ran.code, [one[2] for one in sent(gate)]) == ((0, [True, False]) if applied else (1, [True]))


def test_dry_run_asks_and_writes_nothing(quotagate: Command, gate: Gate, monkeypatch: pytest.MonkeyPatch):
    said(monkeypatch, 2)
    gate.answers = Node(gate, most=0)
    terminal = StringIO("y\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    ran = quotagate(*FROM, "--url", gate.url, "--dry-run")
    assert (ran.code, ran.err, [one[2] for one in sent(gate)]) == (0, "", [True])


def test_invalid_property_is_refused_by_name(quotagate: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QUOTAGATE_KAFKA_SECURITY_PROTOCOL", "TLS")
    ran = quotagate(*FROM)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("quotagate: QUOTAGATE_KAFKA_SECURITY_PROTOCOL: must be PLAINTEXT, ")
    # An option takes precedence over the environment.
    ran = quotagate(*FROM, "--kafka-property", "security.protocol=XYZ")
    assert (ran.code, "--kafka-property security_protocol: must be PLAINTEXT" in ran.err) == (2, True)
