"""Files of quotas: read with the line of every fault, and written in canonical form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, NamedTuple

import yaml
from yaml.events import CollectionEndEvent, CollectionStartEvent
from yaml.nodes import MappingNode, Node, ScalarNode

from app.domain.entity import TYPES, Entity
from app.domain.errors import EntityError, QuotaValueError
from app.domain.quota import Defaults
from app.domain.quota_value import NUMBER, Definition, check_all, pointer
from app.terminal import plain

MAX_DEPTH: Final = 10
MAX_KEY: Final = 1_000
"""YAML allows a longer key only after a question mark."""
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG: Final = "tag:yaml.org,2002:"


EntityAndQuotas = tuple[str, Mapping[str, Definition]]
"""An entity in its canonical spelling, and its quotas."""


class FileFault(NamedTuple):
    """A line number, from 1, and the fault in this line."""

    line: int
    message: str


@dataclass(frozen=True, slots=True)
class Contents:
    """The content of a file: normalised quotas by canonical entity, and the faults."""

    quotas: Mapping[str, Mapping[str, Definition]]
    faults: Sequence[FileFault]


def read(text: str) -> Contents:
    """Read a file, with all its faults."""
    try:
        if line := _too_deep(text):
            return Contents({}, [FileFault(line, "is nested too deeply")])
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        return Contents({}, [FileFault(line, f"not YAML: {error.reason}")])
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        return Contents({}, [FileFault(mark.line + 1 if mark else 1, f"not YAML: {error.problem}")])
    reader = _FileReader()
    quotas = reader.file(root)
    return Contents(quotas, sorted(reader.faults))


def _too_deep(text: str) -> int | None:
    """The line where nesting is too deep for a file of quotas; composing it could crash the process."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                return event.start_mark.line + 1 if event.start_mark else 1
        elif isinstance(event, CollectionEndEvent):
            depth -= 1
    return None


def ordered(quotas: Iterable[EntityAndQuotas]) -> list[EntityAndQuotas]:
    """Sort quotas as in a file: by the types of their entity, then by name."""
    return sorted(quotas, key=lambda one: ([TYPES.index(type_) for type_ in _types(one[0])], one[0]))


def quota_lines(
    quotas: Sequence[EntityAndQuotas], comments: Mapping[tuple[str, str], str] | None = None
) -> Iterator[str]:
    """Yield the lines of a file below its comments.

    Args:
        comments: a comment of one line above a quota, by entity and key.
    """
    yield "quotas:\n" if quotas else "quotas: {}\n"
    for entity, definitions in quotas:
        spelled = plain(entity)
        yield f"  {spelled}:\n" if len(spelled) <= MAX_KEY else f"  ? {spelled}\n  :\n"
        for key, definition in definitions.items():
            if comments and (comment := comments.get((entity, key))):
                yield f"    # {plain(comment)}\n"
            limit_alone = definition.keys() == {"limit"}
            yield f"    {plain(key)}: {_flow(definition['limit'] if limit_alone else definition)}\n"


def _types(entity: str) -> list[str]:
    return [part.partition("=")[0] for part in entity.split(",")]


def _flow(value: object) -> str:
    """A value on one line that every YAML reader reads the same.

    >>> _flow({"limit": 0.00001, "shadow": True, "enforcement": "deny"})
    '{limit: 0.00001, shadow: true, enforcement: deny}'
    """
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return f"{Decimal(repr(value)):f}"  # 1e-05 is text to YAML 1.1
        case Mapping():
            return "{" + ", ".join(f"{plain(name)}: {_flow(part)}" for name, part in value.items()) + "}"
    return plain(str(value))


