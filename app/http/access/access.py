"""Access control: grants from the API key, or from the caller's network."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from time import monotonic
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from app.admission.errors import OverloadedError
from app.domain.ask import Ask
from app.domain.caller import Caller
from app.domain.errors import OutOfBoundsError
from app.domain.grant import EVERYTHING, Grant, Permission
from app.http import host
from app.http.access.refusals import Refusals, fingerprint
from app.http.access.slowdown import Slowdown, source_of
from app.http.head import AUTHORIZATION, HOST, TRACEPARENT, RequestHead
from app.http.problems import FieldError, ProblemError

ADMIN: Final = "admin"
"""The name of the admin key in the history; no other key has this name."""
OPEN: Final = Grant(None, frozenset({"decide"}))
NOBODY: Final = Grant(None, frozenset())
CHALLENGE: Final = 'Bearer realm="quotagate"'
REMEMBERED_ADDRESSES: Final = 4096
"""Parsing an address takes longer than the rest of access control, so parsed ones are kept, and nothing else
of a caller. Each takes at most about 200 bytes: together less than a megabyte."""
LOOPBACK: Final = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
ALLOWED_HOSTS: Final = ("localhost",)

STARTING: Final = "starting"
"""The cause for which requests are shed while neither keys nor quotas are loaded."""

ADMINISTERED: Final = "/v1/"
ADMINS_ALONE: Final = ("/v1/keys", "/v1/volumes:drill")
LEASES: Final = "/v1/leases"

_ADDRESS: ContextVar[str] = ContextVar("address", default="")
"""The sender of the current request, for the log: later refusals do not have the request."""


def scope_of(method: str, path: str) -> Permission:
    """Return the scope that a route other than a hot one needs, for the server and for the OpenAPI document.

    >>> scope_of("GET", "/v1/quotas"), scope_of("PATCH", "/v1/quotas/user=a"), scope_of("GET", "/v1/keys")
    ('read', 'write', 'admin')
    >>> scope_of("DELETE", "/v1/leases/abc")
    'account'
    """
    if path.startswith(ADMINS_ALONE):
        return "admin"
    if path == LEASES or path.startswith(f"{LEASES}/"):
        return "account"
    return "read" if method in ("GET", "HEAD") else "write"


IsGone = Callable[[], bool]
Ring = Mapping[bytes, Grant]
"""The grant of each key, by its SHA-256. It is immutable: a change of any key makes a new one."""
_NO_KEYS: Final[Ring] = MappingProxyType({})


class SenderAddress(Struct, frozen=True, gc=False):
    """An address from which requests come.

    Attributes:
        grant: the grant of its requests without a key.
        source: the name under which they take turns: the address, or its IPv6 network.
        is_loopback: whether it is a loopback address.
    """

    grant: Grant
    source: str
    is_loopback: bool


class Sender(Struct, gc=False):
    """The sender of a request, as its head and its connection identify it.

    Attributes:
        turn: the name under which the sender takes turns: its key, or else its address.
        traceparent: the caller's span, from the head; None if it is missing or repeated.
    """

    grant: Grant
    turn: str
    traceparent: bytes | None

    def caller(self, is_gone: IsGone) -> Caller:
        """Return the caller of a request that is complete now.

        Args:
            is_gone: returns whether it has disconnected.
        """
        grant = self.grant
        fields = (
            grant.name,
            self.turn,
            grant.bound_to,
            monotonic(),
            is_gone,
            grant.created_ms,
            self.traceparent,
        )
        return tuple.__new__(Caller, fields)  # four times as fast as calling the named tuple


class Access:
    """Judges requests by the admin key, the other keys, and the networks that may ask without one.

    Response times reveal nothing about a key. A key is hashed first, and only hashes are compared: the admin
    key's in constant time, the others' by a look-up. The look-up may reveal something about the hash of
    the sent key, but a hash reveals no key.

    Args:
        ring: returns the keys in force.
        allowed_hosts: host names that callers over loopback may use without a key, besides addresses.
        failed: called with the reason whenever access is refused.
        now_ms: the node's clock, by which keys expire.
        is_starting: whether neither keys nor quotas are loaded yet, so that no caller can be judged.
    """

    def __init__(
        self,
        admin_key: str,
        open_to: Iterable[IPv4Network | IPv6Network],
        ring: Callable[[], Ring] = lambda: _NO_KEYS,
        *,
        allowed_hosts: Collection[str] = ALLOWED_HOSTS,
        failed: Callable[[str], None] = lambda _reason: None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        is_starting: Callable[[], bool] = lambda: False,
    ) -> None:
        self._admin = sha256(admin_key.encode()).digest()
        self._admin_grant = Grant(ADMIN, EVERYTHING)
        self._open_to = tuple(open_to)
        self._ring = ring
        self._allowed_hosts = frozenset(name.lower().removesuffix(".") for name in allowed_hosts)
        self._failed = failed
        self._refusals = Refusals()
        self._now_ms = now_ms
        self._is_starting = is_starting
        self._slowdown = Slowdown()
        self._by_address = lru_cache(REMEMBERED_ADDRESSES)(self._known_address)

    def caller(self, head: RequestHead) -> Grant:
        """Return the grant of a request's caller.

        Raises:
            ProblemError: 401 for an invalid key, even if none is needed.
            OverloadedError: the process is starting, so keys are not known yet.
        """
        if keys := head.fields.get(AUTHORIZATION):
            grant = self._with_key(keys, head.address)
        else:
            grant = self._by_address(head.address).grant
        return grant if head.peer is None else grant.certified(head.peer)

    def asker(self, head: RequestHead) -> Sender:
        """Return the sender of a decision request; without a key, pages of other sites are refused.

        A browser sends the requests of such a page from its own address, which may be in an open network.

        Raises:
            ProblemError: 401 as ``caller``; 403 for a page of another site, and for an unknown host name over
                loopback, since a page can make its own name resolve to this address.
        """
        fields, address = head.fields, self._by_address(head.address)
        if AUTHORIZATION in fields or head.peer is not None:
            grant = self.caller(head)
            if grant.name is not None:
                return self.sender(grant, head)
        else:
            grant = address.grant
        if b"origin" in fields or b"sec-fetch-site" in fields:
            self._refuse_other_sites(head)
        # Callers outside the open networks need a key anyway.
        if address.is_loopback and grant.scopes and HOST in fields and not self._is_ours(fields[HOST][0]):
            self._failed("host")
            raise ProblemError(
                403, "Without a key, ask over loopback by an address or by a name in QUOTAGATE_ALLOWED_HOSTS."
            )
        return self.sender(grant, head)

    def sender(self, grant: Grant, head: RequestHead) -> Sender:
        """Return the sender of a request with this grant."""
        name, spans = grant.name, head.fields.get(TRACEPARENT)
        turn = self._by_address(head.address).source if name is None else f"key {name}"
        return Sender(grant, turn, spans[0] if spans and len(spans) == 1 else None)

    def resume(self, head: RequestHead) -> None:
        """Set the address for the log again: other requests came since the sender was identified."""
        _ADDRESS.set(head.address)

    def is_open(self, head: RequestHead) -> bool:
        """Whether the caller's address is in an open network, with or without a key."""
        return self._by_address(head.address).grant is OPEN

    def may_read(self, head: RequestHead) -> bool:
        """Whether the caller of a request has the scope read.

        Raises:
            ProblemError: 401 for an invalid key.
        """
        try:
            return "read" in self.caller(head).scopes
        except OverloadedError:
            return False

    def require(self, head: RequestHead, wanted: Permission) -> Grant:
        """Require a scope of a request, and return its grant.

        Raises:
            ProblemError: 401 without a valid key, 403 with a key that lacks the scope.
        """
        caller = self.caller(head)
        self.demand(caller, wanted)
        return caller

    def demand(self, caller: Grant, wanted: Permission) -> None:
        """Require a scope of a caller.

        Raises:
            ProblemError: as ``require``.
            OverloadedError: the process is starting.
        """
        if wanted in caller.scopes:
            if self._is_starting():
                raise OverloadedError(STARTING)
            return
        if caller.name is None:
            raise self._key_needed(f"a key with the scope {wanted}")
        self._refused("scope", key=caller.name)
        challenge = f'{CHALLENGE}, error="insufficient_scope", scope="{wanted}"'
        raise ProblemError(403, f"The key lacks the scope {wanted}.", headers={"WWW-Authenticate": challenge})

    def confine(self, caller: Grant, ask: Ask, field: str = "") -> Ask:
        """Confine an ask to the caller's bounds; the principal defaults to the certificate's.

        Raises:
            ProblemError: 403 that names the field, for an ask outside the caller's bounds.
        """
        if ask.principal is None and caller.principal is not None:
            ask = replace(ask, principal=caller.principal)
        if not caller.covers(ask):
            self._is_bound(caller)
            outside = FieldError(field, "is for an entity that the caller is not bound to")
            holder = "key is bound" if caller.name else "certificate names another principal"
            raise ProblemError(403, f"The {holder}, and may not ask for this.", [outside])
        return ask

    def shared(self, caller: Grant, outside: OutOfBoundsError, field: str = "") -> ProblemError:
        """Return the 403 for a bound caller that would record or refund in a shared bucket.

        Args:
            field: the ask in a batch; empty if it is the whole body.
        """
        self._is_bound(caller)
        why = FieldError(f"{field}/{outside.field}", f"charges {outside.bucket}, which others share")
        return ProblemError(403, "The caller is bound, and may not record or refund for others.", [why])

    def _is_bound(self, caller: Grant) -> None:
        if caller.name is None:  # bound by a certificate
            self._failed("bound")
        else:
            self._refused("bound", key=caller.name)

    def require_key(self, head: RequestHead) -> Grant:
        """Require a valid key of a request, with any scopes, and return its grant.

        Raises:
            ProblemError: 401 without one.
        """
        caller = self.caller(head)
        if caller.name is None:
            raise self._key_needed("a key")
        return caller

    def who(self, head: RequestHead) -> str:
        """Return the name of a request's key; ``admin`` for the admin key.

        Raises:
            ProblemError: 401 without a valid key.
        """
        return self.require_key(head).name or ADMIN

    def _known_address(self, address: str) -> SenderAddress:
        grant = OPEN if is_in(address, self._open_to) else NOBODY
        return SenderAddress(grant, source_of(address), is_in(address, LOOPBACK))

    def _refuse_other_sites(self, head: RequestHead) -> None:
        """Refuse a request of a page of another site.

        Raises:
            ProblemError: 403.
        """
        named, fields = head.host, head.fields
        sites, origins = fields.get(b"sec-fetch-site", ()), fields.get(b"origin", ())
        if any(site.strip().lower() == b"cross-site" for site in sites) or not all(
            named and host.is_same(origin.strip(), named) for origin in origins
        ):
            self._failed("origin")
            raise ProblemError(403, "A page of another site needs a key.")

    def _with_key(self, sent: Sequence[bytes], address: str) -> Grant:
        if self._is_starting():
            raise OverloadedError(STARTING)
        scheme, _, key = sent[0].partition(b" ")
        key = key.strip(b" ")
        _ADDRESS.set(address)
        if len(sent) != 1 or not key or scheme.lower() != b"bearer":
            raise self._not_valid("malformed", address)
        digest = sha256(key).digest()
        is_admin = hmac.compare_digest(digest, self._admin)
        grant = self._admin_grant if is_admin else self._ring().get(digest)
        if grant is None:
            raise self._not_valid("unknown", address, fingerprint=fingerprint(digest))
        if grant.until_ms is not None and grant.until_ms <= self._now_ms():
            raise self._not_valid("expired", address, key=grant.name or "")
        self._slowdown.forgive(address)
        return grant

    def _not_valid(self, reason: str, address: str, **key: str) -> ProblemError:
        """Return the same answer for every reason, so that it does not reveal former keys."""
        self._refused(reason, **key)
        wait_s = self._slowdown.wait_s(address, monotonic())
        challenge = f'{CHALLENGE}, error="invalid_token"'
        return ProblemError(
            401, "The key is not valid.", headers={"WWW-Authenticate": challenge}, wait_s=wait_s
        )

    def _refused(self, reason: str, **key: str) -> None:
        """Count and log a refusal; a malformed key without its fingerprint, which may reveal it."""
        self._failed(reason)
        self._refusals.record(reason, _ADDRESS.get(), monotonic(), **key)

    def _is_ours(self, name: bytes) -> bool:
        found = host.parts(name)
        return found is not None and (found.is_address or found.name in self._allowed_hosts)

    def _key_needed(self, key: str) -> ProblemError:
        self._failed("missing")
        detail = f"This needs {key}: send Authorization: Bearer KEY."
        return ProblemError(401, detail, headers={"WWW-Authenticate": CHALLENGE})


def is_in(address: str, networks: Iterable[IPv4Network | IPv6Network]) -> bool:
    """Whether an address is in one of these networks."""
    try:
        parsed = ip_address(address)
    except ValueError:  # a unix socket's path, or nothing
        return False
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return any(parsed in network for network in networks)
