"""Shared by the quota routes: conditions, the origin of a change, and problems."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Literal

from starlette.requests import Request
from starlette.responses import Response

from app.catalog.catalog import Conditions, QuotaSet
from app.catalog.errors import CatalogUnavailableError, PreconditionError, QuotasNotFoundError
from app.catalog.sql import Origin
from app.domain.entity import has_control_characters
from app.domain.errors import QuotaValueError
from app.domain.quota_value import bound
from app.http.access.access import Access
from app.http.head import head_of
from app.http.openapi.quotas import AWAY, EntityQuotasBody
from app.http.problems import FieldError, ProblemError, unprocessable

MAX_REASON: Final = 1_024
"""The longest reason of a change, in bytes."""
_TAG: Final = re.compile(r'(W/)?"([!\x23-\x7e\x80-\xff]*)"')
_VERSION: Final = re.compile("0|[1-9][0-9]{0,18}")


def conditions_of(request: Request) -> Conditions:
    """Return the versions that a request names in If-Match and If-None-Match."""
    return Conditions(
        _versions(request, "if-match", weak=False), _versions(request, "if-none-match", weak=True)
    )


def unchanged(request: Request, version: int, what: str) -> Response | None:
    """Return the 304 for a client that has this version already; None if it does not.

    Raises:
        ProblemError: 412 for a client that asks for another version.
    """
    conditions = conditions_of(request)
    if not Conditions(match=conditions.match).are_met(version):
        raise stale(f"{what} is at version {version}")
    if conditions.are_met(version):
        return None
    return Response(status_code=304, headers={"ETag": etag(version)})


def etag(version: int) -> str:
    """Return the strong ETag of a version."""
    return f'"{version}"'


def origin_of(request: Request, access: Access) -> Origin:
    """Return the origin of a change: the key, the time and the reason.

    Raises:
        ProblemError: 422 for a reason that is too long, is not UTF-8, or has control characters.
    """
    sent = request.headers.get("x-reason", "").strip().encode("latin-1")
    now_ms = time.time_ns() // 1_000_000
    return Origin(access.who(head_of(request.scope)), now_ms, _reason(sent) or None)


def _reason(sent: bytes) -> str:
    if len(sent) > MAX_REASON:
        raise unprocessable(FieldError("X-Reason", f"must be at most {MAX_REASON:,} bytes of UTF-8"))
    try:
        reason = sent.decode()
    except UnicodeDecodeError:
        raise unprocessable(FieldError("X-Reason", "must be UTF-8")) from None
    if has_control_characters(reason):
        raise unprocessable(FieldError("X-Reason", "must not have control characters"))
    return reason


def body_of(found: QuotaSet) -> EntityQuotasBody:
    """Return the quotas of an entity as a body."""
    bounds = {key: bound(quota) for key, quota in found.quotas.items()}
    return EntityQuotasBody(str(found.entity), dict(found.definitions), bounds, found.version)


@asynccontextmanager
async def refusals() -> AsyncIterator[None]:
    """Turn errors of the catalog into problems."""
    try:
        yield
    except QuotaValueError as wrong:
        raise unprocessable(*(FieldError(field, message) for field, message in wrong.errors)) from None
    except QuotasNotFoundError as none:
        raise absent(str(none)) from None
    except PreconditionError as condition:
        raise stale(str(condition)) from None
    except CatalogUnavailableError as error:
        raise ProblemError(AWAY.status, AWAY.detail, headers=AWAY.headers) from error


def absent(detail: str) -> ProblemError:
    """Return the 404 for quotas that do not exist."""
    return ProblemError(404, f"{detail[0].upper()}{detail[1:]}.")


def stale(detail: str) -> ProblemError:
    """Return the 412 for a version that does not match."""
    return ProblemError(412, f"A condition does not hold: {detail}.")


def _versions(request: Request, name: str, *, weak: bool) -> frozenset[int] | Literal["*"] | None:
    """Return the versions that a condition names; anything that is not a quoted ETag names none.

    If-Match compares strongly, so a weak ETag matches nothing.
    """
    lines = request.headers.getlist(name)
    if not lines:
        return None
    text = ",".join(lines).strip()
    if text == "*":
        return "*"
    tags = (tag for strength, tag in _TAG.findall(text) if weak or not strength)
    return frozenset(int(tag) for tag in tags if _VERSION.fullmatch(tag))
