"""Nodes that answer alone agree with the oracle over random histories; planted faults are found."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from app.domain import known_ids
from tests.contract.machine import Difference, explored, rare
from tests.contract.nodes import AT_LEAST, MUST_MEET, Nodes
from tests.contract.test_machine import report
from tests.stores import running

STEPS = 10_000
QUICK_STEPS = 1_000

FAULTS: dict[str, tuple[str, str]] = {
    "an id known after its layer died": (
        "self.layers = [layer for layer in self.layers if now_ms < layer.dies_ms]",
        "pass",
    ),
    "uses that are not renewed": ("if closed := bucket.closed(ids, now_ms):", "if closed := []:"),
    "a reset elsewhere that is not noticed": (
        "if resets != self._resets:\n            self.turn += 1\n            self._resets = resets",
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
        "self._wait(key, bucket).has_to_ask = True\n        return False",
        "return False",
    ),
    "a bucket that passes although it may have been reset": (
        "return bucket is not None and self._is_certain(key, bucket)",
        "return bucket is not None",
    ),
    "a loss that is not noticed": ("if not birth or birth == self._birth:", "if self._birth:"),
    "a new policy that is not noticed": (
        "if bucket.policy != policy_of(applied):\n                self._forget(key)\n",
        "if False:\n",
    ),
    "something learned from before a reset here": (
        "self.turn += 1\n        for key in keys:",
        "for key in keys:",
    ),
    "a refusal repeated after a record": (
        "if bucket is not None:\n            with self._changing(bucket):",
        "if False:\n            with self._changing(bucket):",
    ),
    "a refusal repeated for too long": (
        "until_ms = at_ms + min(REFUSED_MS, throttle_ms or REFUSED_MS)",
        "until_ms = at_ms + (throttle_ms or REFUSED_MS)",
    ),
    "a wait that is not counted down": (
        "passes_ms = at_ms + throttle_ms",
        "passes_ms = at_ms + 20 + throttle_ms",
    ),
    "a wait that is too short": ("store_ms - received_ms", "store_ms + 1 - sent_ms + 0"),
    "a clock set back that is not noticed": ("fell_ms = max(before_least - most, 0.0)", "fell_ms = 0.0"),
    "an unseen id among known ones": ("newest.ids.issuperset(ids):", "not newest.ids.isdisjoint(ids):"),
    "a time that is behind the store's": ("store_ms + 1 - sent_ms", "store_ms - 4 - received_ms"),
}
"""Faults in ``app.domain.known_ids``, each planted in one place."""


def run(url: str, *, examples: int, rules: ModuleType = known_ids, shrink: bool = True) -> Counter[str]:
    class Run(Nodes):
        pass

    Run.module = rules
    return explored(Run, url, examples=examples, steps=50, shrink=shrink)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str) -> None:
    right, wrong = FAULTS[fault]
    source = Path(known_ids.__file__).read_text()
    assert source.count(right) == 1, "the fault must be planted in one place"
    planted = ModuleType("planted")
    sys.modules["planted"] = planted  # dataclasses look there
    exec(compile(source.replace(right, wrong), "planted", "exec"), planted.__dict__)
    with running("valkey") as url, pytest.raises(Difference):
        run(url, examples=400, rules=planted, shrink=False)


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
            met += run(url, examples=100)
    report("valkey", met)
    assert rare(met, MUST_MEET, AT_LEAST) == {}