class _FileReader:
    """Reads one file; collects all faults instead of stopping at the first."""

    def __init__(self) -> None:
        self.faults: list[FileFault] = []

    def file(self, root: Node | None) -> dict[str, Mapping[str, Definition]]:
        if root is None:
            self._fault(None, "is empty: write quotas: {} for no quotas at all")
            return {}
        found: dict[str, Mapping[str, Definition]] = {}
        for name, at, below in self._items(root, "the file must be a mapping with the key quotas"):
            if name == "quotas":
                found = self._quotas(below)
            else:
                self._fault(at, f"{name}: unknown; the only key is quotas")
        if isinstance(root, MappingNode) and not any(key.value == "quotas" for key, _ in root.value):
            self._fault(root, "quotas is missing")
        return found

    def _quotas(self, node: Node) -> dict[str, Mapping[str, Definition]]:
        found: dict[str, Mapping[str, Definition]] = {}
        what = "quotas must be a mapping of entities; write {} for none"
        for name, at, below in self._items(node, what):
            try:
                entity = Entity.parse(name)
            except (EntityError, UnicodeEncodeError) as error:
                self._fault(at, f"{name}: {error}")
                continue
            spelled = str(entity)
            if spelled != name:
                self._fault(at, f"{name}: must be spelled {spelled}")
            elif (definitions := self._set(below, entity)) is not None:
                found[spelled] = definitions
        return found

    def _set(self, node: Node, entity: Entity) -> Mapping[str, Definition] | None:
        """The quotas of an entity; None if they have a fault."""
        before = len(self.faults)
        lines: dict[str, Node] = {"": node}
        values = self._value(node, "", lines)
        if len(self.faults) > before:
            return None
        if not isinstance(values, dict):
            self._fault(node, f"{entity}: must be a mapping of quotas")
            return None
        try:
            return check_all(values, entity, Defaults())
        except QuotaValueError as wrong:
            for field, message in wrong.errors:
                where = field
                while where not in lines:
                    where = where.rpartition("/")[0]
                self._fault(lines[where], f"{entity}: {field.lstrip('/')} {message}".replace(":  ", ": "))
            return None

    def _value(self, node: Node, path: str, lines: dict[str, Node]) -> Any:
        """The value of a node; None with a fault, such as a value that YAML readers read differently."""
        if isinstance(node, ScalarNode):
            return self._scalar(node)
        if not isinstance(node, MappingNode):
            self._fault(node, "a list is not allowed here")
            return None
        if path.count("/") > 2:
            self._fault(node, "is nested too deeply")
            return None
        found = {}
        for name, at, below in self._items(node, ""):
            here = path + pointer(name)
            lines[here] = at
            found[name] = self._value(below, here, lines)
        return found

    def _items(self, node: Node, what: str) -> Iterator[tuple[str, Node, Node]]:
        """The names of a mapping with their nodes and values; a duplicate name is a fault."""
        if not isinstance(node, MappingNode):
            self._fault(node, what)
            return
        seen: dict[str, int] = {}
        for key, below in node.value:
            if key.tag == f"{_TAG}merge":
                self._fault(key, "<< is not supported: write the quotas out")
            elif not isinstance(key, ScalarNode):
                self._fault(key, "a name must be text")
            elif key.tag != f"{_TAG}str":
                self._fault(key, f"{key.value}: a name must be text: put it in quotes")
            elif key.value in seen:
                self._fault(key, f"{key.value}: is duplicated, first on line {seen[key.value]}")
            else:
                seen[key.value] = key.start_mark.line + 1
                yield key.value, key, below

    def _scalar(self, node: ScalarNode) -> Any:
        written: str = node.value
        if node.style or node.tag not in {f"{_TAG}{kind}" for kind in _KINDS}:
            if node.tag != f"{_TAG}str":
                self._fault(node, f"{written!r}: the tag {node.tag} is not allowed here")
                return None
            return written
        kind = node.tag.removeprefix(_TAG)
        if kind == "null":
            self._fault(node, "a value is missing: to remove a quota, remove its line")
        elif kind == "bool" and written not in {"true", "false"}:
            meant = "true" if written.lower() in _TRUE else "false"
            self._fault(node, f"{written!r} means {meant} in YAML: write {meant}")
        elif kind == "bool":
            return written == "true"
        elif kind in {"int", "float"} and NUMBER.fullmatch(written):
            try:
                return json.loads(written)
            except ValueError:  # thousands of digits
                self._fault(node, "is too large")
        elif kind == "str" and (written[0].isalpha() or not any(sign in written for sign in "0123456789")):
            return written
        else:
            read = _read_as(node)
            self._fault(node, f"{written!r} means {read} in YAML: write a plain number, such as 1000")
        return None

    def _fault(self, node: Node | None, message: str) -> None:
        self.faults.append(FileFault(node.start_mark.line + 1 if node else 1, message))


_KINDS: Final = ("null", "bool", "int", "float", "str", "timestamp")
_TRUE: Final = {"yes", "on", "true"}


def _read_as(node: ScalarNode) -> str:
    try:
        read = yaml.SafeLoader("").construct_object(node)
    except ValueError:  # an invalid date
        return "a date"
    return "text" if isinstance(read, str) else str(read)
