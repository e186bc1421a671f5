"""Errors as ``application/problem+json`` (RFC 9457), which name fields by JSON pointer."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.responses import Response

from app.domain import quota_value

PROBLEM_JSON: Final = "application/problem+json"
_PHRASES: Final = {413: "Content Too Large", 414: "URI Too Long", 422: "Unprocessable Content"}
"""Status phrases of RFC 9110 that older Pythons have in an older wording."""


MAX_ERRORS: Final = quota_value.MAX_ERRORS
"""One answer names at most this many errors."""
MAX_TEXT: Final = 512
"""Longest field and message in bytes; longer ones are cut, since they may repeat the input."""


class FieldError(Struct, frozen=True):
    """An error of one field."""

    field: Annotated[
        str, Meta(description='A JSON pointer into the body, "" for all of it; /entity is the path.')
    ]
    message: Annotated[str, Meta(description="What is wrong, and what would be right.")]


class ProblemBody(Struct):
    """An error (RFC 9457)."""

    type: Annotated[str, Meta(description="The URI of this kind of error; about:blank for most.")]
    title: Annotated[str, Meta(description="The phrase of the status.")]
    status: Annotated[int, Meta(ge=400, le=599, description="The HTTP status.")]
    detail: Annotated[str, Meta(description="What is wrong, for people.")]
    errors: (
        Annotated[list[FieldError], Meta(description="With 422: what is wrong, by field.")] | UnsetType
    ) = UNSET


class ProblemError(Exception):
    """An answer that is an error: raised below a route, sent by the code that holds the connection.

    Args:
        wait_s: how long to delay the answer, to slow down callers that guess.
        type_: the URI of this kind of problem; most have none.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        errors: Sequence[FieldError] = (),
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
        type_: str = "about:blank",
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = shortened(detail)
        self.errors = tuple(
            FieldError(shortened(error.field), shortened(error.message)) for error in errors[:MAX_ERRORS]
        )
        self.headers: Mapping[str, str] = headers or {}
        self.wait_s = wait_s
        self.type = type_

    def __str__(self) -> str:
        fields = "".join(f"; {error.field}: {error.message}" for error in self.errors)
        return f"{self.status} {self.detail}{fields}"

    def structured(self) -> ProblemBody:
        """Return the problem as a body; without ``errors`` if no field is named."""
        title = _PHRASES.get(self.status) or HTTPStatus(self.status).phrase
        return ProblemBody(self.type, title, self.status, self.detail, [*self.errors] or UNSET)

    def document(self) -> dict[str, Any]:
        """Return the problem as a JSON object."""
        document: dict[str, Any] = msgspec.to_builtins(self.structured())
        return document

    def body(self) -> bytes:
        """Return the problem as bytes; a lone surrogate, which JSON cannot hold, becomes ``?``."""
        return json.dumps(self.document(), ensure_ascii=False, separators=(",", ":")).encode(errors="replace")

    def response(self) -> Response:
        """Return the problem as a Starlette response, which is also an ASGI application."""
        return Response(self.body(), self.status, dict(self.headers), PROBLEM_JSON)


def shortened(text: str) -> str:
    """Return a text of at most ``MAX_TEXT`` bytes; one that was cut ends in ``…``.

    >>> shortened("/principal"), len(shortened("x" * 1_000_000)), len(shortened("ü" * 1_000_000).encode())
    ('/principal', 510, 511)
    """
    sent = text[: MAX_TEXT + 1].encode(errors="replace")
    if len(sent) <= MAX_TEXT:
        return text
    return sent[: MAX_TEXT - 3].decode(errors="ignore") + "…"


OVERLOADED: Final = "urn:quotagate:overloaded"
RETRY_MS: Final = (1_000, 3_000)
"""Callers that were shed may retry after this long; a range, so that they do not all retry at once."""


def retry_ms() -> int:
    """Return how long a caller that was shed must wait."""
    return random.randint(*RETRY_MS)  # noqa: S311  not a secret


def overloaded(wait_ms: int) -> ProblemError:
    """Return the 503 for a request that was shed."""
    detail = "The node is overloaded; nothing was charged."
    return ProblemError(503, detail, headers={"Retry-After": str(round(wait_ms / 1000))}, type_=OVERLOADED)


def away(detail: str) -> ProblemError:
    """Return the 503 for a store or catalog that is unreachable and may be back in a second."""
    return ProblemError(503, detail, headers={"Retry-After": "1"})


def unprocessable(*errors: FieldError) -> ProblemError:
    """Return the 422 that names these fields."""
    return ProblemError(422, "The request is invalid: see errors.", errors)
