"""Who sends a request, as far as a decision on it depends on that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from app.domain.binding import Binding


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    Attributes:
        key: the name of its key; None without one: callers without a key are one caller to kept answers.
        turn: whom it takes turns as: its key, or its address (IPv6 by /64).
        bound_to: the entities that its key may ask for; none of them is no bound.
        came_at: when its request had come whole, by the event loop's clock; 0 if nobody looked.
        is_gone: says whether it has hung up.
    """

    key: str | None = None
    turn: str = ""
    bound_to: tuple[Binding, ...] = ()
    came_at: float = 0.0
    is_gone: Callable[[], bool] = lambda: False


ANYONE: Final = Caller()
"""A caller without a key and without an address, such as a test or a command of our own."""
