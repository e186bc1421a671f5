"""The check, as gateways call it: the ask in headers and query, the decision in status and headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import httpx

from quotagate_client.results import Decision, one

REFUSED: Final = 429
"""The status to ask for; 403 would look like a key that lacks a scope."""


@dataclass(frozen=True, slots=True)
class CheckHeaders:
    """The headers that name the caller; the service's ``QUOTAGATE_CHECK_*_HEADER`` settings."""

    principal: str = "X-Quotagate-Principal"
    client_id: str = "X-Quotagate-Client-Id"
    ip: str = "X-Quotagate-IP"

    def of(self, principal: str | None, client_id: str | None, ip: str | None) -> dict[bytes, bytes]:
        """Return the headers of one check, in UTF-8."""
        said = {self.principal: principal, self.client_id: client_id, self.ip: ip}
        return {name.encode(): value.encode() for name, value in said.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Check:
    """A decision, with the headers that a gateway passes on to its own client.

    Attributes:
        headers: ``Retry-After``, ``RateLimit`` and ``RateLimit-Policy``, if the answer has them.
    """

    decision: Decision
    headers: Mapping[str, str]

    @property
    def admitted(self) -> bool:
        """Whether the request may go on."""
        return self.decision.may_go_ahead


def read(answer: httpx.Response) -> Check:
    """Return the check in an answer of 200 or 429."""
    passed_on = ("Retry-After", "RateLimit", "RateLimit-Policy")
    return Check(one(answer), {name: answer.headers[name] for name in passed_on if name in answer.headers})
