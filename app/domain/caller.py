"""The sender of a request, as far as decisions depend on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from app.domain.binding import Binding


class Caller(NamedTuple):
    """The sender of a request.

    Attributes:
        key: the name of its API key, or None. All callers without a key share their kept answers, and so do
            keys of one name.
        turn: the name under which it takes turns: its key, or its address (IPv6 by /64).
        bound_to: the entities its key may ask for; empty means any.
        came_at: when the whole request had arrived, by the monotonic clock; 0 if not measured.
        is_gone: whether it has disconnected.
        key_created_ms: when its key was created; distinguishes the key from a later one of the same name (see
            ``Grant``).
        traceparent: the header of that name (W3C Trace Context), unchanged; None without one.
    """

    key: str | None = None
    turn: str = ""
    bound_to: tuple[Binding, ...] = ()
    came_at: float = 0.0
    is_gone: Callable[[], bool] = lambda: False
    key_created_ms: int | None = None
    traceparent: bytes | None = None


ANYONE: Final = Caller()
"""A caller without key and address, such as a test or one of our own commands."""
