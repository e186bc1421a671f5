"""All SQL on quotas, the same for SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from sys import intern
from typing import Any, Final, TypeVar

from sqlalchemy import (
    URL,
    Connection,
    RowMapping,
    bindparam,
    column,
    delete,
    event,
    func,
    insert,
    inspect,
    make_url,
    select,
    table,
    update,
)
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from app.catalog import lists
from app.catalog.errors import CatalogUnavailableError
from app.catalog.port import Changes, QuotaRow
from app.catalog.tables import CHANGES, QUOTAS, ROW, STATE
from app.domain.matching import Filter
from app.domain.quota_value import Definition
from app.node.shortage import shortage_of

STATEMENT_TIMEOUT_MS: Final = 5_000
LOCK_TIMEOUT_MS: Final = 4_000
CONNECT_TIMEOUT_S: Final = 3
ANSWER_S: Final = 6.0
"""Longer than the timeouts above, for a database that keeps the connection open and does not answer."""
AWAY: Final = (SQLAlchemyError, OSError, TimeoutError)
"""The exceptions of a database that is unreachable, locked, full or broken."""

ROWS_AT_ONCE: Final = 200
"""How many rows to handle before letting decisions run."""

PARTS: Final = {"yield_per": 500}
"""How many rows of a large result to read at once."""

T = TypeVar("T")
Rows = Mapping[str, Sequence[QuotaRow]]
"""Rows by entity."""

_REVISIONS: Final = table("alembic_version", column("version_num"))
_FORGET: Final = delete(QUOTAS).where(
    QUOTAS.c.entity_hash == bindparam("of_entity"), QUOTAS.c.quota == bindparam("of_quota")
)


@dataclass(frozen=True, slots=True)
class Origin:
    """The author, time and reason of a change."""

    who: str
    at_ms: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The result of a transaction: the written rows, and all rows of its entities before and after.

    Attributes:
        version: the catalog's version after the transaction.
    """

    version: int
    written: Sequence[QuotaRow]
    before: Rows
    after: Rows


@dataclass(frozen=True, slots=True)
class PastChange:
    """One change in the history; ``before`` is None for a creation, ``after`` for a removal."""

    id: int
    at_ms: int
    who: str
    entity: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None
    reason: str | None


def driver_url(database_url: str, *, asynchronous: bool) -> URL:
    """A database URL with the driver to use.

    >>> str(driver_url("sqlite:///catalog.db", asynchronous=True))
    'sqlite+aiosqlite:///catalog.db'
    >>> str(driver_url("postgresql://db/quotagate", asynchronous=True))
    'postgresql+psycopg://db/quotagate'
    """
    url = make_url(database_url)
    drivers = {"sqlite": "sqlite+aiosqlite" if asynchronous else "sqlite", "postgresql": "postgresql+psycopg"}
    if url.get_backend_name() not in drivers:
        raise ValueError(f"the catalog lives in sqlite:// or postgresql://, not in {url.drivername}://")
    return url.set(drivername=drivers[url.get_backend_name()])


def shown(url: URL) -> str:
    """A database URL without its secrets, for messages; of its options, only the address.

    >>> shown(make_url("postgresql://qg:pw@/quotagate?host=db&sslpassword=pw"))
    'postgresql://qg:***@/quotagate?host=db'
    """
    address = {name: value for name, value in url.query.items() if name in {"host", "hostaddr", "port"}}
    return url.set(query=address).render_as_string(hide_password=True)


