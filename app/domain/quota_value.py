"""Quota values: their validation, their normalised form, and the ``Quota`` that they resolve to."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Final, TypedDict, TypeGuard, TypeVar, cast

from app.domain.entity import Entity
from app.domain.errors import QuotaValueError
from app.domain.quota import (
    KEYS,
    LAYER_POLICIES,
    MAX_EXACT,
    MAX_PRODUCER_IDS,
    Algorithm,
    Defaults,
    Enforcement,
    Layers,
    OnStoreFailure,
    Quota,
    QuotaKey,
    Scope,
)

Definition = Mapping[str, object]
"""A quota's value as written, normalised to an object with a ``limit``."""

NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
"""A number as JSON has it, which all readers of YAML read as this number."""

MAX_WINDOW_MS: Final = 2_073_600_000
MIN_LAYER_MS: Final = 100
MAX_LAYERS: Final = 4

_COMMON: Final = ("limit", "enforcement", "shadow", "scope", "on_store_failure")
FIELDS: Final[Mapping[Algorithm, tuple[str, ...]]] = {
    "sampled_rate": (*_COMMON, "algorithm", "samples", "sample_ms"),
    "token_bucket": (*_COMMON, "algorithm", "samples", "sample_ms", "burst"),
    "producer_ids": (*_COMMON, "window_ms", "layers"),
}
"""The fields of a value under each algorithm, in the order of display."""

_ORDER: Final = {key: place for place, key in enumerate(KEYS)}
V = TypeVar("V")

CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "enforcement": ("deny", "delay"),
    "scope": ("cluster", "broker"),
    "on_store_failure": ("admit", "throttle"),
    "algorithm": ("sampled_rate", "token_bucket"),
}
RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "samples": (1, 100),
    "sample_ms": (100, 3_600_000),
    "window_ms": (1_000, MAX_WINDOW_MS),
}

MAX_ERRORS: Final = 100
"""Validation stops after this many errors."""


class Bound(TypedDict):
    """By how much admitted usage may exceed the limit: the worst ratio over any window of this length."""

    ratio: float | None
    window_ms: int
    text: str


def check(key: str, value: object, entity: Entity, defaults: Defaults) -> dict[str, object]:
    """Validate a quota's value and normalise it: an object, fields in order, integral numbers as ints.

    >>> user = Entity.of(user="alice")
    >>> check("producer_ids_rate", 5.0, user, Defaults())
    {'limit': 5}
    >>> check("request_rate", {"samples": 1, "limit": 2.5}, user, Defaults())
    {'limit': 2.5, 'samples': 1}

    Raises:
        QuotaValueError: with every problem of the value, and pointers into it.
    """
    errors: list[tuple[str, str]] = []
    try:
        check_key(key, entity)
    except QuotaValueError as error:
        if key not in KEYS:
            raise
        errors += error.errors
    definition: dict[str, object] = {}
    if isinstance(value, Mapping):
        errors += islice(_read(KEYS[key], value, defaults, definition), MAX_ERRORS)
    elif _is_number(value):
        errors += [("", message) for _, message in _read(KEYS[key], {"limit": value}, defaults, definition)]
    else:
        errors.append(("", "must be a number, which is its limit, or an object with a limit"))
    if errors:
        raise QuotaValueError(errors)
    return definition


def check_all(values: Mapping[str, object], entity: Entity, defaults: Defaults) -> dict[str, Definition]:
    """Validate and normalise all quotas of an entity, in the order of ``KEYS``.

    Raises:
        QuotaValueError: with pointers into ``values``.
    """
    if not values:
        raise QuotaValueError([("", f"must set at least one quota: {', '.join(KEYS)}")])
    return _each({key: partial(check, key, value, entity, defaults) for key, value in values.items()})


def alter(
    current: Mapping[str, Definition], patch: Mapping[str, object], entity: Entity, defaults: Defaults
) -> dict[str, Definition | None]:
    """Apply a merge patch to an entity's quotas; the result has the patch's keys, None for a removal.

    >>> now = {"request_rate": {"limit": 5, "shadow": True}}
    >>> alter(now, {"request_rate": 7, "producer_ids_rate": None}, Entity.of(user="alice"), Defaults())
    {'producer_ids_rate': None, 'request_rate': {'limit': 7, 'shadow': True}}

    Raises:
        QuotaValueError: with pointers into the patch, or into the merged value if only that is wrong.
    """

    def altered(key: str, new: object) -> Definition | None:
        merged = None if new is None else merge(current.get(key), new)
        try:
            return _replaced(entity, defaults, key, merged)
        except QuotaValueError as error:
            if not _is_number(new):
                raise
            # the patch is a number, so it has no /limit to point to
            errors = [(field.removeprefix("/limit"), message) for field, message in error.errors]
            raise QuotaValueError(errors) from None

    return _each({key: partial(altered, key, new) for key, new in patch.items()})


