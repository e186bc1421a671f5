"""Reads asks all at once."""

from __future__ import annotations

from app.admission.gathering.slices import completed
from app.domain.ask import Ask
from app.http import wire
from app.http.wire import Clock


def decode_ask(body: bytes, clock: Clock) -> Ask:
    """The ask in a body, as ``app.http.wire.decode_ask`` reads it."""
    return completed(wire.decode_ask(body, clock))
