"""Grants: what a caller may do, and for whom."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from app.domain.ask import Ask
from app.domain.binding import Binding

Permission = Literal["decide", "account", "read", "write", "admin"]
"""What a key may be for; the wire calls it a scope."""

PERMISSIONS: Final[tuple[Permission, ...]] = get_args(Permission)
EVERYTHING: Final = frozenset(PERMISSIONS)
BINDABLE: Final[frozenset[Permission]] = frozenset({"decide", "account"})
"""Scopes whose use is an ask, which names an entity; a binding could say nothing of the others."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What the caller of one request may do.

    Attributes:
        name: of the key; None without one.
        bound_to: the entities that may be asked for; none of them is no bound.
        principal: of the caller's certificate, for asks that name none.
        until_ms: from when on it is no grant any more, by the node's clock.
    """

    name: str | None
    scopes: frozenset[Permission]
    bound_to: tuple[Binding, ...] = ()
    until_ms: int | None = None
    principal: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the caller may ask for whom he likes, as he asks it."""
        return not self.bound_to and self.principal is None

    def certified(self, name: str) -> Grant:
        """The grant to one whose certificate names him so; ``""`` names nobody.

        Without a key he asks for himself alone: a certificate says who he is, not for whom he may speak.

        >>> Grant("gateway", BINDABLE).certified("alice").covers(Ask(principal="bob"))
        True
        >>> open_network = Grant(None, BINDABLE)
        >>> open_network.certified("alice").covers(Ask(principal="bob"))
        False
        >>> open_network.certified("").covers(Ask())
        False
        """
        bound_to = (Binding((("user", name, False),)),) if self.name is None else self.bound_to
        return replace(self, bound_to=bound_to, principal=name or None)

    def covers(self, ask: Ask) -> bool:
        """Whether an ask is within the bounds: within any one of them, if there are some.

        >>> key = Grant("gateway", BINDABLE, (Binding.parse("user=acme"), Binding.parse("ip=10.0.0.7")))
        >>> key.covers(Ask(principal="acme")), key.covers(Ask(principal="other", ip="10.0.0.7"))
        (True, True)
        >>> key.covers(Ask(principal="other")), key.covers(Ask())
        (False, False)
        """
        return not self.bound_to or any(binding.covers(ask) for binding in self.bound_to)


def widened(scopes: frozenset[Permission]) -> frozenset[Permission]:
    """The scopes with all that they include.

    >>> widened(frozenset({"admin"})) == EVERYTHING
    True
    """
    return EVERYTHING if "admin" in scopes else scopes