class Sql:
    """The catalog's database: a connection pool and its statements."""

    def __init__(self, database_url: str) -> None:
        url = driver_url(database_url, asynchronous=True)
        self.name = shown(url)
        self.engine = _sqlite(url) if url.get_backend_name() == "sqlite" else _postgresql(url)

    async def close(self) -> None:
        """Close all connections."""
        await self.engine.dispose()

    async def revision(self) -> str | None:
        """The schema's revision, or None if it was never migrated; does not create a SQLite file."""
        if not self._is_there():
            return None
        async with self.reading() as connection:
            if not await connection.run_sync(lambda sync: inspect(sync).has_table(_REVISIONS.name)):
                return None
            revision: str | None = await connection.scalar(select(_REVISIONS.c.version_num))
            return revision

    async def agree(self, **offered: object) -> Sequence[Any]:
        """The catalog's values of these columns of its state; if the first is NULL, they take the offer.

        One statement decides, so nodes that start at the same moment agree.
        """
        columns = [STATE.c[name] for name in offered]
        async with self.writing(deadline()) as connection:
            await connection.execute(update(STATE).where(columns[0].is_(None)).values(offered))
            return (await connection.execute(select(*columns))).one()

    async def changed(self, since: int) -> Changes:
        """The version and all rows written after ``since``; one statement, so both are from one moment.

        The rows are read in parts: a database driver's result of 100,000 rows is three times as large as the
        quotas, and a process keeps much of the memory that it once had.
        """
        query = select(STATE.c.version.label("now"), *ROW).select_from(
            STATE.outerjoin(QUOTAS, QUOTAS.c.version > since)
        )
        version, changed = 0, []
        async with self.reading() as connection, connection.stream(query, execution_options=PARTS) as rows:
            async for part in rows.mappings().partitions():
                version = part[0]["now"]
                changed += [_row(row) for row in part if row["quota"] is not None]
        return Changes(version, changed)

    async def of_entity(self, entity: str) -> list[QuotaRow]:
        """All rows of one entity, including tombstones."""
        async with self.reading() as connection:
            return (await _rows_of(connection, [entity])).get(entity, [])

    async def page(self, wanted: Filter, after: str | None, limit: int) -> tuple[int, list[list[QuotaRow]]]:
        """The catalog's version, and the rows of the next entities after ``after``, by one statement."""
        query = lists.page(wanted, None if after is None else (after, _hash(after)), limit)
        async with self.reading() as connection:
            found = (await connection.execute(query)).mappings().all()
        rows = [_row(row) for row in found if row["quota"] is not None]
        return found[0]["now"], [list(of_one) for _, of_one in groupby(rows, key=lambda row: row.entity)]

    async def note(
        self,
        of: str,
        before: Mapping[str, object] | None,
        after: Mapping[str, object] | None,
        origin: Origin,
        until: float,
    ) -> None:
        """Add a change of something that is not an entity to the history."""
        async with self.writing(until) as connection:
            await connection.execute(update(STATE).values(version=STATE.c.version))  # waits for other writers
            await connection.execute(insert(CHANGES), [_change(of, before, after, origin)])

    async def history(self, entity: str | None, before: int | None, limit: int) -> list[PastChange]:
        """The newest changes, of one entity or of all, that are older than the change ``before``."""
        query = lists.history(None if entity is None else _hash(entity), before, limit)
        async with self.reading() as connection:
            return [_past(row) for row in (await connection.execute(query)).mappings()]

    async def write(
        self,
        entities: Sequence[str],
        also_read: Sequence[str],
        decide: Callable[[Rows, int], Awaitable[Sequence[QuotaRow]]],
        origin: Origin,
        until: float,
        keep: bool = True,
    ) -> WriteResult:
        """Change entities in one transaction.

        Args:
            also_read: other entities, whose rows ``decide`` needs.
            decide: takes the rows of all these entities, and the version that this change makes; returns the
                rows to write. If it returns none, or raises, nothing is written.
            until: the deadline by the event loop's clock: the change is committed by then, or never.
            keep: false rolls everything back, for a dry run.
        """
        async with self.writing(until) as connection:
            version: int = (
                await connection.execute(
                    update(STATE).values(version=STATE.c.version + 1).returning(STATE.c.version)
                )
            ).scalar_one()
            rows = await _rows_of(connection, [*entities, *also_read])
            written = await decide(rows, version)
            before = {entity: rows.get(entity, []) for entity in entities}
            after = await _rewritten(before, written)
            if written:
                there = {(row.entity, row.quota) async for rows in in_parts(before.values()) for row in rows}
                old = [row async for row in in_parts(written) if (row.entity, row.quota) in there]
                for some in _parts(old):
                    gone = [{"of_entity": _hash(row.entity), "of_quota": row.quota} for row in some]
                    await connection.execute(_FORGET, gone)
                for some in _parts(written):
                    await connection.execute(insert(QUOTAS), [_columns(row) for row in some])
                for changed in _parts(list(dict.fromkeys(row.entity for row in written))):
                    kept = [
                        _change(each, definitions_of(before[each]), definitions_of(after[each]), origin)
                        for each in changed
                    ]
                    await connection.execute(insert(CHANGES), kept)
            if not (written and keep):
                await connection.rollback()
                version -= 1
        return WriteResult(version, written, before, after)

    def _is_there(self) -> bool:
        url = self.engine.url
        return url.get_backend_name() != "sqlite" or Path(url.database or "").exists()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A connection for reading.

        Raises:
            CatalogUnavailableError: the database cannot be reached.
        """
        with self._unavailable():
            async with self.engine.connect() as connection:
                yield connection

    @asynccontextmanager
    async def writing(self, until: float) -> AsyncIterator[AsyncConnection]:
        """A transaction that commits before ``until``, or never, because by then the caller has got an error.

        Raises:
            CatalogUnavailableError: the database cannot be reached, or is too slow.
        """
        with self._unavailable():
            async with self.engine.begin() as connection:
                yield connection
                if asyncio.get_running_loop().time() > until:
                    raise TimeoutError(f"no answer within {ANSWER_S:g} s")

    @contextmanager
    def _unavailable(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not isinstance(error, AWAY) and shortage_of(error) is None:
                raise
            raise CatalogUnavailableError(
                f"the catalog at {self.name} is out of reach: {first_line(error)}"
            ) from error


def _sqlite(url: URL) -> AsyncEngine:
    """An engine whose transactions wait for other writers (IMMEDIATE) at their first write."""
    return create_async_engine(
        url, connect_args={"timeout": LOCK_TIMEOUT_MS / 1000, "isolation_level": "IMMEDIATE"}
    )


def _postgresql(url: URL) -> AsyncEngine:
    """An engine on which nothing waits for ever, and which checks connections before it uses them."""
    engine = create_async_engine(url, connect_args=connection_options(url), pool_pre_ping=True)
    event.listen(engine.sync_engine, "begin", limit_waits)
    return engine


def connection_options(url: URL) -> dict[str, Any]:
    """The options of connections to PostgreSQL that the URL does not set; none is a startup parameter.

    Connections to a host that vanished are closed after ``ANSWER_S``. The kernel would otherwise retry for a
    quarter of an hour, during which the waiting work would hold up the work behind it. Statements are not
    prepared: behind PgBouncer, the next transaction may run in another session of the server.
    """
    options = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "tcp_user_timeout": int(ANSWER_S * 1000),
        "keepalives_idle": CONNECT_TIMEOUT_S,
        "keepalives_interval": 1,
    }
    return {
        **{name: value for name, value in options.items() if name not in url.query},
        "prepare_threshold": None,
    }


def limit_waits(connection: Connection) -> None:
    """Let no later statement of this transaction of PostgreSQL run or wait for long.

    The limits end with the transaction. PgBouncer refuses them as startup parameters, and gives a session
    whose settings were changed to other clients.
    """
    timeouts = {"statement_timeout": STATEMENT_TIMEOUT_MS, "lock_timeout": LOCK_TIMEOUT_MS}
    connection.execute(select(*(func.set_config(name, str(ms), True) for name, ms in timeouts.items())))


def first_line(error: Exception) -> str:
    """The first line of an error's text: later ones hold the statement and addresses of documentation."""
    return (str(error) or type(error).__name__).splitlines()[0]


