"""Reads entities and quota values from the command line; an invalid one is wrong use, exit code 2."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final

import typer

from app.domain.entity import Entity
from app.domain.errors import EntityError
from app.domain.matching import Filter
from app.domain.quota import KEYS
from app.domain.quota_value import NUMBER
from app.kafka.syntax import refuse_credentials

_DURATION: Final = re.compile(
    r"P(?:([0-9]{1,9})D)?(?:T(?=[0-9])(?:([0-9]{1,9})H)?(?:([0-9]{1,9})M)?"
    r"(?:([0-9]{1,9}(?:\.[0-9]{1,3})?)S)?)?"
)
_WORDS: Final = {"true": True, "false": False, "null": None}


def entity(text: str) -> Entity:
    """Read an entity, such as ``user=alice,client-id=etl``.

    >>> str(entity("client-id=etl,user=a b"))
    'user=a%20b,client-id=etl'
    """
    try:
        return Entity.parse(text)
    except EntityError as error:
        raise typer.BadParameter(f"{text!r}: {error}") from None
    except UnicodeEncodeError:
        raise typer.BadParameter("an entity must be UTF-8") from None


def matches(texts: Sequence[str], *, strict: bool) -> dict[str, Any]:
    """Read a filter of entities; return the query parameters of a list.

    >>> matches(["user=alice", "client-id"], strict=True)
    {'match': ['user=alice', 'client-id'], 'strict': 'true'}
    """
    try:
        Filter.parse(texts, strict=strict)
    except (EntityError, UnicodeEncodeError) as error:
        raise typer.BadParameter(str(error)) from None
    return {"match": list(texts) or None, "strict": "true" if strict else None}


def assignments(words: Sequence[str]) -> dict[str, Any]:
    """Read quotas, each ``KEY=VALUE`` and each key once.

    >>> assignments(["producer_ids_rate=5", "request_rate=limit=100,enforcement=deny"])
    {'producer_ids_rate': 5, 'request_rate': {'limit': 100, 'enforcement': 'deny'}}
    """
    check_no_credentials(words)
    found: dict[str, Any] = {}
    for word in words:
        key, equals, spelled = word.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{word!r}: write KEY=VALUE, such as request_rate=100")
        if key in found:
            raise typer.BadParameter(f"{key} is given twice")
        found[key] = value(key, spelled)
    return found


def check_no_credentials(words: Sequence[str]) -> None:
    """Refuse words such as ``SCRAM-SHA-256=[password=...]``, without showing them."""
    try:
        refuse_credentials(*words)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def value(key: str, spelled: str) -> Any:
    """Read a quota's value: a number (its limit), fields as in ``limit=100,samples=21``, or JSON.

    >>> value("producer_ids_rate", "limit=5,layers.interval_ms=1000,layers.ttl_ms=2000")
    {'limit': 5, 'layers': {'interval_ms': 1000, 'ttl_ms': 2000}}
    """
    if spelled.startswith("{"):
        return _json(key, spelled)
    if "=" not in spelled:
        if spelled == "null":
            return None
        if not NUMBER.fullmatch(spelled):
            raise typer.BadParameter(f"{key}: write a number, fields such as limit=100,samples=21, or JSON")
        return _number(key, spelled)
    fields: dict[str, Any] = {}
    for part in spelled.split(","):
        name, equals, text = part.partition("=")
        if not equals or not name or not text:
            raise typer.BadParameter(f"{key}: write FIELD=VALUE, such as limit=100")
        *above, last = name.split(".")
        inside = fields
        for step in above:
            inside = inside.setdefault(step, {})
            if not isinstance(inside, dict):
                raise typer.BadParameter(f"{key}: {step} is given twice")
        if last in inside:
            raise typer.BadParameter(f"{key}: {name} is given twice")
        inside[last] = _WORDS[text] if text in _WORDS else _scalar(key, text)
    return fields


def factor(spelled: str) -> float:
    """Read a factor from 0 to 1.

    >>> factor("0.2")
    0.2
    """
    if not NUMBER.fullmatch(spelled) or not 0 <= (number := float(spelled)) <= 1:
        raise typer.BadParameter(f"{spelled!r}: write a number from 0 to 1, such as 0.2")
    return number


def duration_ms(spelled: str) -> int:
    """Read an ISO 8601 duration of days, hours, minutes and seconds; return milliseconds.

    >>> duration_ms("PT10M"), duration_ms("P1DT1H"), duration_ms("PT0.5S")
    (600000, 90000000, 500)
    """
    parts = _DURATION.fullmatch(spelled)
    if parts is None or not any(parts.groups()):
        raise typer.BadParameter(f"{spelled!r}: write an ISO 8601 duration, such as PT10M or PT1H30M")
    days, hours, minutes, seconds = (Decimal(part or 0) for part in parts.groups())
    return int((((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000)


def completed_keys(incomplete: str) -> list[str]:
    """Completions for ``KEY=``."""
    return [f"{key}=" for key in KEYS if key.startswith(incomplete)]


def completed_names(incomplete: str) -> list[str]:
    """Completions for a quota key."""
    return [key for key in KEYS if key.startswith(incomplete)]


def completed_types(incomplete: str) -> list[str]:
    """Completions for the beginning of an entity."""
    types = ("user=", "client-id=", "ip=", "broker=", "listener=")
    return [type_ for type_ in types if type_.startswith(incomplete)]


def _scalar(key: str, text: str) -> int | float | str:
    return _number(key, text) if NUMBER.fullmatch(text) else text


def _number(key: str, spelled: str) -> int | float:
    number: int | float = json.loads(spelled)
    if number in {float("inf"), float("-inf")}:
        raise typer.BadParameter(f"{key}: the number is too large")
    return number


def _json(key: str, spelled: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name is duplicated")
        return found

    def no_number(name: str) -> Any:
        raise ValueError(f"{name} is not a JSON number")

    try:
        return json.loads(spelled, object_pairs_hook=once, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{key}: the value is not JSON: {error}") from None
