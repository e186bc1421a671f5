"""Who may ask what: scopes from the bearer key, or from the network of the socket's other end."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from functools import lru_cache
from hashlib import sha256
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final, Literal, get_args

from starlette.types import Scope

from app.http.problems import Problem

Permission = Literal["decide", "account", "read", "write", "admin"]
"""What a key may be for; the wire calls it a scope, which ASGI means otherwise."""

EVERYTHING: Final[frozenset[Permission]] = frozenset(get_args(Permission))
OPEN: Final[frozenset[Permission]] = frozenset({"decide"})
NOTHING: Final[frozenset[Permission]] = frozenset()
REMEMBERED_ADDRESSES: Final = 4096


class Access:
    """Judges requests by one admin key and the networks that may ask for decisions without it."""

    def __init__(self, admin_key: str, open_to: Iterable[IPv4Network | IPv6Network]) -> None:
        self._admin = sha256(admin_key.encode()).digest()
        self._open_to = tuple(open_to)
        self._by_address = lru_cache(REMEMBERED_ADDRESSES)(self._without_key)

    def granted(self, scope: Scope) -> frozenset[Permission]:
        """The scopes a request has.

        Raises:
            Problem: 401, if it sends credentials that are not a valid key, even where none is needed.
        """
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        if sent:
            return self._with_key(sent)
        client = scope.get("client")
        return self._by_address(client[0]) if client else NOTHING

    def require(self, scope: Scope, wanted: Permission) -> None:
        """Let a request pass that has a scope.

        Raises:
            Problem: 401 without a valid key, 403 with a key that lacks the scope.
        """
        if wanted in self.granted(scope):
            return
        if any(name == b"authorization" for name, _ in scope["headers"]):
            challenge = f'Bearer realm="quotagate", error="insufficient_scope", scope="{wanted}"'
            raise Problem(403, f"The key lacks the scope {wanted}.", headers={"WWW-Authenticate": challenge})
        raise Problem(
            401,
            f"This needs a key with the scope {wanted}: send Authorization: Bearer KEY.",
            headers={"WWW-Authenticate": 'Bearer realm="quotagate"'},
        )

    def _with_key(self, sent: list[bytes]) -> frozenset[Permission]:
        scheme, _, key = sent[0].partition(b" ")
        digest = sha256(key.strip(b" ")).digest()
        if len(sent) == 1 and scheme.lower() == b"bearer" and hmac.compare_digest(digest, self._admin):
            return EVERYTHING
        challenge = 'Bearer realm="quotagate", error="invalid_token"'
        raise Problem(401, "The key is not valid.", headers={"WWW-Authenticate": challenge})

    def _without_key(self, address: str) -> frozenset[Permission]:
        """What the socket's address alone is good for; a unix socket's has no network."""
        try:
            parsed = ip_address(address)
        except ValueError:
            return NOTHING
        if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        return OPEN if any(parsed in network for network in self._open_to) else NOTHING
