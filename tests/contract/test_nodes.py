"""Nodes that answer alone agree with the oracle over random histories; planted faults are found."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from app.admission import admission, answers, plan
from app.admission.known_ids import local
from app.admission.known_ids import memory as known_ids
from tests.contract import nodes
from tests.contract.machine import Difference, explored, rare
from tests.contract.nodes import AT_LEAST, MUST_MEET, Nodes
from tests.contract.test_machine import report
from tests.planted import planted
from tests.stores import running

pytestmark = pytest.mark.usefixtures("patient_connections")

STEPS, LONG_STEPS = 1_000, 10_000
"""Steps in each run of the tests, and in `make prove`."""

FAULTS: dict[str, tuple[str, str]] = {
    "an id known after its layer died": (
        "if bucket.closes_ms(each) + bucket.lives_ms - now_ms < RENEWED_WITHIN_MS:",
        "if bucket.closes_ms(each) == 0:",
    ),
    "an id that passes after its layer died": (
        "now_ms < bucket.closes_ms(each) + bucket.lives_ms for each",
        "bucket.closes_ms(each) > 0 for each",
    ),
    "uses that are not renewed": (
        "if each in bucket.ids and now_ms >= bucket.paused_until_ms:",
        "if not ids:",
    ),
    "a reset elsewhere that is not noticed": (
        "self.birth, self._resets = birth or self.birth, resets",
        "self.birth = birth or self.birth",
    ),
    "a renewal that names the newest reset": (
        "resets = 0 if bucket.is_lost else bucket.resets",
        "resets = self._resets",
    ),
    "ids restored after they died": (
        "(alive if now_ms < closes_ms + bucket.lives_ms else dead)",
        "alive",
    ),
    "ids restored after they were reset": ("if bucket.resets < self._resets]:", "if not key]:"),
    "a bucket that nobody has confirmed": (
        "self.due[key] = None  # the store will say whether it was this bucket",
        "pass",
    ),
    "a bucket that passes although it may have been reset": (
        "        if bucket.resets < self._resets:\n            if bucket.ids",
        "        if bucket.resets < 0:\n            if bucket.ids",
    ),
    "a bucket that the loss of all resets confirms": (
        "bucket.resets, bucket.oldest_ms = resets if resets == self._resets else 0, NEVER",
        "bucket.resets, bucket.oldest_ms = NEVER, NEVER",
    ),
    "a bucket that an answer from before its reset confirms": (
        "if bucket is None or renewal.generation != self.generation:",
        "if bucket is None:",
    ),
    "a loss that is not noticed": (
        "if is_lost:\n            self._lose(resets)",
        "if False:\n            self._lose(resets)",
    ),
    "a new policy that is not noticed": (
        "if policy_of(bucket.applied) != policy_of(applied):\n                self._forget(key)\n",
        "if False:\n",
    ),
    "something learned from before a reset here": (
        "self.generation += 1\n        for key in keys:",
        "for key in keys:",
    ),
    "a clock set back that is not noticed": ("return fell_ms > FALL_MS", "return False"),
    "an unseen id among known ones": (
        "for each in ids if bucket.ids.get(each, 0)",
        "for each in ids[:1] if bucket.ids.get(each, 0)",
    ),
    "a time that is behind the store's": ("store_ms + 1 - sent_ms", "store_ms - 4 - received_ms"),
}
"""Faults in ``app.admission.known_ids.memory``, each planted in one place."""

SHOWN_BY: dict[str, tuple[str, ...]] = {
    "an id known after its layer died": ("march", "advance", "insist", "miss", "reset"),
    "uses that are not renewed": ("march", "advance"),
    "a bucket that passes although it may have been reset": ("march", "advance", "miss_what_was_reset"),
    "an id that passes after its layer died": ("march", "advance", "miss"),
    "a bucket that an answer from before its reset confirms": ("notice_a_reset_while_renewing", "march"),
    "a clock set back that is not noticed": ("march", "ask", "set_back"),
    "a new policy that is not noticed": ("march", "change_policy", "advance"),
    "an unseen id among known ones": ("ask", "march", "advance"),
    "detail answered alone": ("ask", "insist"),
}
"""By fault, the rules that find it in time; random histories of all rules may not."""

NODE_FAULTS: dict[str, tuple[ModuleType, str, str]] = {
    "ids learned under no generation": (admission, "None, unknown, local.generation)", "None, unknown)"),
    "nothing learned": (admission, "        self.local.learn(planned, answer)\n", ""),
    "another time for the layer's end": (
        local,
        "answer.at_ms + result.open_ms",
        "answer.at_ms + 2 * result.open_ms",
    ),
    "detail answered alone": (admission, " and may_answer_alone(ask):", ":"),
    "a decision of the store that was never asked": (
        answers,
        "return ADMITTED_ALONE if",
        "return ADMITTED[1] if",
    ),
    "the ids among the other quotas": (admission, "charges[1:], secret)", "charges, secret)"),
    "the verdicts of other quotas": (answers, "planned.charges[alone:]", "planned.charges[:-1]"),
    "ids of another principal": (
        plan,
        "spreads = spreads_of(ask, secret)",
        "spreads = spreads_of(replace(ask, principal=None), secret)",
    ),
}
"""Faults in a node's use of its known ids: the module, the right text, and the wrong one."""


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
    sys.modules["planted"] = planted  # dataclasses look up their module there
    exec(compile(source.replace(right, wrong), "planted", "exec"), planted.__dict__)
    with running("valkey") as url, pytest.raises(Difference):
        run(url, examples=400, rules=planted, shrink=False, only=SHOWN_BY.get(fault, ()))


@pytest.mark.parametrize("fault", NODE_FAULTS)
def test_planted_fault_in_a_node_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, right, wrong = NODE_FAULTS[fault]
    faulty = planted(module, right, wrong, replace=replace)
    for user in (admission, answers, local, plan, nodes):
        for name, value in vars(user).items():
            if getattr(value, "__module__", None) == module.__name__ and name in faulty:
                monkeypatch.setattr(user, name, faulty[name])
    if module is local:
        for name in ("learn", "_renewed"):
            monkeypatch.setattr(nodes.Unhurried, name, vars(faulty["LocalAnswers"])[name], raising=False)
    if module is admission:
        monkeypatch.setattr(nodes, "admission", SimpleNamespace(**faulty))
    found = Difference, ValueError  # a check of the program itself finds some faults
    with running("valkey") as url, pytest.raises(found):
        run(url, examples=400, shrink=False, only=SHOWN_BY.get(fault, ()))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("steps", "often"), [(STEPS, 1), pytest.param(LONG_STEPS, AT_LEAST, marks=pytest.mark.prove)]
)
def test_nodes_and_oracle_agree(steps: int, often: int) -> None:
    """Each important event happens at least so often."""
    met: Counter[str] = Counter()
    with running("valkey") as url:
        while met["steps"] < steps or (rare(met, MUST_MEET, often) and met["steps"] < 4 * steps):
            met += run(url, examples=10)
    report("valkey", met)
    assert rare(met, MUST_MEET, often) == {}
