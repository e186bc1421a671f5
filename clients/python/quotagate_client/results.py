"""The answers of Quotagate, as frozen values; unknown fields are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypeVar, cast, get_args

import httpx

from quotagate_client.errors import NotUnderstood

Outcome = Literal["admit", "delay", "throttle", "reject"]
_OUTCOMES: Final[dict[str, Outcome]] = {outcome: outcome for outcome in get_args(Outcome)}


@dataclass(frozen=True, slots=True)
class LimitedBy:
    """The quota that decided, or ``throttle_factor``.

    Attributes:
        reason: None if the rate itself decided; else ``capacity``, ``too_large``, ``store_failure`` or
            ``store_full``.
        largest: with ``too_large``, the largest usage that could ever pass.
    """

    quota: str
    entity: str | None
    bucket: str | None
    reason: str | None = None
    largest: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision of one quota, as if it were the only one; unknown numbers are None."""

    quota: str
    entity: str
    bucket: str
    limit: float
    verdict: Outcome
    throttle_ms: int
    observed: float | None
    remaining: float | None
    enforcement: Literal["deny", "delay"]
    shadow: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer to an ask; ``quotas`` only with ``detail``."""

    decision: Outcome
    throttle_ms: int
    charged: bool
    applied: int
    source: Literal["store", "local", "fallback"]
    limited_by: LimitedBy | None = None
    quotas: tuple[Verdict, ...] = ()

    @property
    def may_go_ahead(self) -> bool:
        """Whether to do the work; with a delay, the work's answer is held for ``throttle_ms``."""
        return self.decision in ("admit", "delay")


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to an ask for a lease.

    Attributes:
        lease: the name of the lease; None if nothing was granted.
        granted: by usage field; empty if nothing was granted.
        decision: the decision on the wish.
    """

    lease: str | None
    granted: Mapping[str, float]
    lease_ms: int
    renew_ms: int
    decision: Decision


T = TypeVar("T", LimitedBy, Verdict)


def one(answer: httpx.Response) -> Decision:
    """Return the decision in an answer."""
    return _decision(answer, _json(answer))


def many(answer: httpx.Response, asked: int) -> list[Decision]:
    """Return the decisions, one for each ask that was sent."""
    body = _json(answer)
    found = body.get("decisions") if isinstance(body, dict) else None
    if not isinstance(found, list) or len(found) != asked:
        raise NotUnderstood(answer, f"these are not {asked} decisions")
    return [_decision(answer, decision) for decision in found]


def grant(answer: httpx.Response) -> Grant:
    """Return the lease in an answer."""
    found: Any = _json(answer)
    try:
        held = found["lease"] is not None
        decision = _decision(answer, {**found, "charged": False, "applied": 0})
        return Grant(
            found["lease"], found["granted"] if held else {}, found["lease_ms"], found["renew_ms"], decision
        )
    except (KeyError, TypeError) as error:
        raise NotUnderstood(answer, "this is no answer on a lease") from error


def _json(answer: httpx.Response) -> object:
    try:
        return cast("object", answer.json())
    except ValueError as error:
        raise NotUnderstood(answer, "this is not JSON") from error


def _decision(answer: httpx.Response, found: Any) -> Decision:
    try:
        limited_by = found["limited_by"]
        return Decision(
            decision=_OUTCOMES[found["decision"]],
            throttle_ms=max(0, int(found["throttle_ms"])),
            charged=found["charged"],
            applied=found["applied"],
            source=found["source"],
            limited_by=None if limited_by is None else _known(LimitedBy, limited_by),
            quotas=tuple(_known(Verdict, quota) for quota in found.get("quotas", ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NotUnderstood(answer, "this is not a decision") from error


def _known(kind: type[T], found: dict[str, Any]) -> T:
    names = [field.name for field in fields(kind)]
    return kind(**{name: found[name] for name in names if name in found})
