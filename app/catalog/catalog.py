"""The catalog of one node: its snapshot, kept up to date, and the writing of changes."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from secrets import token_bytes
from types import MappingProxyType
from typing import Final, Literal

import structlog

from app.catalog import schema
from app.catalog.deployment import SecretRefused, check_debt
from app.catalog.port import EVERYTHING, CatalogAway, Changes, QuotaSource, Row
from app.catalog.snapshot import Change, Snapshot
from app.catalog.sql import ROWS_AT_ONCE, Origin, PastChange, Rows, Secret, Sql, Writing
from app.catalog.turns import Turns, deadline, within
from app.domain.digest import fingerprint
from app.domain.entity import Entity
from app.domain.ladder import broader
from app.domain.matching import Filter
from app.domain.quota import KEYS, Defaults, Quota
from app.domain.quota_value import Definition, alter, check_all, resolve

Edit = Callable[[Mapping[str, Definition]], Mapping[str, Definition | None]]
"""From what an entity has to the keys that change; None takes one away."""
Edits = Mapping[Entity, Mapping[str, Definition | None]]
"""What quotas are to be, by entity and key; None takes one away."""

log = structlog.get_logger()


class Stale(Exception):
    """A condition of a write does not hold: the entity is at another version."""


class Absent(Exception):
    """Nothing is set on the entity."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """At which versions of an entity a write may go ahead; ``"*"`` is any version, None no condition."""

    match: frozenset[int] | Literal["*"] | None = None
    none_match: frozenset[int] | Literal["*"] | None = None

    def hold(self, version: int | None) -> bool:
        """Whether they hold for an entity at a version; None is an absent one.

        >>> Conditions(match=frozenset({5})).hold(6), Conditions(none_match="*").hold(None)
        (False, True)
        """
        matches = version is not None and (self.match == "*" or self.match is None or version in self.match)
        clashes = version is not None and (
            self.none_match == "*" or (self.none_match is not None and version in self.none_match)
        )
        return (self.match is None or matches) and not clashes


ALWAYS: Final = Conditions()


@dataclass(frozen=True, slots=True)
class QuotaSet:
    """What is set on one entity: definitions as their owner wrote them, and the quotas they mean."""

    entity: Entity
    version: int
    definitions: Mapping[str, Definition]
    quotas: Mapping[str, Quota]


@dataclass(frozen=True, slots=True)
class Page:
    """Some of a list, as of a version of the whole catalog; ``last`` is its last entity if there are more."""

    version: int
    sets: Sequence[QuotaSet]
    last: Entity | None


@dataclass(frozen=True, slots=True)
class Written:
    """An entity before and after a write; None is an absent one."""

    before: QuotaSet | None
    after: QuotaSet | None


@dataclass(frozen=True, slots=True)
class QuotaChange:
    """What became of one quota; ``emptied``: it counts in empty buckets from now on."""

    entity: Entity
    quota: str
    before: Definition | None
    after: Definition | None
    emptied: bool


@dataclass(frozen=True, slots=True)
class Changed:
    """What a change of many quotas did, and the catalog's version after it."""

    version: int
    changes: Sequence[QuotaChange]


Told = Callable[[str, Mapping[str, Definition] | None, Mapping[str, Definition] | None, str, int], None]
"""Told of an entity whose quotas this node changed: what they were, what they are, by whom, the version."""


