"""Each kind of tampering with a log is found and named, alone and among all others; an honest log passes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs.audits import AuditResult, audit
from tests.jobs.tampering import KINDS, Kind, Rows, Traffic, traffic
from workers.jobs.audit import findings

NAMES = tuple(f"t{number:02d}" for number in range(len(KINDS)))
EACH_KIND = pytest.mark.parametrize(
    ("name", "kind"), list(zip(NAMES, KINDS, strict=True)), ids=[kind.name for kind in KINDS]
)


@pytest.fixture(scope="module")
def honest() -> tuple[Traffic, dict[str, Rows]]:
    """Honest traffic, which tests do not change."""
    return traffic(["one"])


@pytest.fixture
def audited(honest: tuple[Traffic, dict[str, Rows]], tmp_path: Path) -> Callable[[Kind | None], AuditResult]:
    """Audits the honest traffic, after it was tampered with."""

    def does(kind: Kind | None) -> AuditResult:
        made, parts = copy.deepcopy(honest)
        if kind is not None:
            whose = kind.of or "one"
            parts[whose] = kind.does(parts[whose])
        return audit(made.write(tmp_path / "log", [row for part in parts.values() for row in part]))

    return does


def test_honest_log_has_no_findings(
    honest: tuple[Traffic, dict[str, Rows]], audited: Callable[[Kind | None], AuditResult]
):
    _, parts = honest
    kinds = Counter((row["kind"], row["source"], row["mode"], row["replayed"]) for row in parts["one"])
    for wanted in (
        ("late", "store", "admit", False),
        ("decision", "fallback", "admit", False),
        ("decision", "local", "admit", False),
        ("decision", "store", "record", False),
        ("decision", "store", "peek", False),
        ("decision", "store", "refund", False),
        ("decision", "store", "admit", True),
        ("reset", None, None, False),
        ("factor", None, None, False),
    ):
        assert kinds[wanted], wanted
    found = audited(None)
    assert found.held, (found.not_held, found.overall["not_held"], found.cases)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_tampering_is_found_by_its_name(kind: Kind, audited: Callable[[Kind | None], AuditResult]):
    found = audited(kind)
    named = {*found.overall["not_held"], *(what for names in found.not_held.values() for what in names)}
    assert not found.held
    assert kind.named in named


def test_document_lists_every_kind_of_tampering():
    text = (Path(__file__).parents[2] / "docs/pipeline.md").read_text(encoding="utf-8")
    table = [f"| {kind.name} | {kind.named} |" for kind in KINDS]
    assert "\n".join(table) in text
    assert len(KINDS) == 36, "which the README says too"


@pytest.fixture(scope="module")
def all_at_once(tmp_path_factory: pytest.TempPathFactory) -> AuditResult:
    """One log in which each traffic was tampered with in a way of its own, and one was not."""
    made, parts = traffic([*NAMES, "honest"])
    for name, kind in zip(NAMES, KINDS, strict=True):
        whose = kind.of or name
        parts[whose] = kind.does(parts[whose])
    rows = [row for part in parts.values() for row in part]
    return audit(made.write(tmp_path_factory.mktemp("tampered") / "log", rows))


@EACH_KIND
def test_tampering_is_found_where_it_was_done(all_at_once: AuditResult, name: str, kind: Kind):
    report = all_at_once.report
    where = "last" if kind.of else name
    if kind.named == findings.GAPS:
        assert any(batch.batch.startswith(where) and batch.missing for batch in report["inside"])
    elif kind.named == findings.ADDED:
        assert any(batch.batch.startswith(where) and batch.added for batch in report["inside"])
    elif kind.named == findings.TWICE:
        assert any(batch.startswith(where) for batch, _ in report["twice"])
    elif kind.named == findings.ABSENT:
        assert report["absent"] == (f"{where}-2",)
    elif kind.named == findings.MISSING:
        assert any(node.node.startswith(where) for node in report["lacking"])
    else:
        mine = {
            what
            for who, names in all_at_once.not_held.items()
            if (who or "").startswith((where, "some"))
            for what in names
        }
        assert kind.named in mine, all_at_once.not_held
        return
    assert kind.named in all_at_once.overall["not_held"]


def test_nothing_is_found_in_untouched_traffic(all_at_once: AuditResult):
    assert not any((who or "").startswith("honest") for who in all_at_once.not_held)
    report = all_at_once.report
    named = [batch.batch for batch in report["inside"]] + [node.node for node in report["lacking"]]
    assert not any(each.startswith("honest") for each in [*named, *report["absent"]])
