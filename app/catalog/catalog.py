"""The catalog of one node: it keeps the snapshot up to date and writes changes."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import structlog

from app.catalog import schema
from app.catalog.deployment import agree_on_debt, agree_on_secret
from app.catalog.errors import PreconditionError, QuotasNotFoundError
from app.catalog.port import EVERYTHING, Changes, QuotaRow, QuotaSource
from app.catalog.serial import SerialExecutor, within
from app.catalog.snapshot import ChangedSnapshot, Snapshot
from app.catalog.sql import (
    Origin,
    PastChange,
    Rows,
    Sql,
    WriteResult,
    definitions_of,
    in_parts,
)
from app.domain.entity import Entity
from app.domain.ladder import covering_defaults
from app.domain.matching import Filter
from app.domain.quota import KEYS, Defaults, Quota
from app.domain.quota_value import Definition, alter, check_all, resolve

Edit = Callable[[Mapping[str, Definition]], Mapping[str, Definition | None]]
"""A function from an entity's definitions to the changed ones; None removes one."""
Edits = Mapping[Entity, Mapping[str, Definition | None]]
"""New definitions by entity and key; None removes one."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Conditions:
    """The versions of an entity at which a write may go ahead (``If-Match``) or may not (``If-None-Match``).

    ``"*"`` matches any version; None means no condition.
    """

    match: frozenset[int] | Literal["*"] | None = None
    none_match: frozenset[int] | Literal["*"] | None = None

    def are_met(self, version: int | None) -> bool:
        """Whether the conditions are met for an entity at a version; None means an absent entity.

        >>> Conditions(match=frozenset({5})).are_met(6), Conditions(none_match="*").are_met(None)
        (False, True)
        """
        matches = self.match is None or _includes(self.match, version)
        return matches and not _includes(self.none_match, version)


def _includes(versions: frozenset[int] | Literal["*"] | None, version: int | None) -> bool:
    return version is not None and versions is not None and (versions == "*" or version in versions)


ALWAYS: Final = Conditions()


@dataclass(frozen=True, slots=True)
class QuotaSet:
    """The quotas of one entity: definitions as written, and the quotas that they resolve to."""

    entity: Entity
    version: int
    definitions: Mapping[str, Definition]
    quotas: Mapping[str, Quota]


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list, at a version of the catalog; ``last`` is its last entity, None if no more follow."""

    version: int
    sets: Sequence[QuotaSet]
    last: Entity | None


@dataclass(frozen=True, slots=True)
class EntityChange:
    """An entity before and after a write; None is an absent one."""

    before: QuotaSet | None
    after: QuotaSet | None


@dataclass(frozen=True, slots=True)
class QuotaChange:
    """One quota before and after a change; ``emptied`` says whether its buckets were reset."""

    entity: Entity
    quota: str
    before: Definition | None
    after: Definition | None
    emptied: bool


@dataclass(frozen=True, slots=True)
class ChangeResult:
    """The result of changing many quotas, and the catalog's version after it."""

    version: int
    changes: Sequence[QuotaChange]


ChangeListener = Callable[
    [str, Mapping[str, Definition] | None, Mapping[str, Definition] | None, str, int], None
]
"""Called for each entity that this node changed, with its name, quotas before and after, author, version."""


