"""Runs work that is divided into steps, all at once."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from app.domain.ask import Ask
from app.http import wire
from app.http.wire import Clock

T = TypeVar("T")


def done(work: Generator[None, None, T]) -> T:
    """The result of the last step."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def decode_ask(body: bytes, clock: Clock) -> Ask:
    """The ask in a body, as ``app.http.wire.decode_ask`` reads it."""
    return done(wire.decode_ask(body, clock))