class Catalog:
    """Quotas for decisions, from memory; their definitions for administration, from the database.

    The version is polled rather than announced: a poll cannot be lost. See docs/decisions.
    """

    def __init__(
        self,
        database_url: str,
        defaults: Defaults,
        hash_secret: bytes | None = None,
        *,
        changed: Told = lambda *_: None,
    ) -> None:
        self.defaults = defaults
        self._changed = changed
        self.snapshot = Snapshot()
        self.reachable = False
        self.hash_secret = hash_secret or b""
        self._given = hash_secret
        self._sql = Sql(database_url)
        self._source: QuotaSource = self._sql
        self._turns = Turns()
        self._follower: asyncio.Task[None] | None = None

    @property
    def database(self) -> Sql:
        """Where it is kept, for what else is kept there."""
        return self._sql

    async def open(self) -> None:
        """Agree on the hash secret and the longest debt, load every quota and begin to follow.

        Raises:
            CatalogAway: the database cannot be reached.
            SchemaRefused: it is not migrated.
            SecretRefused: the secret is not the one that its filters were made with.
            DebtRefused: the other nodes have another longest debt.
        """
        try:
            schema.check(await within(self._sql.revision(), deadline()))
            self.hash_secret = await within(self._agree(), deadline())
            mine_ms = self.defaults.max_debt_ms
            check_debt(mine_ms, await within(self._sql.max_debt_ms(mine_ms), deadline()))
            with _uncollected():
                # Only the answer has to come in time; to take in many quotas may last longer.
                everything = await within(self._source.changed(EVERYTHING), deadline())
                await self._take_in(self.snapshot, everything)
        except BaseException:
            await self._sql.close()
            raise
        self._follower = asyncio.create_task(self._turns.follow(self._catch_up, self._lost))

    async def close(self) -> None:
        """Stop following, and give back the connections once what is under way has ended."""
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.wait({self._follower}, timeout=1)
        with suppress(CatalogAway):
            await self._turns.take(lambda _: self._sql.close())

    async def get(self, entity: Entity) -> QuotaSet | None:
        """What is set on an entity, from the database: a write on any node is seen at once.

        Raises:
            CatalogAway: the database cannot be reached.
        """
        return self._quota_set(entity, await within(self._sql.of_entity(str(entity)), deadline()))

    async def page(self, wanted: Filter, after: Entity | None, limit: int) -> Page:
        """The first entities that a filter covers, past one of them, in the order of their spelling.

        Raises:
            CatalogAway: the database cannot be reached.
        """
        past = None if after is None else str(after)
        version, found = await within(self._sql.page(wanted, past, limit + 1), deadline())
        sets = [self._quota_set(Entity.parse(rows[0].entity), rows) for rows in found]
        shown = [each for each in sets if each is not None]
        return Page(version, shown[:limit], shown[limit - 1].entity if len(shown) > limit else None)

    async def note(
        self,
        of: str,
        before: Mapping[str, object] | None,
        after: Mapping[str, object] | None,
        origin: Origin,
    ) -> None:
        """Have the history tell of a change that is none of quotas; no version and no snapshot changes.

        Args:
            of: what changed, spelled as no entity is.

        Raises:
            CatalogAway: the database cannot be reached.
        """
        await self._turns.take(lambda until: self._sql.note(of, before, after, origin, until))

    async def history(self, of: Entity | str | None, before: int | None, limit: int) -> list[PastChange]:
        """The newest changes, of an entity, of what else the history tells of, or of all, older than one.

        Raises:
            CatalogAway: the database cannot be reached.
        """
        name = None if of is None else str(of)
        return await within(self._sql.history(name, before, limit), deadline())

    async def put(
        self, entity: Entity, values: Mapping[str, object], origin: Origin, conditions: Conditions = ALWAYS
    ) -> Written:
        """Replace an entity's quotas by others.

        Raises:
            ValueErrors: something is wrong with the values; all of it is named.
            Stale: the conditions do not hold.
            CatalogAway: the database cannot be reached.
        """
        wanted = check_all(values, entity, self.defaults)
        return await self._write(entity, lambda now: dict.fromkeys(now) | wanted, origin, conditions)

    async def patch(
        self, entity: Entity, patch: Mapping[str, object], origin: Origin, conditions: Conditions = ALWAYS
    ) -> Written:
        """Apply a merge patch to an entity's quotas; those that it does not name stay.

        Raises:
            ValueErrors, Stale, CatalogAway: as for put.
            Absent: the entity has no quotas and the patch brings none.
        """
        alter({}, {key: value for key, value in patch.items() if value is None}, entity, self.defaults)
        only_removals = all(value is None for value in patch.values())

        def edit(now: Mapping[str, Definition]) -> Mapping[str, Definition | None]:
            altered = alter(now, patch, entity, self.defaults)
            return {key: new for key, new in altered.items() if new is not None or key in now}

        return await self._write(entity, edit, origin, conditions, must_exist=only_removals)

    async def delete(self, entity: Entity, origin: Origin, conditions: Conditions = ALWAYS) -> Written:
        """Take away all of an entity's quotas.

        Raises:
            Absent: it has none.
            Stale, CatalogAway: as for put.
        """
        return await self._write(entity, dict.fromkeys, origin, conditions, must_exist=True)

    async def change(
        self,
        edits: Edits,
        origin: Origin,
        conditions: Conditions = ALWAYS,
        *,
        keep: bool = True,
    ) -> Changed:
        """Change many quotas in one transaction, all of them or none; what is so already is no change.

        Args:
            edits: whole, checked definitions.
            conditions: on the version of the whole catalog.
            keep: false writes nothing, and answers as if.

        Raises:
            Stale: the conditions do not hold.
            CatalogAway: the database cannot be reached.
        """
        names = {str(entity): entity for entity in edits}

        async def decide(rows: Rows, version: int) -> list[Row]:
            if not conditions.hold(version - 1):
                raise Stale(f"the catalog is at version {version - 1}")
            written: list[Row] = []
            for place, (name, entity) in enumerate(names.items()):
                if place % ROWS_AT_ONCE == 0:
                    await asyncio.sleep(0)
                now = {row.quota: row.definition for row in rows.get(name, ())}
                edited = {key: new for key, new in edits[entity].items() if new != now.get(key)}
                written += self._rows(entity, edited, rows, version)
            return written

        async def write(until: float) -> Changed:
            beside = dict.fromkeys(str(default) for entity in edits for default in broader(entity))
            others = [name for name in beside if name not in names]
            writing = await self._sql.write([*names], others, decide, origin, until, keep)
            if keep:
                changes = await self._changes_in_parts(writing.written)
                self.snapshot = self.snapshot.apply(self.snapshot.version, changes)
                self._tell(writing, origin)
            before = {
                (row.entity, row.quota): row.definition for rows in writing.before.values() for row in rows
            }
            return Changed(
                writing.version,
                [
                    QuotaChange(
                        names[row.entity],
                        row.quota,
                        before.get((row.entity, row.quota)),
                        row.definition,
                        emptied=row.definition is not None and row.epoch == row.version,
                    )
                    for row in writing.written
                ],
            )

        return await self._turns.take(write)

    async def _write(
        self, entity: Entity, edit: Edit, origin: Origin, conditions: Conditions, *, must_exist: bool = False
    ) -> Written:
        name = str(entity)

        async def decide(rows: Rows, version: int) -> list[Row]:
            now = self._quota_set(entity, rows.get(name, ()))
            if now is None and must_exist:
                raise Absent(f"no quotas are set on {entity}")
            edited = edit(now.definitions if now else {})
            # RFC 9110 13.2.1: a condition is looked at last, when the write could go ahead without it.
            if not conditions.hold(now.version if now else None):
                raise Stale(f"{entity} is at version {now.version}" if now else f"{entity} has no quotas")
            return self._rows(entity, edited, rows, version)

        async def write(until: float) -> Written:
            beside = [str(default) for default in broader(entity)]
            writing = await self._sql.write([name], beside, decide, origin, until)
            # The version waits for the follower, which may have other nodes' changes to read first.
            self.snapshot = self.snapshot.apply(self.snapshot.version, self._changes(writing.written))
            self._tell(writing, origin)
            before, after = writing.before[name], writing.after[name]
            return Written(self._quota_set(entity, before), self._quota_set(entity, after))

        return await self._turns.take(write)

    def _tell(self, writing: Writing, origin: Origin) -> None:
        """Tell of every entity that a write has changed."""
        for name in {row.entity: None for row in writing.written}:
            before, after = (
                {row.quota: row.definition for row in rows.get(name, ()) if row.definition is not None}
                for rows in (writing.before, writing.after)
            )
            self._changed(name, before or None, after or None, origin.who, writing.version)

    def _rows(
        self, entity: Entity, edited: Mapping[str, Definition | None], rows: Rows, version: int
    ) -> list[Row]:
        """The rows that an edit of an entity writes, by the rows of it and of the defaults above it."""
        old = {row.quota: row for row in rows.get(str(entity), ())}
        shared: dict[str, Row] = {}
        for default in broader(entity):
            for row in rows.get(str(default), ()):
                if row.definition is not None:
                    shared.setdefault(row.quota, row)
        return [
            self._row(entity, key, new, old.get(key), shared.get(key), version) for key, new in edited.items()
        ]

    def _row(
        self,
        entity: Entity,
        key: str,
        new: Definition | None,
        old: Row | None,
        shared: Row | None,
        version: int,
    ) -> Row:
        """The row of a quota's new definition; a tombstone remembers which buckets the quota had.

        A quota that comes into being finds the buckets of the default that applied until then (`shared`),
        if the two have the same identity; a change of identity empties its buckets (decision 0008).
        """
        if new is None and old is not None:
            return Row(old.entity, key, None, old.epoch, old.identity, version)
        assert new is not None
        identity = json.dumps(resolve(key, new, entity, self.defaults, 0).identity)
        is_new = old is None or old.definition is None
        if is_new and shared is not None and shared.identity == identity:
            return Row(str(entity), key, new, shared.epoch, identity, version)
        epoch = 0 if old is None else old.epoch if old.identity == identity else version
        return Row(str(entity), key, new, epoch, identity, version)

    def _lost(self, error: Exception) -> None:
        """The last snapshot stays in force."""
        if self.reachable:
            log.warning("catalog out of reach", catalog=self._sql.name, error=str(error))
        self.reachable = False

    async def _catch_up(self) -> None:
        base = self.snapshot
        await self._take_in(base, await self._source.changed(base.version))

    async def _take_in(self, base: Snapshot, found: Changes) -> None:
        if found.version < base.version:  # restored from a backup: what came later must go
            base, found = Snapshot(), await self._source.changed(EVERYTHING)
        changes = await self._changes_in_parts(found.rows)
        if changes or found.version != base.version:
            self.snapshot = base.apply(found.version, changes)
        if not self.reachable:
            log.info("catalog followed", catalog=self._sql.name, version=found.version)
        self.reachable = True

    async def _changes_in_parts(self, rows: Sequence[Row]) -> list[Change]:
        changes: list[Change] = []
        for start in range(0, len(rows), ROWS_AT_ONCE):
            changes += self._changes(rows[start : start + ROWS_AT_ONCE])
            await asyncio.sleep(0)
        return changes

    def _changes(self, rows: Iterable[Row]) -> list[Change]:
        changes: list[Change] = []
        for row in rows:
            try:
                entity = Entity.parse(row.entity)
                changes.append((row.quota, entity, self._resolve(row, entity)))
            except (ValueError, LookupError, TypeError) as error:  # from a newer program than this one
                log.warning("quota not understood", entity=row.entity, quota=row.quota, error=repr(error))
        return changes

    def _resolve(self, row: Row, entity: Entity) -> Quota | None:
        if row.definition is None:
            return None
        return resolve(row.quota, row.definition, entity, self.defaults, row.epoch)

    def _quota_set(self, entity: Entity, rows: Sequence[Row]) -> QuotaSet | None:
        live = {row.quota: row for row in rows}
        definitions = {
            key: row.definition
            for key in KEYS
            if (row := live.get(key)) is not None and row.definition is not None
        }
        if not definitions:
            return None
        quotas = {
            key: resolve(key, said, entity, self.defaults, live[key].epoch)
            for key, said in definitions.items()
        }
        return QuotaSet(
            entity, max(row.version for row in rows), MappingProxyType(definitions), MappingProxyType(quotas)
        )

    async def _agree(self) -> bytes:
        """The deployment's secret: the setting's, if it is the one the catalog knows, or the one it keeps."""
        made = token_bytes(32)
        given = None if self._given is None else Secret(None, fingerprint(self._given))
        agreed = await self._sql.secret(given, Secret(made.hex(), fingerprint(made)))
        if self._given is not None and agreed.fingerprint != fingerprint(self._given):
            raise SecretRefused(
                "QUOTAGATE_HASH_SECRET is not the secret that this catalog was first started with: "
                "every producer id seen so far would be new again. Give the old secret, or a new catalog."
            )
        if self._given is not None:
            return self._given
        if agreed.kept is None:
            raise SecretRefused(
                "this catalog was first started with a QUOTAGATE_HASH_SECRET: give every node the same one."
            )
        return bytes.fromhex(agreed.kept)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector, which would look through everything loaded again and again: a third."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
