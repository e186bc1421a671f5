"""Who may ask what: grants from the bearer key, or from the network of the socket's other end."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

from starlette.types import Scope

from app.domain.ask import Ask
from app.domain.bounds import OutOfBounds
from app.domain.entity import EntityError, network_of, normalise_ip
from app.domain.grant import EVERYTHING, Grant, Permission
from app.http.peer import PEER
from app.http.problems import FieldError, Problem
from app.http.slowdown import Slowdown

ADMIN: Final = "admin"
"""What the history calls whoever sends the admin key; no other key has this name."""
OPEN: Final = Grant(None, frozenset({"decide"}))
NOBODY: Final = Grant(None, frozenset())
CHALLENGE: Final = 'Bearer realm="quotagate"'
REMEMBERED_ADDRESSES: Final = 4096

ADMINISTERED: Final = "/v1/"
ADMINS_ALONE: Final = ("/v1/keys", "/v1/volumes:drill")


def scope_of(method: str, path: str) -> Permission:
    """What a route of administration needs: the one place that says so, to the server and to the document.

    >>> scope_of("GET", "/v1/quotas"), scope_of("PATCH", "/v1/quotas/user=a"), scope_of("GET", "/v1/keys")
    ('read', 'write', 'admin')
    """
    if path.startswith(ADMINS_ALONE):
        return "admin"
    return "read" if method in ("GET", "HEAD") else "write"


class Access:
    """Judges requests by the admin key, the other keys, and the networks that may ask without one.

    No time tells anything of a key. What is sent is hashed first, and only hashes are compared: the admin
    key's in constant time, the others' by a look-up, which could tell something of the hash of what was sent,
    and from that nobody learns a key.

    Args:
        ring: gives what each key grants, by its SHA-256.
        failed: is told why, whenever access is refused.
        now_ms: the node's clock, by which keys expire.
    """

    def __init__(
        self,
        admin_key: str,
        open_to: Iterable[IPv4Network | IPv6Network],
        ring: Callable[[], Mapping[bytes, Grant]] = dict,
        *,
        failed: Callable[[str], None] = lambda _reason: None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._admin = sha256(admin_key.encode()).digest()
        self._admin_grant = Grant(ADMIN, EVERYTHING)
        self._open_to = tuple(open_to)
        self._ring = ring
        self._failed = failed
        self._now_ms = now_ms
        self._slowdown = Slowdown()
        self._by_address = lru_cache(REMEMBERED_ADDRESSES)(self._in_open_network)

    def caller(self, scope: Scope) -> Grant:
        """What the caller of a request may do.

        Raises:
            Problem: 401, if it sends credentials that are not a valid key, even where none is needed.
        """
        if sent := _credentials(scope):
            grant = self._with_key(sent, scope)
        else:
            grant = OPEN if self.is_open(scope) else NOBODY
        state = scope.get("state")
        return grant.certified(state[PEER]) if state and PEER in state else grant

    def is_open(self, scope: Scope) -> bool:
        """Whether the other end of the socket is in an open network, whatever key it sends."""
        client = scope.get("client")
        return client is not None and self._by_address(client[0])

    def require(self, scope: Scope, wanted: Permission) -> Grant:
        """Let a request pass that has a scope.

        Raises:
            Problem: 401 without a valid key, 403 with a key that lacks the scope.
        """
        caller = self.caller(scope)
        self.demand(caller, wanted)
        return caller

    def demand(self, caller: Grant, wanted: Permission) -> None:
        """Let a caller pass who has a scope.

        Raises:
            Problem: as require does.
        """
        if wanted in caller.scopes:
            return
        if caller.name is None:
            raise self._key_needed(f"a key with the scope {wanted}")
        self._failed("scope")
        challenge = f'{CHALLENGE}, error="insufficient_scope", scope="{wanted}"'
        raise Problem(403, f"The key lacks the scope {wanted}.", headers={"WWW-Authenticate": challenge})

    def confine(self, caller: Grant, ask: Ask, field: str = "") -> Ask:
        """The ask as this caller asks it: in the name of his certificate if it names no principal.

        Raises:
            Problem: 403 for one that is not, naming its field.
        """
        if ask.principal is None and caller.principal is not None:
            ask = replace(ask, principal=caller.principal)
        if not caller.covers(ask):
            self._failed("bound")
            outside = FieldError(field, "is for an entity that the caller is not bound to")
            holder = "key is bound" if caller.name else "certificate names another principal"
            raise Problem(403, f"The {holder}, and may not ask for this.", [outside])
        return ask

    def shared(self, outside: OutOfBounds, field: str = "") -> Problem:
        """403 for an ask of a bound caller that would record in a bucket of others too, or give back to one.

        Args:
            field: of the ask that is the whole body; of one in a batch, of its place.
        """
        self._failed("bound")
        why = FieldError(f"{field}/{outside.field}", f"leads to {outside.bucket}, which others share")
        return Problem(403, "The caller is bound, and may not record or give back for others.", [why])

    def require_key(self, scope: Scope) -> Grant:
        """Let a request pass that has a valid key, whatever its scopes.

        Raises:
            Problem: 401 without one.
        """
        caller = self.caller(scope)
        if caller.name is None:
            raise self._key_needed("a key")
        return caller

    def who(self, scope: Scope) -> str:
        """Who sends a request: ``admin`` with the admin key, else the name of the key.

        Raises:
            Problem: 401 without a valid key.
        """
        return self.require_key(scope).name or ADMIN

    def _with_key(self, sent: list[bytes], scope: Scope) -> Grant:
        scheme, _, key = sent[0].partition(b" ")
        key = key.strip(b" ")
        if len(sent) != 1 or not key or scheme.lower() != b"bearer":
            raise self._not_valid("malformed", scope)
        digest = sha256(key).digest()
        is_admin = hmac.compare_digest(digest, self._admin)
        grant = self._admin_grant if is_admin else self._ring().get(digest)
        if grant is None:
            raise self._not_valid("unknown", scope)
        if grant.until_ms is not None and grant.until_ms <= self._now_ms():
            raise self._not_valid("expired", scope)
        self._slowdown.forgive(_address(scope))
        return grant

    def _not_valid(self, reason: str, scope: Scope) -> Problem:
        """One answer for every reason: who has no key is not told whether it was one once."""
        self._failed(reason)
        wait_s = self._slowdown.wait_s(_address(scope), time.monotonic())
        challenge = f'{CHALLENGE}, error="invalid_token"'
        return Problem(401, "The key is not valid.", headers={"WWW-Authenticate": challenge}, wait_s=wait_s)

    def _key_needed(self, key: str) -> Problem:
        self._failed("missing")
        detail = f"This needs {key}: send Authorization: Bearer KEY."
        return Problem(401, detail, headers={"WWW-Authenticate": CHALLENGE})

    def _in_open_network(self, address: str) -> bool:
        try:
            parsed = ip_address(address)
        except ValueError:  # a unix socket's path, or nothing
            return False
        if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        return any(parsed in network for network in self._open_to)


def turn_of(grant: Grant, scope: Scope) -> str:
    """As whom the sender of a request takes turns: by its key, or else by its address."""
    return f"key {grant.name}" if grant.name is not None else _turn_of(_address(scope))


@lru_cache(REMEMBERED_ADDRESSES)
def _turn_of(address: str) -> str:
    """An address as callers without a key take turns by it: an IPv6 one by its /64.

    >>> _turn_of("2001:db8::7"), _turn_of("::ffff:10.0.0.7"), _turn_of("")
    ('2001:db8::/64', '10.0.0.7', '')
    """
    try:
        return network_of(normalise_ip(address), 64)
    except EntityError:  # a unix socket's path, or nothing
        return address


def _address(scope: Scope) -> str:
    """The socket's other end, as far as it has an address."""
    client = scope.get("client")
    return client[0] if client else ""


def _credentials(scope: Scope) -> list[bytes]:
    return [value for name, value in scope["headers"] if name == b"authorization"]
