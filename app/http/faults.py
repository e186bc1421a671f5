"""Finds the faults of a JSON body, by its type.

msgspec's decoder stops at the first fault, and names it in English. This module descends along the same type
to the values that the decoder refuses. It reads each value as the text that was sent, so a number of a
million digits is never converted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import cache
from itertools import islice
from typing import Any, Final, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, Raw, UnsetType, inspect

from app.domain.quota_value import pointer
from app.http.problems import MAX_ERRORS, FieldError

LEAST: Final = 128
"""As so many bytes a short value counts."""
STEP: Final = 32 * LEAST
"""The bytes that are read in one step; a range of a list takes a step of its own."""
SMALL: Final = 16 * 1024
"""The unknown fields of a larger object, in bytes, are not named one by one: to list them takes too long."""
MUST: Final = "must"
"""In ``Meta.extra``: the message for every fault of the value."""
CHECK: Final = "check"
"""In ``Meta.extra``: a function that returns a further fault of the value, or None."""
MOST_DIGITS: Final = 300
"""An integer of more digits is outside of every range."""
_NAMES: Final = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}
"""The kinds of JSON values, as messages name them."""
_KIND_BY_FIRST_BYTE: Final = {
    b'"': "str",
    b"{": "object",
    b"[": "array",
    b"t": "bool",
    b"f": "bool",
    b"n": "null",
}
_KIND_BY_TYPE: Final[dict[type[inspect.Type], str]] = {
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.StrType: "str",
    inspect.LiteralType: "str",
    inspect.BoolType: "bool",
    inspect.NoneType: "null",
    inspect.ListType: "array",
    inspect.DictType: "object",
    inspect.StructType: "object",
}
_OBJECT: Final = msgspec.json.Decoder(dict[str, Raw])
_LIST: Final = msgspec.json.Decoder(list[Raw])
_TEXT: Final = msgspec.json.Decoder(str)
_Path = tuple[str | int, ...]


class _Entries(NamedTuple):
    """The types of a list's entries, and the decoder of such lists; None if the types have a ``CHECK``."""

    options: _Options
    decoder: msgspec.json.Decoder[Any] | None


class _Option(NamedTuple):
    """A type that a value may have, and the ``extra`` of its metadata."""

    type: inspect.Type
    extra: dict[str, Any]
    entries: _Entries | None = None


_Options = dict[str, _Option]
"""The types that a value may have, by the kind of its JSON."""


class _Field(NamedTuple):
    required: bool
    options: _Options


class _Value(NamedTuple):
    """A value that was sent, the types that it may have, and the way to it."""

    sent: bytes
    options: _Options
    at: _Path


class _Range(NamedTuple):
    """Neighbouring entries of a list, the first of which has this index."""

    sent: list[Raw]
    first: int
    entries: _Entries
    at: _Path


_Found = tuple[list[FieldError], list[_Value | _Range]]
"""The faults of a value itself, and its parts that have to be examined."""


def faults_in(body: bytes, type_: type) -> Generator[None, None, list[FieldError]]:
    """Return the faults of a body, ``MAX_ERRORS`` at most; a valid body has none. Yield between steps.

    Of a duplicated key the last value counts. Of each object, unknown and missing fields come first.

    Args:
        body: perhaps malformed: values without a place in the type are not read.

    Raises:
        ValueError, RecursionError: a value that is read is not JSON.
    """
    found: list[FieldError] = []
    left: list[_Value | _Range] = [_Value(body.strip(), _options_of(type_), ())]
    read = 0
    while left and len(found) < MAX_ERRORS:
        part = left.pop()
        if isinstance(part, _Value):
            read += LEAST + len(part.sent)
            faults, inner = _check_value(part)
        else:
            read = STEP
            faults, inner = [], _refused(part)
        found += faults
        left += reversed(inner)
        if read >= STEP:
            read = 0
            yield
    return found[:MAX_ERRORS]


