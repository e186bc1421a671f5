"""API keys, in the database and in memory: their SQL, and following their changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from secrets import token_urlsafe
from types import MappingProxyType
from typing import Any, Final, TypeVar

import structlog
from sqlalchemy import RowMapping, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from app.catalog.errors import CatalogUnavailableError, KeyExistsError, KeyExpiredError, KeyNotFoundError
from app.catalog.serial import SerialExecutor
from app.catalog.sql import Sql
from app.catalog.tables import KEYS, STATE
from app.domain.binding import Binding
from app.domain.grant import PERMISSIONS, Grant, expand_scopes

PREFIX: Final = "qg_"
"""The start of every key, by which people and secret scanners recognise one."""
KEY_BYTES: Final = 32

T = TypeVar("T")

log = structlog.get_logger("quotagate.keys")


@dataclass(frozen=True, slots=True)
class Key:
    """An API key as stored; times are by the nodes' clocks.

    A key is 256 random bits, so its plain SHA-256 is as hard to reverse as the key is to guess: 2^255 tries
    on average. A slow hash would only slow down each decision; it is meant for guessable passwords.

    Attributes:
        digest: the SHA-256 of the key, in hex.
        scopes, bound_to: as the API spells them.
        former_digest, former_until_ms: the key before the last rotation, and when it ends.
    """

    name: str
    digest: str
    scopes: tuple[str, ...]
    bound_to: tuple[str, ...]
    expires_ms: int | None
    created_ms: int
    rotated_ms: int | None = None
    former_digest: str | None = None
    former_until_ms: int | None = None


Ring = Mapping[bytes, Grant]
"""The grant of each valid key, by the key's SHA-256."""


