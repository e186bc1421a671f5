"""The errors between an ask and the work.

QuotagateError
├── Unreachable       no answer; whether the ask was charged is unknown, unless nothing was sent
├── Problem           an answer that is an error: `status`, `detail`, and `errors` by field
│   └── Overloaded        Quotagate is overloaded; nothing was charged: `retry_after_s`
├── NotUnderstood     an answer that is not from Quotagate
├── BatchCutShort     some parts of a batch were decided, the next one failed
└── NotAdmitted       the decision says no
    ├── Rejected          and the same ask will never be admitted
    └── DeadlinePassed    and the wait would end after the deadline
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import httpx

if TYPE_CHECKING:
    from quotagate_client.results import Decision


OVERLOADED: Final = "urn:quotagate:overloaded"
"""The type of the problem of an ask that was shed."""
RETRY_AFTER_S: Final = 1.0
"""The wait if such a problem does not give one."""


@dataclass(frozen=True, slots=True)
class FieldError:
    """An error in one field: a JSON pointer into the body (``""`` is all of it) and a message."""

    field: str
    message: str


class QuotagateError(Exception):
    """The base of all errors of this package."""


class Unreachable(QuotagateError):
    """There was no answer; ``maybe_charged`` says whether the ask may still have been decided."""

    def __init__(self, error: httpx.RequestError, *, maybe_charged: bool) -> None:
        super().__init__(f"no answer: {error!r}")
        self.maybe_charged = maybe_charged


class Problem(QuotagateError):
    """An answer that is an error (RFC 9457); the request changed nothing."""

    def __init__(self, status: int, title: str, detail: str, errors: Sequence[FieldError] = ()) -> None:
        fields = "".join(f"; {error.field}: {error.message}" for error in errors)
        super().__init__(f"{status} {title}: {detail}{fields}")
        self.status = status
        self.title = title
        self.detail = detail
        self.errors = tuple(errors)


class Overloaded(Problem):
    """Quotagate is overloaded; nothing was charged.

    Attributes:
        retry_after_s: when to ask again, in seconds.
    """

    def __init__(
        self, status: int, title: str, detail: str, errors: Sequence[FieldError] = (), *, retry_after_s: float
    ) -> None:
        super().__init__(status, title, detail, errors)
        self.retry_after_s = retry_after_s


class NotUnderstood(QuotagateError):
    """An answer with a good status that is not from Quotagate, for instance a proxy's own page."""

    def __init__(self, answer: httpx.Response, why: str) -> None:
        super().__init__(f"{answer.status_code} from {answer.url}, but {why}: {answer.text[:200]!r}")


class BatchCutShort(QuotagateError):
    """A batch larger than one call: ``decided`` has the answers to its first asks.

    The cause is the error of the call that failed; later calls were not sent.
    """

    def __init__(self, decided: Sequence[Decision], cause: QuotagateError) -> None:
        super().__init__(f"after {len(decided)} decisions: {cause}")
        self.decided = tuple(decided)


class NotAdmitted(QuotagateError):
    """The work may not be done, now or at all."""

    def __init__(self, decision: Decision) -> None:
        by = decision.limited_by
        named = f" by {by.quota} of {by.entity}" if by else ""
        super().__init__(f"{decision.decision} for {decision.throttle_ms} ms{named}")
        self.decision = decision


class Rejected(NotAdmitted):
    """The same ask will never be admitted."""


class DeadlinePassed(NotAdmitted):
    """The ask would be admitted, but later than the caller wants to wait."""


def overloaded_for_s(answer: httpx.Response) -> float | None:
    """Return the seconds after which to ask an overloaded Quotagate again; None if it is not overloaded."""
    if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
        return None
    try:
        if answer.json()["type"] != OVERLOADED:
            return None
    except (KeyError, TypeError, ValueError):  # a balancer's own page
        return None
    after = answer.headers.get("Retry-After", "")
    return float(after) if after.isdecimal() else RETRY_AFTER_S


def problem(answer: httpx.Response, first: int = 0) -> Problem:
    """Return the problem in an answer; ``first`` is the place of the call's first ask in the whole batch."""
    try:
        body: Any = answer.json()
        errors = [FieldError(error["field"], error["message"]) for error in body.get("errors", ())]
        if (after_s := overloaded_for_s(answer)) is not None:
            return Overloaded(
                answer.status_code, body["title"], body.get("detail", ""), errors, retry_after_s=after_s
            )
        said = Problem(answer.status_code, body["title"], body["detail"], errors)
    except (KeyError, TypeError, ValueError, AttributeError):  # a balancer's own page
        statuses = {status.value: status.phrase for status in HTTPStatus}
        title = statuses.get(answer.status_code, "Unknown")
        return Problem(answer.status_code, title, answer.text[:200])
    moved = [FieldError(_moved(error.field, first), error.message) for error in said.errors]
    return Problem(said.status, said.title, said.detail, moved)


def _moved(field: str, first: int) -> str:
    head, asks, rest = field.partition("/asks/")
    place, slash, name = rest.partition("/")
    if head or not asks or not place.isdigit():
        return field
    return f"/asks/{int(place) + first}{slash}{name}"
