"""How soon one node follows another, in polls: seconds would depend on how crowded the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

from app.catalog.serial import POLL_S
from tests.report import say

IN_A_SECOND: Final = round(1 / POLL_S)
"""How often a node polls its catalog in one second."""
AT_MOST: Final = 240


def polls_until(holds: Callable[[], object]) -> int:
    """The number of polls until something holds. A poll pauses as long as a node's, and then looks.

    A look waits for a processor as often as a node's own poll does, so a busy machine stretches both.
    """
    for polls in range(1, AT_MOST + 1):
        time.sleep(POLL_S)  # one poll
        if holds():
            return polls
    raise AssertionError(f"it did not come true within {AT_MOST} polls")


def follows_within_a_second(what: str, polls: Sequence[int]) -> None:
    """Check that the median change took no more polls than there are in a second."""
    say(f"{what} after {sorted(polls)} polls, of which a second has {IN_A_SECOND}")
    assert median(polls) <= IN_A_SECOND, f"{what} after {polls} polls"