def deadline() -> float:
    """The deadline of an answer that starts now, by the event loop's clock."""
    return asyncio.get_running_loop().time() + ANSWER_S


async def _rows_of(connection: AsyncConnection, entities: Sequence[str]) -> dict[str, list[QuotaRow]]:
    by_entity: dict[str, list[QuotaRow]] = {}
    for some in _parts(entities):
        query = select(*ROW).where(QUOTAS.c.entity_hash.in_([_hash(entity) for entity in some]))
        for row in (await connection.execute(query)).mappings():
            by_entity.setdefault(row["entity"], []).append(_row(row))
    return by_entity


async def in_parts(every: Iterable[T]) -> AsyncIterator[T]:
    """Yield all items, and let decisions run after each part of them."""
    for place, each in enumerate(every, 1):
        yield each
        if place % ROWS_AT_ONCE == 0:
            await asyncio.sleep(0)


async def _rewritten(before: Rows, written: Sequence[QuotaRow]) -> Rows:
    """The rows of entities after some of them are written."""
    after = {entity: {row.quota: row for row in rows} async for entity, rows in in_parts(before.items())}
    async for row in in_parts(written):
        after[row.entity][row.quota] = row
    return {entity: [*rows.values()] async for entity, rows in in_parts(after.items())}


def _parts(every: Sequence[T]) -> Iterator[Sequence[T]]:
    """Split a sequence into parts for one statement each, so that decisions can run in between."""
    return (every[start : start + ROWS_AT_ONCE] for start in range(0, len(every), ROWS_AT_ONCE))


def _hash(entity: str) -> str:
    return sha256(entity.encode()).hexdigest()


def _row(row: RowMapping) -> QuotaRow:
    definition = None if row["definition"] is None else _read(row["definition"])
    quota, identity = intern(row["quota"]), intern(row["identity"])
    return QuotaRow(row["entity"], quota, definition, row["epoch"], identity, row["version"], row["since_ms"])


@lru_cache(4096)
def _read(definition: str) -> Definition:
    """Decode a definition. Most definitions are equal, so equal ones are shared; they are never changed."""
    decoded: Definition = json.loads(definition)
    return decoded


def _columns(row: QuotaRow) -> dict[str, Any]:
    return {
        "entity_hash": _hash(row.entity),
        "quota": row.quota,
        "entity": row.entity,
        "definition": None if row.definition is None else json.dumps(row.definition),
        "epoch": row.epoch,
        "identity": row.identity,
        "version": row.version,
        "since_ms": row.since_ms,
    }


def _change(
    entity: str, before: Mapping[str, object] | None, after: Mapping[str, object] | None, origin: Origin
) -> dict[str, Any]:
    return {
        "at_ms": origin.at_ms,
        "who": origin.who,
        "entity_hash": _hash(entity),
        "entity": entity,
        "before": None if before is None else json.dumps(before),
        "after": None if after is None else json.dumps(after),
        "reason": origin.reason,
    }


def definitions_of(rows: Sequence[QuotaRow]) -> dict[str, Definition] | None:
    """The definitions in an entity's rows, by key; None if it has none."""
    return {row.quota: row.definition for row in rows if row.definition is not None} or None


def _past(row: RowMapping) -> PastChange:
    before, after = (None if row[when] is None else json.loads(row[when]) for when in ("before", "after"))
    return PastChange(row["id"], row["at_ms"], row["who"], row["entity"], before, after, row["reason"])
