"""Runs work that is divided into steps, all at once."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def done(work: Generator[None, None, T]) -> T:
    """The result of the last step."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