class Catalog:
    """Serves quotas for decisions from memory, and their definitions for administration from the database.

    The version is polled instead of announced, because a poll cannot be lost; see docs/decisions.
    """

    def __init__(
        self,
        database_url: str,
        defaults: Defaults,
        hash_secret: bytes | None = None,
        *,
        changed: ChangeListener = lambda *_: None,
    ) -> None:
        self.defaults = defaults
        self._changed = changed
        self.snapshot = Snapshot()
        self.reachable = False
        self.hash_secret = hash_secret or b""
        self._given = hash_secret
        self.database = Sql(database_url)
        """API keys and the history use it too."""
        self._source: QuotaSource = self.database
        self._serial = SerialExecutor()

    async def open(self) -> None:
        """Agree on the hash secret and the longest debt, load all quotas, and begin to follow changes.

        Raises:
            CatalogUnavailableError: the database cannot be reached.
            SchemaVersionError: the database is not migrated.
            SecretMismatchError: the secret differs from the deployment's.
            DebtMismatchError: the longest debt differs from the deployment's.
        """
        try:
            schema.check(await within(self.database.revision()))
            self.hash_secret = await within(agree_on_secret(self.database, self._given))
            await within(agree_on_debt(self.database, self.defaults.max_debt_ms))
            with _uncollected():
                # Only the answer must come in time; applying many quotas may take longer.
                everything = await within(self._source.changed(EVERYTHING))
                await self._take_in(self.snapshot, everything)
        except BaseException:
            await self.database.close()
            raise
        self._serial.follow(self._catch_up, self._lost)

    async def close(self) -> None:
        """Stop following changes, and close the connections when the work under way has ended."""
        await self._serial.close(self.database.close)

    async def get(self, entity: Entity) -> QuotaSet | None:
        """The quotas of an entity, from the database, so writes of other nodes are seen at once.

        Raises:
            CatalogUnavailableError: the database cannot be reached.
        """
        return self._quota_set(entity, await within(self.database.of_entity(str(entity))))

    async def page(self, wanted: Filter, after: Entity | None, limit: int) -> Page:
        """The first entities after ``after`` that match a filter, in the order of their spelling.

        Raises:
            CatalogUnavailableError: the database cannot be reached.
        """
        version, entities = await within(
            self.database.page(wanted, None if after is None else str(after), limit + 1)
        )
        sets = (self._quota_set(Entity.parse(rows[0].entity), rows) for rows in entities)
        shown = [each for each in sets if each is not None]
        return Page(version, shown[:limit], shown[limit - 1].entity if len(shown) > limit else None)

    async def note(
        self,
        of: str,
        before: Mapping[str, object] | None,
        after: Mapping[str, object] | None,
        origin: Origin,
    ) -> None:
        """Add a change of something other than quotas to the history; versions and snapshots stay.

        Args:
            of: the thing that changed, in a spelling that no entity has.

        Raises:
            CatalogUnavailableError: the database cannot be reached.
        """
        await self._serial.run(lambda until: self.database.note(of, before, after, origin, until))

    async def history(self, of: Entity | str | None, before: int | None, limit: int) -> list[PastChange]:
        """The newest changes that are older than the change ``before``.

        Args:
            of: an entity, or something else in the history; None for everything.

        Raises:
            CatalogUnavailableError: the database cannot be reached.
        """
        return await within(self.database.history(None if of is None else str(of), before, limit))

    async def put(
        self, entity: Entity, values: Mapping[str, object], origin: Origin, conditions: Conditions = ALWAYS
    ) -> EntityChange:
        """Replace all quotas of an entity.

        Raises:
            QuotaValueError: some values are wrong; names all of them.
            PreconditionError: the conditions do not hold.
            CatalogUnavailableError: the database cannot be reached.
        """
        wanted = check_all(values, entity, self.defaults)
        return await self._write(entity, lambda now: dict.fromkeys(now) | wanted, origin, conditions)

    async def patch(
        self, entity: Entity, patch: Mapping[str, object], origin: Origin, conditions: Conditions = ALWAYS
    ) -> EntityChange:
        """Apply a merge patch to an entity's quotas; quotas that it does not name stay.

        Raises:
            QuotaValueError, PreconditionError, CatalogUnavailableError: as for put.
            QuotasNotFoundError: the entity has no quotas and the patch adds none.
        """
        alter({}, {key: value for key, value in patch.items() if value is None}, entity, self.defaults)
        only_removals = all(value is None for value in patch.values())

        def edit(now: Mapping[str, Definition]) -> Mapping[str, Definition | None]:
            altered = alter(now, patch, entity, self.defaults)
            return {key: new for key, new in altered.items() if new is not None or key in now}

        return await self._write(entity, edit, origin, conditions, must_exist=only_removals)

    async def delete(self, entity: Entity, origin: Origin, conditions: Conditions = ALWAYS) -> EntityChange:
        """Remove all quotas of an entity.

        Raises:
            QuotasNotFoundError: it has no quotas.
            PreconditionError, CatalogUnavailableError: as for put.
        """
        return await self._write(entity, dict.fromkeys, origin, conditions, must_exist=True)

    async def change(
        self,
        edits: Edits,
        origin: Origin,
        conditions: Conditions = ALWAYS,
        *,
        keep: bool = True,
    ) -> ChangeResult:
        """Change many quotas in one transaction, all of them or none; equal definitions are no change.

        Args:
            edits: complete and validated definitions.
            conditions: on the version of the whole catalog.
            keep: false is a dry run, which returns the result without writing.

        Raises:
            PreconditionError: the conditions do not hold.
            CatalogUnavailableError: the database cannot be reached.
        """
        names = {str(entity): entity async for entity in in_parts(edits)}

        async def decide(rows: Rows, version: int) -> list[QuotaRow]:
            if not conditions.are_met(version - 1):
                raise PreconditionError(f"the catalog is at version {version - 1}")
            written: list[QuotaRow] = []
            async for name, entity in in_parts(names.items()):
                now = {row.quota: row.definition for row in rows.get(name, ())}
                edited = {key: new for key, new in edits[entity].items() if new != now.get(key)}
                written += self._rows(entity, edited, rows, version, origin.at_ms)
            return written

        async def write(until: float) -> ChangeResult:
            defaults = {
                str(default) async for entity in in_parts(edits) for default in covering_defaults(entity)
            }
            writing = await self.database.write(
                [*names], sorted(defaults.difference(names)), decide, origin, until, keep
            )
            if keep:
                await self._apply(writing, origin)
            before = {
                (row.entity, row.quota): row.definition
                async for rows in in_parts(writing.before.values())
                for row in rows
            }
            return ChangeResult(
                writing.version,
                [
                    QuotaChange(
                        names[row.entity],
                        row.quota,
                        before.get((row.entity, row.quota)),
                        row.definition,
                        emptied=row.definition is not None and row.epoch == row.version,
                    )
                    async for row in in_parts(writing.written)
                ],
            )

        return await self._serial.run(write)

    async def _write(
        self, entity: Entity, edit: Edit, origin: Origin, conditions: Conditions, *, must_exist: bool = False
    ) -> EntityChange:
        name = str(entity)

        async def decide(rows: Rows, version: int) -> list[QuotaRow]:
            now = self._quota_set(entity, rows.get(name, ()))
            if now is None and must_exist:
                raise QuotasNotFoundError(f"no quotas are set on {entity}")
            edited = edit(now.definitions if now else {})
            # RFC 9110 13.2.1: conditions come last, when the write could otherwise go ahead.
            if not conditions.are_met(now.version if now else None):
                raise PreconditionError(
                    f"{entity} is at version {now.version}" if now else f"{entity} has no quotas"
                )
            return self._rows(entity, edited, rows, version, origin.at_ms)

        async def write(until: float) -> EntityChange:
            defaults = [str(default) for default in covering_defaults(entity)]
            writing = await self.database.write([name], defaults, decide, origin, until)
            await self._apply(writing, origin)
            before, after = writing.before[name], writing.after[name]
            return EntityChange(self._quota_set(entity, before), self._quota_set(entity, after))

        return await self._serial.run(write)

    async def _apply(self, writing: WriteResult, origin: Origin) -> None:
        """Apply a write to the snapshot, and report every entity that it changed."""
        # The follower sets the version later; it may first have to read the changes of other nodes.
        await self._take(writing.written, self.snapshot, self.snapshot.version)
        async for name in in_parts({row.entity: None for row in writing.written}):
            before, after = definitions_of(writing.before[name]), definitions_of(writing.after[name])
            self._changed(name, before, after, origin.who, writing.version)

    def _rows(
        self, entity: Entity, edited: Mapping[str, Definition | None], rows: Rows, version: int, at_ms: int
    ) -> list[QuotaRow]:
        """The rows that an edit of an entity writes.

        Args:
            rows: the rows of the entity and of the defaults that may charge the same buckets.
        """
        old = {row.quota: row for row in rows.get(str(entity), ())}
        shared: dict[str, QuotaRow] = {}
        for default in covering_defaults(entity):
            for row in rows.get(str(default), ()):
                if row.definition is not None:
                    shared.setdefault(row.quota, row)
        return [
            self._row(entity, key, new, old.get(key), shared.get(key), version, at_ms)
            for key, new in edited.items()
        ]

    def _row(
        self,
        entity: Entity,
        key: str,
        new: Definition | None,
        old: QuotaRow | None,
        shared: QuotaRow | None,
        version: int,
        at_ms: int,
    ) -> QuotaRow:
        """The row of a quota's new definition, or its tombstone, which keeps the buckets' epoch and identity.

        A new quota takes over the buckets of the default that applied before (``shared``) if both have the
        same identity. A change of identity resets its buckets (decision record 0008).
        """
        if new is None and old is not None:
            return QuotaRow(old.entity, key, None, old.epoch, old.identity, version, old.since_ms)
        assert new is not None
        since_ms = at_ms
        if old is not None:  # never the same time for two definitions, whatever the clocks of nodes say
            since_ms = old.since_ms if old.definition == new else max(at_ms, old.since_ms + 1)
        identity = json.dumps(resolve(key, new, entity, self.defaults, 0).identity)
        is_new = old is None or old.definition is None
        if is_new and shared is not None and shared.identity == identity:
            return QuotaRow(str(entity), key, new, shared.epoch, identity, version, since_ms)
        epoch = 0 if old is None else old.epoch if old.identity == identity else version
        return QuotaRow(str(entity), key, new, epoch, identity, version, since_ms)

    def _lost(self, error: Exception) -> None:
        """Log that the catalog cannot be reached; the last snapshot stays in force."""
        if self.reachable:
            log.warning("catalog unavailable", catalog=self.database.name, error=str(error))
        self.reachable = False

    async def _catch_up(self) -> None:
        base = self.snapshot
        await self._take_in(base, await self._source.changed(base.version))

    async def _take_in(self, base: Snapshot, loaded: Changes) -> None:
        if loaded.version < base.version:  # restored from a backup: later quotas must go
            base, loaded = Snapshot(), await self._source.changed(EVERYTHING)
        await self._take(loaded.rows, base, loaded.version)
        if not self.reachable:
            log.info("catalog available", catalog=self.database.name, version=loaded.version)
        self.reachable = True

    async def _take(self, rows: Sequence[QuotaRow], base: Snapshot, version: int) -> None:
        """Make the snapshot of a base and changed rows; with many rows, decisions can run in between."""
        changed = ChangedSnapshot(base)
        async for row in in_parts(rows):
            try:
                entity = Entity.parse(row.entity)
                quota = (
                    None
                    if row.definition is None
                    else resolve(row.quota, row.definition, entity, self.defaults, row.epoch, row.since_ms)
                )
                changed.take((row.quota, entity, quota))
            except (ValueError, LookupError, TypeError) as error:  # from a newer version of this program
                log.warning("quota not understood", entity=row.entity, quota=row.quota, error=repr(error))
        if rows or version != base.version:
            self.snapshot = changed.snapshot(version)

    def _quota_set(self, entity: Entity, rows: Sequence[QuotaRow]) -> QuotaSet | None:
        live = {row.quota: row for row in rows if row.definition is not None}
        definitions = {key: row.definition for key in KEYS if (row := live.get(key)) and row.definition}
        if not definitions:
            return None
        quotas = {
            key: resolve(key, definition, entity, self.defaults, live[key].epoch, live[key].since_ms)
            for key, definition in definitions.items()
        }
        return QuotaSet(
            entity, max(row.version for row in rows), MappingProxyType(definitions), MappingProxyType(quotas)
        )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the garbage collector, which would scan the loaded rows again and again (a third of the time)."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
