"""A node's memory does not grow with the number of its callers, nor of the bodies that they send."""

from __future__ import annotations

import os
from array import array
from contextlib import ExitStack
from typing import Final

import pytest

from tests.bench.arena import Arena
from tests.bench.works import Work
from tests.report import say

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]

FEW: Final = 1_000
TIMES: Final = 30
"""How often each of the few callers asks, so that the node has all buffers for this load."""
MILLION: Final = int(os.environ.get("BENCH_CALLERS", "1_000_000"))
MIB: Final = 2**20
MAY_GROW: Final = 10 * MIB


@pytest.mark.parametrize("kind", ["one quota", "check", "refused by a rate"])
def test_a_million_callers_take_no_more_memory_than_a_thousand(kind: str):
    """Each caller has a body of its own, and each request has a head of its own.

    Known producer ids have a bound of their own (docs/bounds.md).
    """
    work = Work(subject="quotagate", kind=kind)
    with ExitStack() as stack:
        arena = Arena(stack)
        assert arena.has(work)
        few = array("I", range(FEW))
        for _ in range(TIMES):
            arena.ask_each(work, few)
        before = arena.resident_bytes_of(work)
        arena.ask_each(work, array("I", range(MILLION)))
        grown = arena.resident_bytes_of(work) - before
    say(f"{kind}: {before / MIB:.1f} MiB after {FEW:,} callers, {grown / MIB:+.1f} after {MILLION:,}")
    assert grown <= MAY_GROW
