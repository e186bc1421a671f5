"""YAML as go-yaml 2 reads it for envoyproxy/ratelimit: numbers, booleans, nulls, merge keys, aliases.

Nodes keep how a value was spelled, since a field of text takes ``010`` and ``true`` literally.
"""

from __future__ import annotations

import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Final

import yaml

MAX_DEPTH: Final = 256
"""The deepest nesting of a document, aliases followed."""
MAX_ALIASED: Final = 4_000_000
"""The most characters that the aliases of a document expand to; each node costs 16 extra."""

INTEGERS: Final = range(-(2**63), 2**63)
"""The whole numbers; larger ones are fractions."""

_LOADER: Final = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_TAGS: Final = "tag:yaml.org,2002:"
_KINDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "int": int,
    "float": (int, float),
    "bool": bool,
    "null": type(None),
}
_NULLS: Final = ("", "~", "null", "Null", "NULL")
_TRUE: Final = ("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON")
_FALSE: Final = ("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF")
_INTEGER: Final = re.compile(r"([-+]?)(?:0[xX]([0-9a-fA-F]+)|0[bB]([01]+)|0[oO]?([0-7]+)|([1-9][0-9]*|0))")
_BASES: Final = (16, 2, 8, 10)
_FLOAT: Final = re.compile(r"[-+]?(?:(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?)")
_MAX_DIGITS: Final = 80
_NODE: Final = 16
_NOT_FINITE: Final = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


