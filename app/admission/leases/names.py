"""The names of leases: 128 random bits, sealed with the lease's content, so that any node can settle it."""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from hashlib import blake2b
from typing import Final

from msgspec import MsgspecError, Struct, msgpack

from app.domain.ask import Ask

SEAL_BYTES: Final = 16
LONGEST_NAME: Final = 8 * 1024
"""The longest name in characters that is read; five names of 512 bytes fit."""

Names = tuple[str | None, str | None, str | None, str | None, str | None]


class LeaseName(Struct, frozen=True, array_like=True):
    """The content of a lease's name.

    Attributes:
        lease: the random bits, by which buckets know the lease.
        key: the name of the API key that got it; no other key can settle it.
        names: principal, client-id, address, broker and listener of the ask.
        granted: the usage by field.
        holds: whether any bucket holds it; none does if no quota applied.
        key_created_ms: when that key was created: a later key of the same name is another one. None for the
            admin key, and in names from nodes of the previous version, which go by the key's name alone.
    """

    lease: bytes
    key: str | None
    names: Names
    granted: dict[str, float]
    holds: bool
    key_created_ms: int | None = None

    def is_of(self, key: str | None, created_ms: int | None) -> bool:
        """Return whether the key of this name, created then, got the lease."""
        return self.key == key and self.key_created_ms in (None, created_ms)

    def ask(self, spent: dict[str, float], at_ms: int | None) -> Ask:
        """The ask that settles the lease; a field missing from ``spent`` was not spent."""
        principal, client_id, ip, broker, listener = self.names
        usage = {field: spent.get(field, 0.0) for field in self.granted}
        return Ask(usage, None, principal, client_id, ip, broker, listener, "record", at_ms=at_ms)


def seal(name: LeaseName, secret: bytes) -> str:
    """The name as text, for the holder of the lease.

    >>> made = LeaseName(bytes(16), "gateway", ("alice", None, None, None, None), {"requests": 5}, True)
    >>> unseal(seal(made, b"secret"), b"secret") == made, unseal(seal(made, b"secret"), b"other")
    (True, None)
    """
    packed = msgpack.encode(name)
    return urlsafe_b64encode(_seal_of(packed, secret) + packed).rstrip(b"=").decode()


def unseal(text: str, secret: bytes) -> LeaseName | None:
    """The content of a name; None if it is not the name of a lease."""
    if len(text) > LONGEST_NAME:
        return None
    try:
        sealed = urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
    except ValueError:
        return None
    packed = sealed[SEAL_BYTES:]
    if not hmac.compare_digest(sealed[:SEAL_BYTES], _seal_of(packed, secret)):
        return None
    try:
        return msgpack.decode(packed, type=LeaseName)
    except MsgspecError:
        return None  # of another version


def _seal_of(packed: bytes, secret: bytes) -> bytes:
    return blake2b(packed, digest_size=SEAL_BYTES, key=secret, person=b"lease").digest()
