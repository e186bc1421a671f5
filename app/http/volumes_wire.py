"""Reading of the volume routes' bodies: observations and drills."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from app.domain.quota_value import pointer
from app.domain.volumes import KNOWN_AT_MOST, Observation, Volume
from app.http.problems import FLAG, FieldError, Rule, faults, is_whole, must, unprocessable
from app.http.wire import wrong_name

MAX_SIZE: Final = 2**63 - 1
MAX_DRILL_MS: Final = 366 * 86_400_000

_SIZE_MUST: Final = "must be an integer from 0 to 2^63 - 1, or null for unknown"
_NAME: Final = Rule(lambda value: wrong_name(value) if isinstance(value, str) else "must be a string")
_SIZE: Final = Rule(
    must(_SIZE_MUST, lambda value: value is None or is_whole(value, 0, MAX_SIZE)),
    f"is required: it {_SIZE_MUST}",
)
_VOLUME: Final = {"broker": _NAME, "dir": _NAME, "total_bytes": _SIZE, "available_bytes": _SIZE}
_OBSERVATION: Final = {
    "volumes": Rule(
        must(
            f"must be a list of at most {KNOWN_AT_MOST} volumes",
            lambda value: isinstance(value, list) and len(value) <= KNOWN_AT_MOST,
        ),
        "is required: a list of volumes, which may be empty",
    ),
    "complete": FLAG,
}
_DRILL: Final = {
    "factor": Rule(
        must(
            "must be a number from 0 to 1",
            lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1,
        )
    ),
    "for_ms": Rule(
        must(
            f"must be an integer from 1 to {MAX_DRILL_MS} (a year)",
            lambda value: is_whole(value, 1, MAX_DRILL_MS),
        )
    ),
}


def observation_of(body: Any) -> tuple[Observation, bool]:
    """Return the observation in a body, and whether the body says if it is complete.

    Raises:
        ProblemError: 422 that names every error.
    """
    errors = faults(body, 'must be an object: {"volumes": [VOLUME, ...], "complete": true}', _OBSERVATION)
    found: dict[tuple[str, str], Volume] = {}
    if isinstance(body, dict) and not _OBSERVATION["volumes"].fault(body.get("volumes")):
        for at, sent in enumerate(body["volumes"]):
            wrong = faults(sent, f"must be an object of {', '.join(_VOLUME)}", _VOLUME, "volumes", at)
            if not wrong:
                volume = Volume(**sent)
                wrong = [*_excess(volume, at)]
            if not wrong and found.setdefault(volume[:2], volume) is not volume:
                why = "is duplicated: name each directory of a broker once"
                wrong = [FieldError(pointer("volumes", at), why)]
            errors += wrong
        if not errors and not body["volumes"] and body.get("complete", False) is False:
            why = "must not be empty unless complete is true: then the cluster has no volumes"
            errors.append(FieldError("/volumes", why))
    if errors:
        raise unprocessable(*errors)
    volumes = tuple(found.values())
    answered = None if body.get("complete", False) else frozenset[str]()
    return Observation(volumes, answered), "complete" in body


def _excess(volume: Volume, at: int) -> Iterator[FieldError]:
    """The error of a volume that has more bytes available than it has."""
    total, available = volume.total_bytes, volume.available_bytes
    if total is not None and available is not None and available > total:
        yield FieldError(pointer("volumes", at, "available_bytes"), "must be at most total_bytes")


def drill_of(body: Any) -> tuple[float, int]:
    """Return the factor of a drill and its duration in milliseconds.

    Raises:
        ProblemError: 422 that names every error.
    """
    if errors := faults(body, 'must be an object: {"factor": 0.2, "for_ms": 600000}', _DRILL):
        raise unprocessable(*errors)
    return float(body["factor"]), int(body["for_ms"])