class Keys:
    """The keys of one deployment: from memory to authenticate requests, from the database to administer them.

    The catalog's row of state has a version of the keys, which each node polls like the version of the quotas
    (see docs/decisions). A node that sees a new version reads all keys, which are few.
    """

    def __init__(self, database: Sql) -> None:
        self.ring: Ring = MappingProxyType({})
        self._sql = database
        self._version = -1
        self._serial = SerialExecutor()
        self._reachable = False

    async def open(self) -> None:
        """Load all keys and begin to follow changes.

        Raises:
            CatalogUnavailableError: the database cannot be reached.
        """
        await self._serial.run(lambda _: self._catch_up())
        self._serial.follow(self._catch_up, self._lost)

    async def close(self) -> None:
        """Stop following changes, and wait for the work under way."""
        await self._serial.close(lambda: asyncio.sleep(0))

    async def all(self) -> list[Key]:
        """All keys by name, from the database, so writes of other nodes are seen at once.

        Raises:
            CatalogUnavailableError: the database cannot be reached.
        """

        async def read(_until: float) -> list[Key]:
            async with self._sql.reading() as connection:
                rows = (await connection.execute(select(KEYS).order_by(KEYS.c.name))).mappings()
                return [_key(row) for row in rows]

        return await self._serial.run(read)

    async def create(
        self, name: str, scopes: Iterable[str], bound_to: Iterable[str], expires_ms: int | None, now_ms: int
    ) -> tuple[Key, str]:
        """Create a key; return its stored record, and the key itself, which is never stored.

        Raises:
            KeyExistsError: there is already a key of this name.
            CatalogUnavailableError: the database cannot be reached.
        """
        secret = _new_secret()
        key = Key(name, _digest(secret), tuple(scopes), tuple(bound_to), expires_ms, now_ms)

        async def write(connection: AsyncConnection) -> None:
            if await _found(connection, name) is not None:
                raise KeyExistsError(name)
            await connection.execute(insert(KEYS), _columns(key))

        await self._change(write)
        return key, secret

    async def rotate(self, name: str, grace_ms: int, now_ms: int) -> tuple[Key, str]:
        """Replace a key by a new one. The old key ends after the grace period; an even older one ends now.

        Raises:
            KeyNotFoundError: there is no key of this name.
            KeyExpiredError: it has expired.
            CatalogUnavailableError: the database cannot be reached.
        """
        secret = _new_secret()

        async def write(connection: AsyncConnection) -> Key:
            old = await _found(connection, name)
            if old is None:
                raise KeyNotFoundError(name)
            if old.expires_ms is not None and old.expires_ms <= now_ms:
                raise KeyExpiredError(name)
            new = replace(
                old,
                digest=_digest(secret),
                rotated_ms=now_ms,
                former_digest=old.digest if grace_ms else None,
                former_until_ms=now_ms + grace_ms if grace_ms else None,
            )
            await connection.execute(update(KEYS).where(KEYS.c.name == name).values(_columns(new)))
            return new

        return await self._change(write), secret

    async def revoke(self, name: str) -> None:
        """Revoke a key, and the key that it replaced.

        Raises:
            KeyNotFoundError: there is no key of this name.
            CatalogUnavailableError: the database cannot be reached.
        """

        async def write(connection: AsyncConnection) -> None:
            gone = await connection.execute(delete(KEYS).where(KEYS.c.name == name))
            if not gone.rowcount:
                raise KeyNotFoundError(name)

        await self._change(write)

    async def _change(self, write: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """Write in one transaction, one writer at a time, and read the change before returning."""

        async def work(until: float) -> T:
            async with self._sql.writing(until) as connection:
                await connection.execute(update(STATE).values(keys_version=STATE.c.keys_version + 1))
                written = await write(connection)
            with suppress(CatalogUnavailableError):  # the change is written; the follower will read it
                await self._catch_up()
            return written

        return await self._serial.run(work)

    def _lost(self, error: Exception) -> None:
        """Log that the catalog cannot be reached; the last keys stay in force."""
        if self._reachable:
            log.warning("keys unavailable: the last ones read stay in force", error=str(error))
        self._reachable = False

    async def _catch_up(self) -> None:
        """Read the version, and all keys if it is new; one statement, so both are from the same moment."""
        query = select(STATE.c.keys_version.label("now"), KEYS).select_from(
            STATE.outerjoin(KEYS, STATE.c.keys_version != self._version)
        )
        async with self._sql.reading() as connection:
            rows = (await connection.execute(query)).mappings().all()
        version = rows[0]["now"]
        if version != self._version:
            self.ring = ring_of(_key(row) for row in rows if row["name"] is not None)
            self._version = version
        self._reachable = True


def ring_of(keys: Iterable[Key]) -> Ring:
    """The grants of all keys, including those in their grace period."""
    ring: dict[bytes, Grant] = {}
    for key in keys:
        try:
            grant = grant_of(key)
        except ValueError as error:  # written by a newer version; ignoring its bounds would lift them
            log.warning("key ignored because it is not understood", key=key.name, error=str(error))
            continue
        ring[bytes.fromhex(key.digest)] = grant
        if key.former_digest is not None and key.former_until_ms is not None:
            ends = [at for at in (key.former_until_ms, key.expires_ms) if at is not None]
            ring[bytes.fromhex(key.former_digest)] = replace(grant, until_ms=min(ends))
    return MappingProxyType(ring)


def grant_of(key: Key) -> Grant:
    """The grant of a key.

    Raises:
        EntityError: it is bound to something that is not an entity.
    """
    scopes = frozenset(scope for scope in PERMISSIONS if scope in key.scopes)
    bound_to = tuple(Binding.parse(text) for text in key.bound_to)
    return Grant(key.name, expand_scopes(scopes), bound_to, key.expires_ms, created_ms=key.created_ms)


def _new_secret() -> str:
    return PREFIX + token_urlsafe(KEY_BYTES)


def _digest(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()


async def _found(connection: AsyncConnection, name: str) -> Key | None:
    row = (await connection.execute(select(KEYS).where(KEYS.c.name == name))).mappings().first()
    return None if row is None else _key(row)


def _key(row: RowMapping) -> Key:
    return Key(
        name=row["name"],
        digest=row["digest"],
        scopes=tuple(json.loads(row["scopes"])),
        bound_to=tuple(json.loads(row["bound_to"])),
        expires_ms=row["expires_ms"],
        created_ms=row["created_ms"],
        rotated_ms=row["rotated_ms"],
        former_digest=row["former_digest"],
        former_until_ms=row["former_until_ms"],
    )


def _columns(key: Key) -> dict[str, Any]:
    return {
        "name": key.name,
        "digest": key.digest,
        "scopes": json.dumps(key.scopes),
        "bound_to": json.dumps(key.bound_to),
        "expires_ms": key.expires_ms,
        "created_ms": key.created_ms,
        "rotated_ms": key.rotated_ms,
        "former_digest": key.former_digest,
        "former_until_ms": key.former_until_ms,
    }