def _check_value(value: _Value) -> _Found:
    sent, options, at = value
    kind = _kind(sent)
    option = options.get(kind) or (options.get("float") if kind == "int" else None)
    if option is None:
        named = " or ".join(_NAMES[each] for each in options)
        return [FieldError(pointer(*at), _must(options) or f"must be {named}")], []
    if isinstance(option.type, inspect.StructType):
        return _check_object(sent, _object(option.type.cls), at)
    if option.entries is not None:
        return _check_list(sent, option, option.entries, at)
    if wrong := _fault(sent, option.type):
        return [FieldError(pointer(*at), option.extra.get(MUST) or wrong)], []
    check: Callable[[Any], str | None] | None = option.extra.get(CHECK)
    if check is not None and (wrong := check(msgspec.json.decode(sent))):
        return [FieldError(pointer(*at), wrong)], []
    return [], []


def _must(options: _Options) -> str:
    """Return the message for every fault of a value that may have these types, or an empty text."""
    return next((each.extra[MUST] for each in options.values() if MUST in each.extra), "")


def _check_object(sent: bytes, object_: _Object, at: _Path) -> _Found:
    if object_.decoder is not None and _decoded(object_.decoder, sent) is not None:
        return [], []
    fields = object_.fields
    use = f"use {', '.join(fields)}"
    faults = []
    if len(sent) <= SMALL:
        found = _OBJECT.decode(sent)
        unknown = islice((name for name in found if name not in fields), MAX_ERRORS)
        faults = [FieldError(pointer(*at, name), f"is unknown: {use}") for name in unknown]
    else:
        if _decoded(object_.only_known, sent) is None:
            faults = [FieldError(pointer(*at), f"has unknown fields: {use}")]
        known: dict[str, Any] = msgspec.structs.asdict(object_.known.decode(sent))
        found = {name: text for name, text in known.items() if text is not UNSET}
    for name, field in fields.items():
        if field.required and name not in found:
            must = _must(field.options)
            faults.append(FieldError(pointer(*at, name), "is required" + (must and f": it {must}")))
    inner: list[_Value | _Range] = [
        _Value(bytes(found[name]), each.options, (*at, name))
        for name, each in fields.items()
        if name in found
    ]
    return faults, inner


def _check_list(sent: bytes, option: _Option, entries: _Entries, at: _Path) -> _Found:
    assert isinstance(option.type, inspect.ListType)
    valid = None if entries.decoder is None else _decoded(entries.decoder, sent)
    found = _LIST.decode(sent) if valid is None else valid
    if wrong := _length_fault(len(found), "entries", option.type):
        return [FieldError(pointer(*at), option.extra.get(MUST) or wrong)], []
    return [], [_Range(found, 0, entries, at)] if valid is None else []


def _refused(range_: _Range) -> list[_Value | _Range]:
    """Return the only entry of a range as a value; of a longer range, the halves that may hold a fault."""
    sent, first, entries, at = range_
    if len(sent) == 1:
        return [_Value(bytes(sent[0]), entries.options, (*at, first))]
    half = len(sent) // 2
    halves = _Range(sent[:half], first, entries, at), _Range(sent[half:], first + half, entries, at)
    return [each for each in halves if each.sent and not _is_valid(each)]


def _is_valid(range_: _Range) -> bool:
    decoder = range_.entries.decoder
    return decoder is not None and _decoded(decoder, b"[%b]" % b",".join(range_.sent)) is not None


def _decoded(decoder: msgspec.json.Decoder[Any], sent: bytes) -> Any:
    """Return the value that a decoder reads; None if it finds a fault.

    A decoder is a hundred times as fast as this module, which has to find only the fault's place.
    """
    try:
        return decoder.decode(sent)
    except msgspec.ValidationError:
        return None


