"""Nodes that answer alone agree with the oracle over random histories; planted faults are found."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

import pytest

from app.admission import admission, local, metrics, plain
from app.domain import known_ids
from tests.contract import nodes
from tests.contract.machine import Difference, explored, rare
from tests.contract.nodes import AT_LEAST, MUST_MEET, Nodes
from tests.contract.test_machine import report
from tests.planted import planted
from tests.stores import running

pytestmark = pytest.mark.usefixtures("patient_connections")

STEPS = 10_000
QUICK_STEPS = 1_000

FAULTS: dict[str, tuple[str, str]] = {
    "an id known after its layer died": (
        "self._keep([layer for layer in self.layers if now_ms < layer.dies_ms])",
        "pass",
    ),
    "uses that are not renewed": ("if closed := bucket.closed(ids, now_ms):", "if closed := []:"),
    "a reset elsewhere that is not noticed": (
        "if resets != self._resets:\n            self.edition += 1\n            self._resets = resets",
        "self._resets = 0",
    ),
    "a renewal that names the newest reset": (
        "resets = waiting.resets if waiting.birth == self._birth else 0",
        "resets = self._resets",
    ),
    "ids restored after they died": (
        "left[:] = [(dies_ms, its) for dies_ms, its in left if now_ms < dies_ms]",
        "left[:] = left",
    ),
    "ids restored after they were reset": ("if bucket.resets != before]:", "if not key]:"),
    "a bucket that nobody has confirmed": (
        "waiting = self._wait(key, bucket)\n        if waiting is not None:",
        "waiting = None\n        if waiting is not None:",
    ),
    "a bucket that passes although it may have been reset": (
        "return False\n        return self._is_certain(key, bucket)",
        "return False\n        return True",
    ),
    "a loss that is not noticed": ("if not birth or birth == self._birth:", "if self._birth:"),
    "a new policy that is not noticed": (
        "if bucket.policy != policy_of(applied):\n                self._forget(key)\n",
        "if False:\n",
    ),
    "something learned from before a reset here": (
        "self.edition += 1\n        for key in keys:",
        "for key in keys:",
    ),
    "a refusal repeated after a record": (
        "if bucket is not None:\n            if bucket.refusals:",
        "if bucket is not None:\n            if False:",
    ),
    "a refusal repeated for too long": (
        "until_ms = at_ms + min(REFUSED_MS, throttle_ms or REFUSED_MS)",
        "until_ms = at_ms + (throttle_ms or REFUSED_MS)",
    ),
    "a refusal repeated although the limit was another in between": (
        "found.quota is not applied.quota",
        "found.quota != applied.quota",
    ),
    "a wait that is not counted down": (
        "passes_ms = at_ms + throttle_ms",
        "passes_ms = at_ms + 20 + throttle_ms",
    ),
    "a wait that is too short": ("store_ms - received_ms", "store_ms + 1 - sent_ms + 0"),
    "a clock set back that is not noticed": ("fell_ms = max(before_least - most, 0.0)", "fell_ms = 0.0"),
    "an unseen id among known ones": (
        "if held.get(each) != number:\n                        break",
        "if held.get(each) != number and each == ids[0]:\n                        break",
    ),
    "a time that is behind the store's": ("store_ms + 1 - sent_ms", "store_ms - 4 - received_ms"),
}
"""Faults in ``app.domain.known_ids``, each planted in one place."""

SHOWN_BY: dict[str, tuple[str, ...]] = {
    "an id known after its layer died": ("march", "advance", "insist", "miss", "reset"),
    "uses that are not renewed": ("march", "advance"),
    "a bucket that passes although it may have been reset": ("march", "advance", "miss_what_was_reset"),
    "a new policy that is not noticed": ("march", "change_policy", "advance"),
    "a refusal repeated for too long": ("overtake", "advance"),
    "a refusal repeated although the limit was another in between": ("change_limit_and_back", "advance"),
    "an unseen id among known ones": ("ask", "march", "advance"),
    "a failed ask planned with all quotas": ("ask", "march", "insist"),
    "detail answered alone": ("ask", "insist"),
}
"""The rules that lead to a fault which random histories of all rules may not meet in time."""

SHORT_WAY_FAULTS: dict[str, tuple[ModuleType, str, str]] = {
    "ids learned under no edition": (admission, "plain.quotas, edition=self.local.edition)", "plain.quotas)"),
    "nothing learned": (admission, "if values is not None and plain.learns is not None:", "if False:"),
    "another time for the layer's end": (admission, "int(values[OPEN_MS])", "int(values[OPEN_MS + 1])"),
    "a refusal asked for again": (admission, "refusal = self.local.refusal(ask, its)", "refusal = None"),
    "known ids among unknown ones sent": (
        admission,
        "travels = self.local.unknown(ask, its) if refusal is None else None",
        "travels = None",
    ),
    "a refusal taken for an admission": (
        admission,
        "if refusal is not None or travels is not None:",
        "if travels is not None:",
    ),
    "a failed ask planned with all quotas": (
        admission,
        "its = planned.matches if planned.alone is None else planned.matches[1:]",
        "its = planned.matches",
    ),
    "detail answered alone": (plain, "learns is None or not may_answer_alone(ask)", "learns is None"),
    "a decision of the store that was never asked": (
        plain,
        "ADMITTED_ALONE if others is None else shared.decision",
        "shared.decision",
    ),
    "the ids among the other quotas": (
        plain,
        "shared.of_units[1:], places[1:]",
        "shared.of_units[1:], places[:-1]",
    ),
    "ids that are not counted": (plain, "COUNT.pack(ids), number", "COUNT.pack(1), number"),
    "a gauge that ends": (metrics, "touch(counts.rates, alone.labels, now, None)", "pass"),
    "a known id counted as without quotas": (metrics, "+= alone is None", "+= 1"),
}
"""Faults of the short way of asks with ids: in which module, what is right, and what is wrong."""


def run(
    url: str,
    *,
    examples: int,
    rules: ModuleType = known_ids,
    shrink: bool = True,
    only: Collection[str] = (),
) -> Counter[str]:
    class Run(Nodes):
        pass

    Run.module = rules
    return explored(Run, url, examples=examples, steps=50, shrink=shrink, only=only)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str) -> None:
    right, wrong = FAULTS[fault]
    source = Path(known_ids.__file__).read_text()
    assert source.count(right) == 1, "the fault must be planted in one place"
    planted = ModuleType("planted")
    sys.modules["planted"] = planted  # dataclasses look there
    exec(compile(source.replace(right, wrong), "planted", "exec"), planted.__dict__)
    with running("valkey") as url, pytest.raises(Difference):
        run(url, examples=400, rules=planted, shrink=False, only=SHOWN_BY.get(fault, ()))


@pytest.mark.parametrize("fault", SHORT_WAY_FAULTS)
def test_planted_fault_in_the_short_way_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that finds the short way equal to the readable one finds each difference."""
    module, right, wrong = SHORT_WAY_FAULTS[fault]
    faulty = planted(module, right, wrong)
    for user in (admission, local, metrics, plain, nodes):
        for name, value in vars(user).items():
            if getattr(value, "__module__", None) == module.__name__ and name in faulty:
                monkeypatch.setattr(user, name, faulty[name])
    found = Difference, ValueError  # some faults end in a check of the program itself
    with running("valkey") as url, pytest.raises(found):
        run(url, examples=400, shrink=False, only=SHOWN_BY.get(fault, ()))


def test_nodes_and_oracle_agree_in_1000_steps() -> None:
    """The short run of `make test`, which meets rare cases too seldom to require them."""
    met: Counter[str] = Counter()
    with running("valkey") as url:
        while met["steps"] < QUICK_STEPS:
            met += run(url, examples=10)
    report("valkey", met)


@pytest.mark.timeout(3600)
def test_nodes_and_oracle_agree() -> None:
    met: Counter[str] = Counter()
    with running("valkey") as url:
        while met["steps"] < STEPS or (rare(met, MUST_MEET, AT_LEAST) and met["steps"] < 2 * STEPS):
            met += run(url, examples=40)
    report("valkey", met)
    assert rare(met, MUST_MEET, AT_LEAST) == {}
