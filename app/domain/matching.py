"""Filters of entities, as Kafka's DescribeClientQuotas has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.domain.entity import COMBINATIONS, TYPES, Entity, EntityError, Name


@dataclass(frozen=True, slots=True)
class Filter:
    """Which entities a list is of: those that have every type named, under the name that is given.

    Attributes:
        matches: types and names; None is any name, the default's too.
        strict: no other types than the ones named.

    >>> etl = Filter.parse(["client-id=etl", "user"])
    >>> etl.covers(Entity.parse("user=*,client-id=etl")), etl.covers(Entity.parse("client-id=etl"))
    (True, False)
    """

    matches: tuple[tuple[str, Name | None], ...] = ()
    strict: bool = False

    @classmethod
    def parse(cls, texts: Sequence[str], *, strict: bool = False) -> Filter:
        """Read ``type=name``, ``type=*`` (the default) and ``type`` (any), each name percent-decoded once.

        Raises:
            EntityError: for what no entity can be.
        """
        found: dict[str, Name | None] = {}
        for text in texts:
            type_, name = _match(text)
            if type_ in found:
                raise EntityError(f"{type_} is matched twice")
            found[type_] = name
        matches = tuple((type_, found[type_]) for type_ in TYPES if type_ in found)
        if matches and not any(found.keys() <= set(types) for types in COMBINATIONS):
            raise EntityError(f"{' and '.join(type_ for type_, _ in matches)} make no entity together")
        return cls(matches, strict)

    def combinations(self) -> list[tuple[str, ...]]:
        """The sets of types that the entities may be made of."""
        named = {type_ for type_, _ in self.matches}
        return sorted(
            types for types in COMBINATIONS if (named == set(types) if self.strict else named <= set(types))
        )

    def covers(self, entity: Entity) -> bool:
        """Whether an entity is one of them."""
        names = dict(entity.parts)
        return entity.types in self.combinations() and all(
            name is None or names[type_] == name for type_, name in self.matches
        )


def _match(text: str) -> tuple[str, Name | None]:
    if text in TYPES:
        return text, None
    parts = Entity.parse(text).parts
    if len(parts) > 1:
        raise EntityError("matches one type: write match=TYPE=NAME once for each")
    return parts[0]
