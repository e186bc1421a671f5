"""A minute of floods in every run of the tests: a busy node answers late and true, or says it is busy."""

from __future__ import annotations

from typing import Final

import pytest

from tests.load.holding import HOT, HOT_IDS, SECRET, held
from tests.service import running

SECONDS: Final = 12.0
"""For each of the four, which makes a minute with their beginnings and ends."""
FLOODS: Final = {"singles with ids": (HOT_IDS, 0), "batches of 100": (HOT, 100)}
AT_LEAST: Final = 1_000
"""Decisions of the store's, without which it was no flood."""


@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("connections", [64, 512])
def test_nothing_is_made_up_in_a_flood(connections, flood):
    """And a limit of a hundred beside it admits a hundred, of a rate and of ids."""
    ask, batch = FLOODS[flood]
    with running(environment=SECRET) as node:
        found = held(node, ask=ask, batch=batch, connections=connections, seconds=SECONDS)
    assert found.sources["store"] >= AT_LEAST
