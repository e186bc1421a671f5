"""Reading of the volume routes' bodies: observations and drills."""

from __future__ import annotations

from typing import Any, Final

from app.domain.quota_value import pointer
from app.domain.volumes import Observation, Volume
from app.http.problems import FieldError, unknown, unprocessable
from app.http.wire import wrong_name

MAX_VOLUMES: Final = 10_000
MAX_SIZE: Final = 2**63 - 1
MAX_DRILL_MS: Final = 366 * 86_400_000

_SIZE: Final = "must be an integer from 0 to 2^63 - 1, or null for unknown"
_PUSHED: Final = 'must be an object: {"volumes": [VOLUME, ...], "complete": true}'
_DRILL: Final = 'must be an object: {"factor": 0.2, "for_ms": 600000}'


def observation_of(body: Any) -> Observation:
    """Return the observation in a body.

    Raises:
        ProblemError: 422 that names every error.
    """
    if not isinstance(body, dict):
        raise unprocessable(FieldError("", _PUSHED))
    errors = unknown(body, ("volumes", "complete"))
    complete = body.get("complete", True)
    if not isinstance(complete, bool):
        errors.append(FieldError("/complete", "must be true or false"))
    volumes = _volumes(body, errors)
    if errors:
        raise unprocessable(*errors)
    return Observation(volumes) if complete else Observation(volumes, frozenset())


def drill_of(body: Any) -> tuple[float, int]:
    """Return the factor of a drill and its duration in milliseconds.

    Raises:
        ProblemError: 422 that names every error.
    """
    if not isinstance(body, dict):
        raise unprocessable(FieldError("", _DRILL))
    errors = unknown(body, ("factor", "for_ms"))
    factor: Any = body.get("factor")
    for_ms: Any = body.get("for_ms")
    errors += [FieldError(pointer(name), "is required") for name in ("factor", "for_ms") if name not in body]
    number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if "factor" in body and not (number and 0 <= factor <= 1):
        errors.append(FieldError("/factor", "must be a number from 0 to 1"))
    whole = isinstance(for_ms, int) and not isinstance(for_ms, bool)
    if "for_ms" in body and not (whole and 1 <= for_ms <= MAX_DRILL_MS):
        errors.append(FieldError("/for_ms", f"must be an integer from 1 to {MAX_DRILL_MS} (a year)"))
    if errors:
        raise unprocessable(*errors)
    return float(factor), int(for_ms)


def _volumes(body: dict[str, Any], errors: list[FieldError]) -> tuple[Volume, ...]:
    sent = body.get("volumes")
    if "volumes" not in body:
        errors.append(FieldError("/volumes", "is required: a list of volumes, which may be empty"))
        return ()
    if not isinstance(sent, list) or len(sent) > MAX_VOLUMES:
        errors.append(FieldError("/volumes", f"must be a list of at most {MAX_VOLUMES} volumes"))
        return ()
    found: dict[tuple[str, str], Volume] = {}
    for at, one in enumerate(sent):
        volume = _volume(one, at, errors)
        if volume is not None and found.setdefault(volume[:2], volume) is not volume:
            errors.append(
                FieldError(pointer("volumes", at), "is duplicated: name each directory of a broker once")
            )
    return tuple(found.values())


def _volume(sent: Any, at: int, errors: list[FieldError]) -> Volume | None:
    """Return a volume; None if it is invalid, with its errors added to ``errors``."""
    if not isinstance(sent, dict):
        errors.append(FieldError(pointer("volumes", at), f"must be an object of {', '.join(Volume._fields)}"))
        return None
    wrong = unknown(sent, Volume._fields, "volumes", at)
    for field in Volume._fields:
        if why := _wrong_field(sent, field):
            wrong.append(FieldError(pointer("volumes", at, field), why))
    errors += wrong
    return None if wrong else Volume(**sent)


def _wrong_field(sent: dict[str, Any], field: str) -> str | None:
    """Return the error of a field of a volume, or None."""
    names = field in ("broker", "dir")
    if field not in sent:
        return "is required" if names else f"is required: it {_SIZE}"
    value = sent[field]
    if names:
        return wrong_name(value) if isinstance(value, str) else "must be a string"
    whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SIZE
    return None if value is None or whole else _SIZE
