"""The formula of ``app/domain/shape.py``, which gives the numbers in the table there."""

from __future__ import annotations

import math

from app.domain.shape import CELLS


def false_seen(mean_ids: float, hashes: int) -> float:
    """The probability that one layer takes an unseen id as seen, given the mean number of ids per block."""
    unset_by_one = (1 - 1 / CELLS) ** hashes
    chance, here = 0.0, math.exp(-mean_ids)
    for ids in range(int(mean_ids + 20 * math.sqrt(mean_ids)) + 30):
        chance += here * (1 - unset_by_one**ids) ** hashes
        here *= mean_ids / (ids + 1)
    return chance
