"""The quotas of a what-if: definitions from files, with the defaults and rules of the deployment."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, NoReturn, TypeVar

import msgspec

from app import quota_file
from app.domain.entity import Entity
from app.domain.errors import QuotaValueError
from app.domain.ladder import MatchingRules, Quotas
from app.domain.quota import Defaults, Quota
from app.domain.quota_value import Definition, resolve
from workers.jobs.errors import JobUsageError

T = TypeVar("T")

PREFIX: Final = "QUOTAGATE_"


@dataclass(frozen=True, slots=True)
class ProposedQuotas:
    """Quotas that would be in force, and the deployment's rules of matching."""

    quotas: Quotas
    rules: MatchingRules


def proposed(files: Sequence[str], max_ids: int) -> ProposedQuotas:
    """The quotas of files. If several files name an entity, it has the quotas of the last of them.

    Raises:
        JobUsageError: a file cannot be read, or has faults, each with its line; or a setting is invalid.
    """
    definitions: dict[str, Mapping[str, Definition]] = {}
    for file in files:
        definitions |= _read(file)
    try:
        return ProposedQuotas(resolved(definitions, defaults(max_ids)), rules())
    except QuotaValueError as error:
        raise JobUsageError(
            f"{', '.join(files)}: faults under the defaults of the settings; nothing was replayed",
            *(f"{field.lstrip('/')} {message}" for field, message in error.errors),
        ) from None


def _read(file: str) -> Mapping[str, Mapping[str, Definition]]:
    """The definitions in a file, by entity and key.

    Raises:
        JobUsageError: it cannot be read, or has faults.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise JobUsageError(f"--quotas: {file}: {reason}") from None
    contents = quota_file.read(text)
    if contents.faults:
        raise JobUsageError(
            f"{file} has faults; nothing was replayed",
            *(f"{file}:{fault.line}: {fault.message}" for fault in contents.faults),
        )
    return contents.quotas


def resolved(
    definitions: Mapping[str, Mapping[str, Definition]], defaults: Defaults
) -> dict[str, dict[Entity, Quota]]:
    """The quotas of a file, by key and entity.

    Raises:
        QuotaValueError: a quota is invalid with these defaults.
    """
    found: dict[str, dict[Entity, Quota]] = {}
    for name, by_key in definitions.items():
        entity = Entity.parse(name)
        for key, definition in by_key.items():
            found.setdefault(key, {})[entity] = resolve(key, definition, entity, defaults, epoch=0)
    return found


def rules() -> MatchingRules:
    """The deployment's rules of matching, from the same variables as the nodes'.

    Raises:
        JobUsageError: a variable is invalid.
    """
    return MatchingRules(
        os.environ.get(f"{PREFIX}INTER_BROKER_LISTENER") or None, _setting("IPV6_PREFIX", int, 64)
    )


def defaults(max_ids: int) -> Defaults:
    """The defaults of the deployment, from the same variables as the nodes'."""
    known = Defaults()
    longest = _setting("MAX_DEBT", timedelta, timedelta(milliseconds=known.max_debt_ms))
    return Defaults(
        samples=_setting("SAMPLES", int, known.samples),
        sample_ms=_setting("SAMPLE_MS", int, known.sample_ms),
        window_ms=_setting("PRODUCER_ID_WINDOW_MS", int, known.window_ms),
        layers=os.environ.get(f"{PREFIX}PRODUCER_ID_LAYERS", known.layers),
        max_ids=max_ids,
        max_debt_ms=round(longest / timedelta(milliseconds=1)),
    )


def _setting(name: str, kind: type[T], default: T) -> T:
    """A variable; durations are ISO 8601.

    Raises:
        JobUsageError: the variable's value is not of this kind.
    """
    text = os.environ.get(PREFIX + name)
    if not text:
        return default
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        _refuse(name, "a whole number" if kind is int else "an ISO 8601 duration, such as PT1H")


def _refuse(name: str, form: str) -> NoReturn:
    raise JobUsageError(f"{PREFIX}{name}: must be {form}")
