"""The SQL of lists: a page of entities by a filter, and a page of history."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Select, and_, false, func, or_, select, true, tuple_

from app.catalog.tables import CHANGES, HEAD_LENGTH, QUOTAS, ROW, STATE
from app.domain.entity import spell
from app.domain.matching import Filter


def page(wanted: Filter, after: tuple[str, str] | None, limit: int) -> Select[Any]:
    """The catalog's version, and all rows of the first entities after one (spelling, hash); one statement.

    Tombstones are included, because they count for the version of an entity.
    """
    keys = select(QUOTAS.c.head, QUOTAS.c.entity_hash)
    keys = keys.where(QUOTAS.c.definition.is_not(None), _covers(wanted))
    if after is not None:
        keys = keys.where(tuple_(QUOTAS.c.head, QUOTAS.c.entity_hash) > tuple_(_head(after[0]), after[1]))
    chosen = keys.distinct().order_by(QUOTAS.c.head, QUOTAS.c.entity_hash).limit(limit).subquery()
    rows = chosen.join(QUOTAS, QUOTAS.c.entity_hash == chosen.c.entity_hash)
    return (
        select(STATE.c.version.label("now"), *ROW)
        .select_from(STATE.outerjoin(rows, true()))
        .order_by(chosen.c.head, chosen.c.entity_hash)
    )


def history(entity_hash: str | None, before: int | None, limit: int) -> Select[Any]:
    """The newest changes, of one entity or of all, that are older than the change ``before``."""
    query = select(CHANGES).order_by(CHANGES.c.id.desc()).limit(limit)
    if entity_hash is not None:
        query = query.where(CHANGES.c.entity_hash == entity_hash)
    if before is not None:
        query = query.where(CHANGES.c.id < before)
    return query


def _covers(wanted: Filter) -> ColumnElement[bool]:
    """``Filter.covers`` in SQL, on the canonical spelling, in which a comma only separates two parts."""
    if not wanted.matches and not wanted.strict:
        return true()
    names = {type_: name if name is None else spell(name) for type_, name in wanted.matches}
    return or_(false(), *(_of_types(types, names) for types in wanted.combinations()))


def _of_types(types: tuple[str, ...], names: dict[str, str | None]) -> ColumnElement[bool]:
    entity = QUOTAS.c.entity
    first, *second = types
    name = names.get(first)
    if not second:
        if name is not None:
            return and_(QUOTAS.c.head == _head(f"{first}={name}"), entity == f"{first}={name}")
        return and_(_begins(f"{first}="), ~entity.contains(","))
    last = names.get(second[0])
    if name is None:
        begins, has = _begins(f"{first}="), entity.contains(f",{second[0]}=")
    else:
        begins = has = _begins(f"{first}={name},{second[0]}=")
    return and_(begins, has if last is None else _ends(f",{second[0]}={last}"))


def _begins(text: str) -> ColumnElement[bool]:
    """The last condition is the exact one; the others use the index. Spellings are printable ASCII."""
    head = QUOTAS.c.head
    return and_(
        head >= _head(text),
        head < _head(text) + "\x7f",
        func.substr(QUOTAS.c.entity, 1, len(text)) == text,
    )


def _ends(text: str) -> ColumnElement[bool]:
    entity = QUOTAS.c.entity
    return func.substr(entity, func.length(entity) - len(text) + 1) == text


def _head(spelling: str) -> str:
    return spelling[:HEAD_LENGTH]