class GoYamlError(ValueError):
    """A text is not YAML, or uses YAML that is not read here; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Scalar:
    """A value.

    Attributes:
        text: as it was spelled, without quotation marks.
        tag: given in the text, such as ``tag:yaml.org,2002:int``.
        is_plain: without quotation marks and without a tag.
    """

    text: str
    tag: str | None = None
    is_plain: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """A list."""

    items: list[Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """A mapping, in its order; names may come more than once."""

    pairs: list[tuple[Node, Node]] = field(default_factory=list)


Node = Scalar | Items | Pairs
Value = bool | int | float | str | None


def documents(source: str | bytes) -> list[Node]:
    """Return the documents of a text; empty ones are nulls.

    Raises:
        GoYamlError: it is not YAML, nested too deeply, or its aliases expand to too much.
    """
    try:
        events = iter(yaml.parse(source, Loader=_LOADER))
        return [_Composer().node(events) for event in events if isinstance(event, yaml.DocumentStartEvent)]
    except yaml.YAMLError as error:
        raise GoYamlError(f"not YAML: {' '.join(str(error).split())}") from None


def value_of(scalar: Scalar) -> Value:
    """Return the value of a scalar in a place for values of any type.

    Raises:
        GoYamlError: it does not fit its tag.
    """
    if scalar.tag == f"{_TAGS}binary":
        try:
            return b64decode("".join(scalar.text.split()), validate=True).decode()
        except (Base64Error, UnicodeDecodeError):
            raise GoYamlError("!!binary must be base64 of text") from None
    value = plain_value(scalar.text)
    kind = (scalar.tag or "").removeprefix(_TAGS)
    if kind not in _KINDS:
        return value if scalar.is_plain else scalar.text
    if not isinstance(value, _KINDS[kind]) or (kind != "bool" and isinstance(value, bool)):
        raise GoYamlError(f"a value with the tag !!{kind} must be one")
    return float(value) if kind == "float" and value is not None else value


def plain_value(text: str) -> Value:
    """Return the value of a plain scalar.

    >>> [plain_value(text) for text in ("1_000", "0x10", "010", "0b11", "yes", "~", "08", "1:30")]
    [1000, 16, 8, 3, True, None, 8.0, '1:30']
    """
    if text in _NULLS:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    spelled = text.replace("_", "") if text[0] in "+-0123456789" else text
    if (found := _INTEGER.fullmatch(spelled)) and len(spelled) <= _MAX_DIGITS:
        digits, base = next((d, b) for d, b in zip(found.groups()[1:], _BASES, strict=True) if d)
        number = int(f"{found[1]}{digits}", base)
        if number in INTEGERS:
            return number
    if _FLOAT.fullmatch(spelled) and isfinite(fraction := float(spelled)):
        return fraction
    return text


def is_null(node: Node | None) -> bool:
    """Whether a node is absent or null."""
    return node is None or (isinstance(node, Scalar) and value_of(node) is None)


def text_of(scalar: Scalar) -> str:
    """Return a scalar in a place for text: empty for a null, else its spelling."""
    value = value_of(scalar)
    if value is None:
        return ""
    return value if isinstance(value, str) else scalar.text


def named(mapping: Pairs, structures: Sequence[str] = ()) -> dict[str, Node]:
    """Return the fields of a mapping; the last of equal names counts, also one merged by ``<<``.

    Args:
        structures: the fields that hold mappings; a repeated one changes only the fields that it names.

    Raises:
        GoYamlError: a name is no text, or ``<<`` is not followed by mappings.
    """
    found: dict[str, Node] = {}
    for name, value in _flat(mapping):
        earlier = found.get(name)
        if name in structures and isinstance(earlier, Pairs) and isinstance(value, Pairs):
            found[name] = Pairs([*earlier.pairs, *value.pairs])
        else:
            found[name] = value
    return found


def fields_of(node: Node | None) -> dict[str, Node]:
    """Return the fields of a mapping; empty for any other node.

    Raises:
        GoYamlError: as for ``named``.
    """
    return named(node) if isinstance(node, Pairs) else {}


def field_text(fields: Mapping[str, Node], name: str) -> str:
    """Return a field of text; empty if it is absent, or no text."""
    sent = fields.get(name)
    return text_of(sent) if isinstance(sent, Scalar) else ""


def _flat(mapping: Pairs) -> Iterator[tuple[str, Node]]:
    for key, value in mapping.pairs:
        if not isinstance(key, Scalar):
            raise GoYamlError("a key of a mapping must be text")
        if key.text == "<<" and (key.is_plain or key.tag == f"{_TAGS}merge"):
            for merged in reversed(value.items) if isinstance(value, Items) else [value]:
                if not isinstance(merged, Pairs):
                    raise GoYamlError("<< must be followed by a mapping or a list of mappings")
                yield from _flat(merged)
        else:
            yield text_of(key), value


@dataclass(slots=True, eq=False)
class _Size:
    """The size of a node in the units of ``MAX_ALIASED``, the part of it due to aliases, and its depth."""

    whole: int
    aliased: int = 0
    depth: int = 1

    def grow(self, child: _Size, *, is_alias: bool) -> None:
        """Add a child.

        Raises:
            GoYamlError: the node is too large or too deep.
        """
        self.whole += child.whole
        self.aliased += child.whole if is_alias else child.aliased
        self.depth = max(self.depth, child.depth + 1)
        if self.aliased > MAX_ALIASED:
            raise GoYamlError(f"its aliases expand to more than {MAX_ALIASED:,} characters")
        if self.depth > MAX_DEPTH:
            raise GoYamlError(f"it is nested more than {MAX_DEPTH} deep")


class _Composer:
    """Makes the nodes of one document."""

    def __init__(self) -> None:
        self._anchors: dict[str, tuple[Node, _Size] | None] = {}

    def node(self, events: Iterator[yaml.Event]) -> Node:
        return self._next(events, next(events), 1)[0]

    def _next(self, events: Iterator[yaml.Event], event: yaml.Event, depth: int) -> tuple[Node, _Size]:
        if depth > MAX_DEPTH:
            raise GoYamlError(f"it is nested more than {MAX_DEPTH} deep")
        anchor = event.anchor if isinstance(event, yaml.NodeEvent) else None
        if isinstance(event, yaml.AliasEvent):
            return self._aliased(event)
        if anchor is not None:
            self._anchors[anchor] = None
        size = _Size(_NODE + (len(event.value) if isinstance(event, yaml.ScalarEvent) else 0))
        made: Node
        if isinstance(event, yaml.ScalarEvent):
            made = Scalar(event.value, event.tag, event.implicit[0])
        else:
            children = list(self._children(events, size, depth + 1))
            if isinstance(event, yaml.SequenceStartEvent):
                made = Items(children)
            else:
                made = Pairs(list(zip(children[::2], children[1::2], strict=True)))
        if anchor is not None:
            self._anchors[anchor] = made, size
        return made, size

    def _children(self, events: Iterator[yaml.Event], size: _Size, depth: int) -> Iterator[Node]:
        """Yield the nodes of a list or a mapping, and add them to its size."""
        while not isinstance(event := next(events), yaml.CollectionEndEvent):
            child, child_size = self._next(events, event, depth)
            size.grow(child_size, is_alias=isinstance(event, yaml.AliasEvent))
            yield child

    def _aliased(self, alias: yaml.AliasEvent) -> tuple[Node, _Size]:
        assert alias.start_mark is not None
        place = f"the alias in line {alias.start_mark.line + 1}"  # its name may be a secret of another file
        if alias.anchor not in self._anchors:
            raise GoYamlError(f"{place} has no anchor before it")
        found = self._anchors[alias.anchor]
        if found is None:
            raise GoYamlError(f"{place} is part of its own anchor")
        return found
