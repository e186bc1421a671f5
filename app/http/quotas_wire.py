"""What the routes of quotas have in common: conditions, who changes something and why, and refusals."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Literal

from starlette.requests import Request

from app.catalog.catalog import Absent, Conditions, QuotaSet, Stale
from app.catalog.port import CatalogAway
from app.catalog.sql import Origin
from app.domain.quota_value import ValueErrors, bound
from app.http.access import Access
from app.http.problems import FieldError, Problem, away, unprocessable

_TAG: Final = re.compile(r'(W/)?"([!\x23-\x7e\x80-\xff]*)"')
_VERSION: Final = re.compile("0|[1-9][0-9]{0,18}")


def conditions_of(request: Request) -> Conditions:
    """The versions that a request names in If-Match and If-None-Match."""
    return Conditions(
        _versions(request, "if-match", weak=False), _versions(request, "if-none-match", weak=True)
    )


def etag(version: int) -> str:
    """The strong ETag of a version."""
    return f'"{version}"'


def origin_of(request: Request, access: Access) -> Origin:
    """Who changes something, when, and why."""
    reason = request.headers.get("x-reason", "").strip().encode("latin-1")
    now_ms = time.time_ns() // 1_000_000
    return Origin(access.who(request.scope), now_ms, reason.decode("utf-8", "replace") or None)


def document_of(found: QuotaSet) -> dict[str, object]:
    """What is set on an entity, as it is shown."""
    return {
        "entity": str(found.entity),
        "quotas": dict(found.definitions),
        "bounds": {key: bound(quota) for key, quota in found.quotas.items()},
        "version": found.version,
    }


@asynccontextmanager
async def refusals() -> AsyncIterator[None]:
    """What the catalog refuses, as problems."""
    try:
        yield
    except ValueErrors as wrong:
        raise unprocessable(*(FieldError(field, message) for field, message in wrong.errors)) from None
    except Absent as none:
        raise absent(str(none)) from None
    except Stale as condition:
        raise stale(str(condition)) from None
    except CatalogAway as error:
        raise away("The catalog is out of reach; the last quotas read from it stay in force.") from error


def absent(detail: str) -> Problem:
    """404, for there are no such quotas."""
    return Problem(404, f"{detail[0].upper()}{detail[1:]}.")


def stale(detail: str) -> Problem:
    """412, for something is at another version."""
    return Problem(412, f"A condition does not hold: {detail}.")


def _versions(request: Request, name: str, *, weak: bool) -> frozenset[int] | Literal["*"] | None:
    """The versions that a condition names; what is no ETag in quotes, as ours are, names none.

    If-Match compares strongly: a weak ETag matches nothing there.
    """
    lines = request.headers.getlist(name)
    if not lines:
        return None
    text = ",".join(lines).strip()
    if text == "*":
        return "*"
    tags = (tag for strength, tag in _TAG.findall(text) if weak or not strength)
    return frozenset(int(tag) for tag in tags if _VERSION.fullmatch(tag))
