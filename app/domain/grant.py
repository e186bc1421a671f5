"""Grants: the permissions of a caller, and the entities that it may ask for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, Literal, get_args

from app.domain.ask import Ask
from app.domain.binding import Binding

Permission = Literal["decide", "account", "read", "write", "admin"]
"""A permission of a key; the API calls it a scope."""

PERMISSIONS: Final[tuple[Permission, ...]] = get_args(Permission)
EVERYTHING: Final = frozenset(PERMISSIONS)
BINDABLE: Final[frozenset[Permission]] = frozenset({"decide", "account"})
"""The scopes whose requests are asks, and so name an entity that a binding can restrict."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The permissions of the caller of one request.

    Attributes:
        name: the name of the API key; None without one.
        bound_to: the entities that the caller may ask for; empty means any.
        principal: the principal in the caller's certificate, used for asks without one.
        created_ms: when its key was created, by the clock of the node that created it. Rotation keeps it, so
            it separates a key from a later one of the same name. None for the admin key and without a key.
        until_ms: when the grant ends, by the node's clock.
        is_unrestricted: whether the caller may ask for any entity, and its asks are used unchanged.
    """

    name: str | None
    scopes: frozenset[Permission]
    bound_to: tuple[Binding, ...] = ()
    until_ms: int | None = None
    principal: str | None = None
    created_ms: int | None = None
    is_unrestricted: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_unrestricted", not self.bound_to and self.principal is None)

    def certified(self, name: str) -> Grant:
        """This grant for a caller whose certificate has this name; ``""`` means no name.

        A caller without a key may then ask only for itself: a certificate proves an identity, and gives no
        right to ask for others.

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
        """Whether the caller may ask this: it has no bindings, or one of them covers the ask.

        >>> key = Grant("gateway", BINDABLE, (Binding.parse("user=acme"), Binding.parse("ip=10.0.0.7")))
        >>> key.covers(Ask(principal="acme")), key.covers(Ask(principal="other", ip="10.0.0.7"))
        (True, True)
        >>> key.covers(Ask(principal="other")), key.covers(Ask())
        (False, False)
        """
        return not self.bound_to or any(binding.covers(ask) for binding in self.bound_to)


def expand_scopes(scopes: frozenset[Permission]) -> frozenset[Permission]:
    """The scopes, with all scopes that they include.

    >>> expand_scopes(frozenset({"admin"})) == EVERYTHING
    True
    """
    return EVERYTHING if "admin" in scopes else scopes
