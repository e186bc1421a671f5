"""The sender of a request, as far as decisions depend on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from app.domain.binding import Binding


class Caller(NamedTuple):
    """The sender of a request.

    Attributes:
        key: the name of its API key, or None. For kept answers, all callers without a key are one caller.
        turn: the name under which it takes turns: its key, or its address (IPv6 by /64).
        bound_to: the entities its key may ask for; empty means any.
        came_at: when the whole request had arrived, by the monotonic clock; 0 if not measured.
        is_gone: whether it has disconnected.
    """

    key: str | None = None
    turn: str = ""
    bound_to: tuple[Binding, ...] = ()
    came_at: float = 0.0
    is_gone: Callable[[], bool] = lambda: False


ANYONE: Final = Caller()
"""A caller without key and address, such as a test or one of our own commands."""
