"""The script and the oracle agree on undos over random histories; the same machine finds planted faults."""

from __future__ import annotations

from collections import Counter

import pytest

from app.store.script import SCRIPT
from tests.contract.machine import AT_LEAST, Difference, rare
from tests.contract.undoing import run
from tests.report import say
from tests.stores import KINDS, running

pytestmark = pytest.mark.usefixtures("patient_connections")

STEPS, LONG_STEPS = 1_500, 15_000
"""Steps in each run of the tests, and in `make prove`."""
DEBUG = ("--enable-debug-command", "yes")
"""Options with which tests give the store another replication history, as a failover does."""

MUST_MEET = (
    "undone",
    "not undone",
    *(f"given back after {what}" for what in ("nothing", "asks", "burst", "debt")),
    *(
        f"not given back after {what}"
        for what in ("reset", "back", "there and back", "failover", "far", "return")
    ),
)

FAULTS = {
    "an undo after a reset": ("check.birth == check.undone_birth and", "true and"),
    "an undo after a failover": ("and check.undone_in == history_now()\n", "\n"),
    "an undo of what was filled up": (
        "check.usage - max(check.peak, check.limit) * ((check.t - check.undone_at) / 1000)",
        "check.usage",
    ),
    "an undo at the present limit": (
        "max(check.peak, check.limit) * ((check.t -",
        "check.limit * ((check.t -",
    ),
    "an undo after a lowered burst": (
        "if check.burst < check.old_burst or check.over > 0",
        "if check.over > 0",
    ),
    "an undo after a forgiven debt": ("check.old_burst or check.over > 0 then", "check.old_burst then"),
    "an undo beyond the burst": ("given = min(given, check.most - check.tokens)", ""),
    "an undo from the newest sample": ("if list[i][2] <= at and at <= list[i][3] then", "if true then"),
    "an undo below 0": ("local given = min(list[i][1], check.usage)", "local given = check.usage"),
    "an undo of the usage, not of what was taken": (
        "check.forgiven, check.took = check.over, before - check.tokens",
        "check.forgiven, check.took = check.over, check.usage",
    ),
    "a rate that moved back with its birth": (
        "check.oldest, check.oldest_last = check.oldest + by, check.oldest_last + by\n  end_birth(check)",
        "check.oldest, check.oldest_last = check.oldest + by, check.oldest_last + by",
    ),
    "an undo after a refund": (
        "  end_birth(check) -- without an earlier charge",
        "  -- without an earlier charge",
    ),
}

SHOWN_BY = ("regret", "advance", "change_quota")
"""The rules that find all faults sooner than random histories of all rules."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_store_and_oracle_agree(kind: str) -> None:
    """At least 1,500 steps, in which each important event happened."""
    agree(kind, STEPS, 8 * STEPS, often=1)


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_store_and_oracle_agree_for_long(kind: str) -> None:
    """At least 15,000 steps, in which each important event happened often."""
    agree(kind, LONG_STEPS, 2 * LONG_STEPS, often=AT_LEAST)


def agree(kind: str, steps: int, most: int, often: int) -> None:
    """Compare for so many steps, and for at most `most` while an event happened less often than required."""
    met: Counter[str] = Counter()
    with running(kind, *DEBUG) as url:
        while met["steps"] < steps or (rare(met, MUST_MEET, often) and met["steps"] < most):
            met += run(url, examples=20, steps=50)
    report(met)
    assert rare(met, MUST_MEET, often) == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str) -> None:
    right, wrong = FAULTS[fault]
    assert SCRIPT.count(right) == 1, "the fault must be planted in one place"
    script = SCRIPT.replace(right, wrong)
    with running("valkey", *DEBUG) as url, pytest.raises(Difference):
        run(url, examples=400, steps=20, script=script, shrink=False, only=SHOWN_BY)


def report(met: Counter[str]) -> None:
    """Print the events of a run."""
    say(f"{met['steps']:,} steps, {met['undone']:,} undone, {met['not undone']:,} not, no difference")
    for name in sorted(name for name in met if "given back" in name):
        say(f"{met[name]:>7,}  {name}")