def _fault(sent: bytes, type_: Any) -> str | None:
    """Return the fault of a value of the right kind that holds no others."""
    if isinstance(type_, inspect.StrType):
        return _length_fault(len(_TEXT.decode(sent)), "characters", type_)
    if isinstance(type_, inspect.LiteralType):
        several = "one of " if len(type_.values) > 1 else ""
        valid = _TEXT.decode(sent) in type_.values
        return None if valid else f"must be {several}{', '.join(map(str, type_.values))}"
    if isinstance(type_, inspect.IntType | inspect.FloatType):
        value = _number(sent)
        if type_.ge is not None and value < type_.ge:
            return f"must be at least {type_.ge}"
        if type_.le is not None and value > type_.le:
            return f"must be at most {type_.le}"
    return None


def _length_fault(length: int, unit: str, type_: inspect.StrType | inspect.ListType) -> str | None:
    if type_.min_length is not None and length < type_.min_length:
        return (
            "must not be empty" if type_.min_length == 1 else f"must have at least {type_.min_length} {unit}"
        )
    if type_.max_length is not None and length > type_.max_length:
        return f"must have at most {type_.max_length} {unit}"
    return None


def _kind(sent: bytes) -> str:
    """Return the kind of a value by its first character; of a number also by the others."""
    kind = _KIND_BY_FIRST_BYTE.get(sent[:1])
    return kind or ("float" if any(mark in sent for mark in b".eE") else "int")


def _number(sent: bytes) -> float:
    """Return a number; one of very many digits is infinite."""
    if _kind(sent) == "int" and len(sent) <= MOST_DIGITS:
        return int(sent)
    return float(sent)


class _Object(NamedTuple):
    """A Struct as this module reads it.

    Attributes:
        decoder: reads a valid one; None if a value in it has a ``CHECK``.
        known: reads the text of each known field, and ``only_known`` refuses unknown ones.
    """

    fields: dict[str, _Field]
    decoder: msgspec.json.Decoder[Any] | None
    known: msgspec.json.Decoder[Any]
    only_known: msgspec.json.Decoder[Any]


@cache
def _object(struct: type) -> _Object:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    assert info.forbid_unknown_fields, struct
    hints = get_type_hints(struct, include_extras=True)
    fields = {
        field.encode_name: _Field(field.required, _options(field.type, hints[field.name]))
        for field in info.fields
    }
    texts: Any = [(name, Raw | UnsetType, UNSET) for name in fields]
    known, only_known = (
        msgspec.json.Decoder(msgspec.defstruct("Fields", texts, forbid_unknown_fields=forbids))
        for forbids in (False, True)
    )
    has_checks = any(_have_checks(field.options) for field in fields.values())
    return _Object(fields, None if has_checks else msgspec.json.Decoder(struct), known, only_known)


@cache
def _options_of(type_: type) -> _Options:
    return _options(inspect.type_info(type_), type_)


def _options(type_: inspect.Type, hint: Any, extra: dict[str, Any] | None = None) -> _Options:
    """Return the types that a value may have; ``hint`` is the annotation that msgspec describes so."""
    extra = extra or {}
    if isinstance(type_, inspect.Metadata):
        return _options(type_.type, hint, {**extra, **(type_.extra or {})})
    if isinstance(type_, inspect.UnionType):
        return {kind: each for one in type_.types for kind, each in _options(one, hint, extra).items()}
    entries = None
    if isinstance(type_, inspect.ListType):
        entry: Any = _entry_in(hint)
        options = _options(type_.item_type, entry)
        entries = _Entries(options, None if _have_checks(options) else msgspec.json.Decoder(list[entry]))
    return {_KIND_BY_TYPE[type(type_)]: _Option(type_, extra, entries)}


def _entry_in(hint: Any) -> Any:
    """Return the type of the entries of the list in an annotation; None without a list."""
    if get_origin(hint) is list:
        return get_args(hint)[0]
    return next((found for each in get_args(hint) if (found := _entry_in(each)) is not None), None)


def _have_checks(options: _Options) -> bool:
    """Whether one of these types, or one in it, has a ``CHECK``."""
    return any(
        CHECK in option.extra
        or (option.entries is not None and _have_checks(option.entries.options))
        or (isinstance(option.type, inspect.StructType) and _object(option.type.cls).decoder is None)
        for option in options.values()
    )