def replace(values: Mapping[str, object], entity: Entity, defaults: Defaults) -> dict[str, Definition | None]:
    """Validate and normalise new values for some of an entity's quotas; None removes a key.

    >>> replace({"request_rate": 7, "producer_ids_rate": None}, Entity.of(user="alice"), Defaults())
    {'producer_ids_rate': None, 'request_rate': {'limit': 7}}

    Raises:
        QuotaValueError: with pointers into ``values``.
    """
    return _each({key: partial(_replaced, entity, defaults, key, new) for key, new in values.items()})


def check_key(key: str, entity: Entity) -> None:
    """Check that a quota key exists and can be set on this entity.

    Raises:
        QuotaValueError: with one error, which points to the whole value.
    """
    row = KEYS.get(key)
    if row is None:
        raise QuotaValueError([("", f"unknown quota key: use one of {', '.join(KEYS)}")])
    if entity.types not in row.entities:
        fitting = "; ".join(" and ".join(types) for types in row.entities)
        raise QuotaValueError([("", f"cannot be set on {' and '.join(entity.types)}: it goes on {fitting}")])


def merge(definition: Definition | None, patch: object) -> object:
    """Apply an RFC 7396 merge patch to one quota; a number means ``{"limit": n}``.

    >>> merge({"limit": 5, "burst": 9}, {"limit": 6, "burst": None})
    {'limit': 6}
    >>> merge({"limit": 5, "shadow": True}, 7)
    {'limit': 7, 'shadow': True}
    """
    return _merged(definition, {"limit": patch} if _is_number(patch) else patch)


def resolve(
    key: str, definition: Definition, entity: Entity, defaults: Defaults, epoch: int, since_ms: int = 0
) -> Quota:
    """The quota of a validated definition on an entity, with all defaults applied.

    Args:
        since_ms: when the definition last changed; 0 if unknown.

    >>> resolve("controller_mutation_rate", {"limit": 5}, Entity.of(user="alice"), Defaults(), 0).burst
    55.0
    """
    row = KEYS[key]
    numbers = cast("Mapping[str, float]", definition)
    limit = numbers["limit"]
    samples = int(numbers.get("samples", defaults.samples))
    sample_ms = int(numbers.get("sample_ms", defaults.sample_ms))
    window_ms = int(numbers.get("window_ms", defaults.window_ms))
    algorithm = cast("Algorithm", definition.get("algorithm", row.algorithm))
    burst, max_debt = 0.0, math.inf
    if algorithm == "token_bucket" and limit:
        burst = float(numbers.get("burst", samples * sample_ms / 1000 * limit))
        max_debt = limit * (defaults.max_debt_ms / 1000)
    types = entity.types
    scope = definition.get("scope", "broker" if types == ("listener",) else "cluster")
    return Quota(
        key=key,
        limit=limit,
        algorithm=algorithm,
        enforcement=cast("Enforcement", definition.get("enforcement", row.enforcement)),
        shadow=(shadow := definition.get("shadow") is True),
        scope="cluster" if "broker" in types else cast("Scope", scope),
        on_store_failure=cast("OnStoreFailure", definition.get("on_store_failure", "admit")),
        samples=samples,
        sample_ms=sample_ms,
        burst=burst,
        max_debt=max_debt,
        window_ms=window_ms,
        layers=_resolve_layers(definition.get("layers", defaults.layers), window_ms),
        epoch=epoch,
        since_ms=since_ms if shadow else 0,
    )


def bound(quota: Quota) -> Bound:
    """The guarantee of a quota over any window, in numbers and in words.

    >>> bound(Quota("producer_ids_rate", 5, "producer_ids", "deny"))["text"]
    'never more than 5 in any 3600 s'
    """
    ratio, window_ms = quota.bound
    span = f"any {window_ms / 1000:g} s"
    if quota.limit == 0 and ratio is not None:
        text = "a limit of 0 rejects every usage above 0"
    elif quota.shadow:
        text = "none: a shadow quota never changes a decision"
    elif ratio is None:
        text = "none by itself: delayed work is done all the same, only later work waits"
    elif ratio == 1:
        text = f"never more than {quota.limit:.15g} in {span}"
    else:
        text = f"never more than {ratio:g} times the limit of {quota.limit:.15g} a second over {span}"
    return {"ratio": ratio, "window_ms": window_ms, "text": text}


def pointer(*steps: str | int) -> str:
    """The JSON pointer (RFC 6901) with these steps.

    >>> pointer("asks", 3, "a/b~c"), pointer()
    ('/asks/3/a~1b~0c', '')
    """
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)


class _FieldError(ValueError):
    """A field is wrong, or its part at the pointer ``below``; the text gives the correct form."""

    def __init__(self, message: str, below: str = "") -> None:
        self.below = below
        super().__init__(message)


def _replaced(entity: Entity, defaults: Defaults, key: str, value: object) -> Definition | None:
    """The new definition of a key; None removes it."""
    if value is None:
        check_key(key, entity)
        return None
    return check(key, value, entity, defaults)


