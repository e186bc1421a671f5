"""Errors on the wire: ``application/problem+json`` as RFC 9457 has it, naming fields by JSON pointer."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Final

from starlette.responses import Response

from app.domain import quota_value
from app.domain.quota_value import pointer

PROBLEM_JSON: Final = "application/problem+json"
_PHRASES: Final = {413: "Content Too Large", 422: "Unprocessable Content"}
"""RFC 9110's phrases, where older Pythons know older ones."""


MAX_ERRORS: Final = quota_value.MAX_ERRORS
"""Errors that one answer names; who sends more of them learns of the rest afterwards."""
MAX_TEXT: Final = 512
"""Bytes of a field and of a message; what was sent and is told back is cut there."""


@dataclass(frozen=True, slots=True)
class FieldError:
    """What is wrong with one field: ``field`` is a JSON pointer into the body, ``""`` the whole of it."""

    field: str
    message: str


class Problem(Exception):
    """An answer that is an error; raised anywhere below a route, sent by whoever holds the connection.

    Args:
        wait_s: how long the answer is held back, to slow down whoever tries.
        type_: the URI that names this kind of problem; most need none.
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

    def document(self) -> dict[str, object]:
        """The problem as a JSON object; ``errors`` is there when fields are named."""
        title = _PHRASES.get(self.status) or HTTPStatus(self.status).phrase
        document = {"type": self.type, "title": title, "status": self.status, "detail": self.detail}
        return document | ({"errors": [asdict(error) for error in self.errors]} if self.errors else {})

    def body(self) -> bytes:
        """The problem as bytes; a lone surrogate in a message, which JSON cannot hold, becomes ``?``."""
        return json.dumps(self.document(), ensure_ascii=False, separators=(",", ":")).encode(errors="replace")

    def response(self) -> Response:
        """The problem as a Starlette response, which is also an ASGI application."""
        return Response(self.body(), self.status, dict(self.headers), PROBLEM_JSON)


def shortened(text: str) -> str:
    """A text within bounds, which ends in ``…`` where something was cut off.

    >>> shortened("/principal"), len(shortened("x" * 1_000_000)), len(shortened("ü" * 1_000_000).encode())
    ('/principal', 510, 511)
    """
    sent = text[: MAX_TEXT + 1].encode(errors="replace")
    if len(sent) <= MAX_TEXT:
        return text
    return sent[: MAX_TEXT - 3].decode(errors="ignore") + "…"


OVERLOADED: Final = "urn:quotagate:overloaded"
RETRY_MS: Final = (1_000, 3_000)
"""When who was shed may come again; spread, so that not all of them come at once."""


def retry_ms() -> int:
    """How long one who was shed is to wait."""
    return random.randint(*RETRY_MS)  # noqa: S311  nothing is secret about it


def overloaded(wait_ms: int) -> Problem:
    """503, for a request that was not taken in."""
    detail = "The node has more to do than it can answer in time; nothing was charged."
    return Problem(503, detail, headers={"Retry-After": str(round(wait_ms / 1000))}, type_=OVERLOADED)


def away(detail: str) -> Problem:
    """503, for what stands behind a route is out of reach and may be back in a second."""
    return Problem(503, detail, headers={"Retry-After": "1"})


def unknown(sent: Iterable[str], known: Sequence[str], *at: str | int) -> list[FieldError]:
    """The fields of an object, found at a place, that nobody knows."""
    use = ", ".join(known)
    return [FieldError(pointer(*at, name), f"is unknown: use {use}") for name in sent if name not in known]


def unprocessable(*errors: FieldError) -> Problem:
    """422 for these fields."""
    return Problem(422, "The body cannot be used as it is: see errors.", errors)
