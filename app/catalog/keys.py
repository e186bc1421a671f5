"""API keys at rest and in memory: all SQL that they need, and the following of their changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from secrets import token_urlsafe
from types import MappingProxyType
from typing import Any, Final

import structlog
from sqlalchemy import RowMapping, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from app.catalog.port import CatalogAway
from app.catalog.sql import Sql
from app.catalog.tables import KEYS, STATE
from app.catalog.turns import Turns
from app.domain.binding import Binding
from app.domain.grant import PERMISSIONS, Grant, widened

PREFIX: Final = "qg_"
"""How every key begins, so that people and scanners of repositories know one when they see it."""
KEY_BYTES: Final = 32

log = structlog.get_logger("quotagate.keys")


class NameTaken(Exception):
    """There is a key of this name."""


class NoSuchKey(Exception):
    """There is no key of this name."""


class KeyExpired(Exception):
    """The key has expired: a new one in its place would be expired too."""


@dataclass(frozen=True, slots=True)
class Key:
    """What is kept of one API key; times are instants of the nodes' clocks.

    A key is 256 random bits, so a plain SHA-256 of it is as hard to reverse as the key is to guess: 2^255
    tries on average. A slow hash makes each try dearer, which helps passwords, of which there are few; here
    it would only make each decision dearer.

    Attributes:
        digest: SHA-256 of the key, in hex.
        scopes, bound_to: as the wire spells them.
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
"""What each key that may be sent grants, by its SHA-256."""


class Keys:
    """The keys of one deployment: from memory for those who judge requests, in the database for the rest.

    A number of their own in the catalog's one row says that they changed; each node polls it, as it polls the
    version of the quotas (``docs/decisions``, the catalog is polled). Who sees another number reads all keys:
    they are few.
    """

    def __init__(self, database: Sql) -> None:
        self.ring: Ring = MappingProxyType({})
        self._sql = database
        self._version = -1
        self._turns = Turns()
        self._follower: asyncio.Task[None] | None = None
        self._reachable = False

    async def open(self) -> None:
        """Load every key and begin to follow.

        Raises:
            CatalogAway: the database cannot be reached.
        """
        await self._turns.take(lambda _: self._catch_up())
        self._follower = asyncio.create_task(
            self._turns.follow(self._catch_up, self._lost), name="follow keys"
        )

    async def close(self) -> None:
        """Stop following, once what is under way has ended."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.wait({self._follower}, timeout=1)
        with suppress(CatalogAway):
            await self._turns.take(lambda _: asyncio.sleep(0))

    async def all(self) -> list[Key]:
        """Every key by name, from the database: what another node made is there at once.

        Raises:
            CatalogAway: the database cannot be reached.
        """

        async def read(_until: float) -> list[Key]:
            async with self._sql.reading() as connection:
                return await _rows(connection)

        return await self._turns.take(read)

    async def create(
        self, name: str, scopes: Iterable[str], bound_to: Iterable[str], expires_ms: int | None, now_ms: int
    ) -> tuple[Key, str]:
        """Make a key: what is kept of it, and the key itself, which is known here alone.

        Raises:
            NameTaken: there is one of this name.
            CatalogAway: the database cannot be reached.
        """
        secret = _made_up()
        key = Key(name, _digest(secret), tuple(scopes), tuple(bound_to), expires_ms, now_ms)

        async def write(connection: AsyncConnection) -> None:
            if await _found(connection, name) is not None:
                raise NameTaken(name)
            await connection.execute(insert(KEYS), _columns(key))

        await self._change(write)
        return key, secret

    async def rotate(self, name: str, grace_ms: int, now_ms: int) -> tuple[Key, str]:
        """Make a new key in the place of another one, which ends after the grace; one before that ends now.

        Raises:
            NoSuchKey: there is none of this name.
            KeyExpired: it has expired.
            CatalogAway: the database cannot be reached.
        """
        secret = _made_up()
        rotated: list[Key] = []

        async def write(connection: AsyncConnection) -> None:
            old = await _found(connection, name)
            if old is None:
                raise NoSuchKey(name)
            if old.expires_ms is not None and old.expires_ms <= now_ms:
                raise KeyExpired(name)
            new = replace(
                old,
                digest=_digest(secret),
                rotated_ms=now_ms,
                former_digest=old.digest if grace_ms else None,
                former_until_ms=now_ms + grace_ms if grace_ms else None,
            )
            await connection.execute(update(KEYS).where(KEYS.c.name == name).values(_columns(new)))
            rotated.append(new)

        await self._change(write)
        return rotated[0], secret

    async def revoke(self, name: str) -> None:
        """Take a key away, and the one that it replaced.

        Raises:
            NoSuchKey: there is none of this name.
            CatalogAway: the database cannot be reached.
        """

        async def write(connection: AsyncConnection) -> None:
            gone = await connection.execute(delete(KEYS).where(KEYS.c.name == name))
            if not gone.rowcount:
                raise NoSuchKey(name)

        await self._change(write)

    async def _change(self, write: Callable[[AsyncConnection], Awaitable[None]]) -> None:
        """Write in one transaction, one writer at a time; this node has the change before it answers."""

        async def work(until: float) -> None:
            async with self._sql.writing(until) as connection:
                await connection.execute(update(STATE).values(keys_version=STATE.c.keys_version + 1))
                await write(connection)
            with suppress(CatalogAway):  # the change is made: the follower brings it
                await self._catch_up()

        await self._turns.take(work)

    def _lost(self, error: Exception) -> None:
        """The keys known last stay in force."""
        if self._reachable:
            log.warning("keys out of reach: those known last stay in force", error=str(error))
        self._reachable = False

    async def _catch_up(self) -> None:
        """Read the number, and every key if it is another one; one statement, so they belong together."""
        query = select(STATE.c.keys_version.label("now"), KEYS).select_from(
            STATE.outerjoin(KEYS, STATE.c.keys_version != self._version)
        )
        async with self._sql.reading() as connection:
            found = (await connection.execute(query)).mappings().all()
        version = found[0]["now"]
        if version != self._version:
            self.ring = ring_of(_key(row) for row in found if row["name"] is not None)
            self._version = version
        self._reachable = True


def ring_of(keys: Iterable[Key]) -> Ring:
    """What every key grants, new ones and those within their grace."""
    ring: dict[bytes, Grant] = {}
    for key in keys:
        try:
            grant = grant_of(key)
        except ValueError as error:  # from a newer program than this one: bounds not understood are none
            log.warning("key left out, as it is not understood", key=key.name, error=str(error))
            continue
        ring[bytes.fromhex(key.digest)] = grant
        if key.former_digest is not None and key.former_until_ms is not None:
            ends = [at for at in (key.former_until_ms, key.expires_ms) if at is not None]
            ring[bytes.fromhex(key.former_digest)] = replace(grant, until_ms=min(ends))
    return MappingProxyType(ring)


def grant_of(key: Key) -> Grant:
    """What a key grants.

    Raises:
        EntityError: it is bound to something that is no entity.
    """
    scopes = frozenset(scope for scope in PERMISSIONS if scope in key.scopes)
    bound_to = tuple(Binding.parse(text) for text in key.bound_to)
    return Grant(key.name, widened(scopes), bound_to, key.expires_ms)


def _made_up() -> str:
    return PREFIX + token_urlsafe(KEY_BYTES)


def _digest(secret: str) -> str:
    return sha256(secret.encode()).hexdigest()


async def _rows(connection: AsyncConnection) -> list[Key]:
    return [_key(row) for row in (await connection.execute(select(KEYS).order_by(KEYS.c.name))).mappings()]


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
