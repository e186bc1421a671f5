"""Filters on entities, as in Kafka's ``DescribeClientQuotas``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.domain.entity import COMBINATIONS, TYPES, Entity, Name
from app.domain.errors import EntityError


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter of a list: an entity matches if it has every named type, with the given name.

    Attributes:
        matches: pairs of a type and a name; None matches any name, and the default.
        strict: the entities have no other types.

    >>> etl = Filter.parse(["client-id=etl", "user"])
    >>> etl.covers(Entity.parse("user=*,client-id=etl")), etl.covers(Entity.parse("client-id=etl"))
    (True, False)
    """

    matches: tuple[tuple[str, Name | None], ...] = ()
    strict: bool = False

    @classmethod
    def parse(cls, texts: Sequence[str], *, strict: bool = False) -> Filter:
        """Parse ``type=name``, ``type=*`` (the default) and ``type`` (any); names are percent-decoded once.

        Raises:
            EntityError: no entity can match.
        """
        names: dict[str, Name | None] = {}
        for text in texts:
            type_, name = _match(text)
            if type_ in names:
                raise EntityError(f"{type_} is matched twice")
            names[type_] = name
        matches = tuple((type_, names[type_]) for type_ in TYPES if type_ in names)
        if matches and not any(names.keys() <= set(types) for types in COMBINATIONS):
            raise EntityError(
                f"{' and '.join(type_ for type_, _ in matches)} do not go together in an entity"
            )
        return cls(matches, strict)

    def combinations(self) -> list[tuple[str, ...]]:
        """The sets of types that matching entities can have."""
        named = {type_ for type_, _ in self.matches}
        return sorted(
            types for types in COMBINATIONS if (named == set(types) if self.strict else named <= set(types))
        )

    def covers(self, entity: Entity) -> bool:
        """Whether an entity matches."""
        names = dict(entity.parts)
        return entity.types in self.combinations() and all(
            name is None or names[type_] == name for type_, name in self.matches
        )


def _match(text: str) -> tuple[str, Name | None]:
    if text in TYPES:
        return text, None
    parts = Entity.parse(text).parts
    if len(parts) > 1:
        raise EntityError("a match has one type: write match=TYPE=NAME once for each type")
    return parts[0]
