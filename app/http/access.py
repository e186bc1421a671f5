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
ADMIN: Final = "admin"
"""What the history calls whoever sends the admin key."""
CHALLENGE: Final = 'Bearer realm="quotagate"'
REMEMBERED_ADDRESSES: Final = 4096


class Access:
    """Judges requests by one admin key and the networks that may ask for decisions without it."""

    def __init__(self, admin_key: str, open_to: Iterable[IPv4Network | IPv6Network]) -> None:
        self._admin = sha256(admin_key.encode()).digest()
        self._open_to = tuple(open_to)
        self._by_address = lru_cache(REMEMBERED_ADDRESSES)(self._in_open_network)

    def granted(self, scope: Scope) -> frozenset[Permission]:
        """The scopes a request has.

        Raises:
            Problem: 401, if it sends credentials that are not a valid key, even where none is needed.
        """
        if sent := _credentials(scope):
            return self._with_key(sent)
        return OPEN if self.is_open(scope) else NOTHING

    def is_open(self, scope: Scope) -> bool:
        """Whether the other end of the socket is in an open network, whatever key it sends."""
        client = scope.get("client")
        return client is not None and self._by_address(client[0])

    def require(self, scope: Scope, wanted: Permission) -> None:
        """Let a request pass that has a scope.

        Raises:
            Problem: 401 without a valid key, 403 with a key that lacks the scope.
        """
        if wanted in self.granted(scope):
            return
        if _credentials(scope):
            challenge = f'{CHALLENGE}, error="insufficient_scope", scope="{wanted}"'
            raise Problem(403, f"The key lacks the scope {wanted}.", headers={"WWW-Authenticate": challenge})
        raise _key_needed(f"a key with the scope {wanted}")

    def require_key(self, scope: Scope) -> None:
        """Let a request pass that has a valid key, whatever its scopes.

        Raises:
            Problem: 401 without one.
        """
        self.granted(scope)
        if not _credentials(scope):
            raise _key_needed("a key")

    def who(self, scope: Scope) -> str:
        """Who sends a request: ``admin`` with the admin key, else the name of the key.

        Raises:
            Problem: 401 without a valid key.
        """
        self.require_key(scope)
        return ADMIN

    def _with_key(self, sent: list[bytes]) -> frozenset[Permission]:
        scheme, _, key = sent[0].partition(b" ")
        digest = sha256(key.strip(b" ")).digest()
        if (
            len(sent) == 1
            and key
            and scheme.lower() == b"bearer"
            and hmac.compare_digest(digest, self._admin)
        ):
            return EVERYTHING
        challenge = f'{CHALLENGE}, error="invalid_token"'
        raise Problem(401, "The key is not valid.", headers={"WWW-Authenticate": challenge})

    def _in_open_network(self, address: str) -> bool:
        try:
            parsed = ip_address(address)
        except ValueError:  # a unix socket's path, or nothing
            return False
        if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        return any(parsed in network for network in self._open_to)


def _credentials(scope: Scope) -> list[bytes]:
    return [value for name, value in scope["headers"] if name == b"authorization"]


def _key_needed(key: str) -> Problem:
    detail = f"This needs {key}: send Authorization: Bearer KEY."
    return Problem(401, detail, headers={"WWW-Authenticate": CHALLENGE})