def _each(reads: Mapping[str, Callable[[], V]]) -> dict[str, V]:
    """Read every key, in the order of ``KEYS``, and raise all problems together, up to ``MAX_ERRORS``."""
    results: dict[str, V] = {}
    errors: list[tuple[str, str]] = []
    for key in sorted(reads, key=lambda key: _ORDER.get(key, len(_ORDER))):
        try:
            results[key] = reads[key]()
        except QuotaValueError as error:
            errors += [(pointer(key) + field, message) for field, message in error.errors]
            if len(errors) >= MAX_ERRORS:
                break
    if errors:
        raise QuotaValueError(errors)
    return results


def _read(
    row: QuotaKey, given: Mapping[str, object], defaults: Defaults, definition: dict[str, object]
) -> Iterator[tuple[str, str]]:
    """Put valid fields into ``definition``, and yield the pointer and message of each problem."""
    algorithm = given.get("algorithm", row.algorithm) if row.algorithm != "producer_ids" else row.algorithm
    fields = (
        FIELDS[cast("Algorithm", algorithm)] if algorithm in CHOICES["algorithm"] else FIELDS[row.algorithm]
    )
    for field in fields:
        if field in given:
            try:
                definition[field] = _field(row, field, given[field], defaults)
            except _FieldError as error:
                yield pointer(field) + error.below, str(error)
    if "limit" not in given:
        yield "/limit", "is required"
    for field in given:
        if field not in fields:
            hint = ' (a field of token buckets: add "algorithm": "token_bucket")' if field == "burst" else ""
            yield pointer(field), f"unknown field{hint}: {row.name} takes {', '.join(fields)}"
    enforcement = given.get("enforcement", row.enforcement)
    if algorithm == "sampled_rate" and definition.get("samples") == 1 and enforcement == "deny":
        yield "/samples", 'must be at least 2 under deny; a single sample needs "enforcement": "delay"'


def _field(row: QuotaKey, field: str, value: object, defaults: Defaults) -> object:
    if field == "limit":
        return _number(value, 0, _max_limit(row, defaults), whole=row.integer_limit)
    if field == "burst":
        burst = _number(value, 0, MAX_EXACT, whole=False)
        if burst == 0:
            raise _FieldError("must be above 0")
        return burst
    if field == "shadow":
        if not isinstance(value, bool):
            raise _FieldError("must be true or false")
        return value
    if field == "layers":
        return _layers(value)
    if field in RANGES:
        low, high = RANGES[field]
        return _number(value, low, high, whole=True)
    choices = ("deny",) if row.algorithm == "producer_ids" and field == "enforcement" else CHOICES[field]
    if not isinstance(value, str) or value not in choices:
        raise _FieldError(f"must be {' or '.join(map(repr, choices))}")
    return value


def _number(value: object, low: int, high: int, *, whole: bool) -> int | float:
    if not _is_number(value):
        raise _FieldError("must be an integer" if whole else "must be a number")
    if not low <= value <= high:  # "not in range" also catches NaN
        raise _FieldError(f"must be from {low} to {high}")
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if whole and isinstance(value, float):
        raise _FieldError("must be an integer, without a fraction")
    return value


def _layers(value: object) -> object:
    if isinstance(value, str) and value in LAYER_POLICIES:
        return value
    if not isinstance(value, Mapping) or set(value) != {"interval_ms", "ttl_ms"}:
        policies = " or ".join(map(repr, LAYER_POLICIES))
        raise _FieldError(f"must be {policies}, or an object with interval_ms and ttl_ms")
    interval_ms = _layer_ms(value, "interval_ms", MIN_LAYER_MS, MAX_WINDOW_MS)
    ttl_ms = _layer_ms(value, "ttl_ms", interval_ms, MAX_LAYERS * interval_ms)
    return {"interval_ms": interval_ms, "ttl_ms": ttl_ms}


def _layer_ms(layers: Mapping[str, object], name: str, low: int, high: int) -> int:
    try:
        return int(_number(layers[name], low, high, whole=True))
    except _FieldError as error:
        of = f", one interval to {MAX_LAYERS} of them" if name == "ttl_ms" else ""
        raise _FieldError(f"{error}{of}", pointer(name)) from None


def _resolve_layers(layers: object, window_ms: int) -> Layers:
    if isinstance(layers, str):
        return Layers.named(layers, window_ms)
    times = cast("Mapping[str, int]", layers)
    return Layers(times["interval_ms"], times["ttl_ms"])


def _max_limit(row: QuotaKey, defaults: Defaults) -> int:
    if row.algorithm == "producer_ids":
        return min(MAX_PRODUCER_IDS, defaults.max_ids // 2)
    return int(row.max_limit)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _merged(target: object, patch: object) -> object:
    if not isinstance(patch, Mapping):
        return patch
    result = dict(target) if isinstance(target, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _merged(result.get(name), value)
    return result
