"""Floods that take half a minute: a busy node answers late but from the store, or sheds."""

from __future__ import annotations

from typing import Final

import pytest

from tests.load.holding import HOT, HOT_IDS, SECRET, flood_and_check
from tests.service import running

SECONDS: Final = 6.0
"""The length of each of the four floods."""
FLOODS: Final = {"singles with ids": (HOT_IDS, 0), "batches of 100": (HOT, 100)}
AT_LEAST: Final = 1_000
"""Fewer decisions by the store than this would be no flood."""


@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("connections", [64, 512])
def test_every_answer_comes_from_the_store_in_a_flood(connections, flood):
    """Meanwhile limits of a hundred, on a rate and on ids, admit exactly a hundred."""
    ask, batch = FLOODS[flood]
    with running(environment=SECRET) as node:
        found = flood_and_check(node, ask=ask, batch=batch, connections=connections, seconds=SECONDS)
    assert found.sources["store"] >= AT_LEAST
