"""The routes of API keys: list, create, rotate and revoke, for admins only."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

import structlog
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.catalog.errors import CatalogUnavailableError, KeyExistsError, KeyExpiredError, KeyNotFoundError
from app.catalog.keys import Key, Keys
from app.domain.binding import Binding
from app.domain.errors import EntityError
from app.domain.grant import BINDABLE, PERMISSIONS
from app.domain.quota import MAX_EXACT
from app.domain.quota_value import pointer
from app.http import keys_schema as schema
from app.http.access import ADMIN, Access
from app.http.admin import admin_router
from app.http.head import head_of
from app.http.problems import (
    MAX_ERRORS,
    FieldError,
    ProblemError,
    Rule,
    away,
    faults,
    is_whole,
    must,
    unprocessable,
)
from app.http.query import Parameters
from app.http.strict import JSON, answer, read_json

PATH: Final = "/v1/keys"
ROTATE: Final = "/v1/keys/{name}:rotate"
ONE: Final = "/v1/keys/{name}"

log = structlog.get_logger("quotagate.keys")


def router(keys: Keys, access: Access) -> APIRouter:
    """Return the routes; only the answers to creation and rotation hold a secret, and none holds a hash."""
    routes = admin_router("Keys", access)

    @routes.get(PATH, **schema.LIST)
    async def get_keys(request: Request) -> Response:
        Parameters(request.scope["query_string"]).check()
        async with _refusals():
            found = await keys.all()
        return _json(schema.KeyListBody([schema.KeyBody(**_fields(key)) for key in found]))

    @routes.post(PATH, **schema.CREATE)
    async def create_key(request: Request) -> Response:
        wanted = await read_json(request, JSON, of=wanted_of)
        Parameters(request.scope["query_string"]).check()
        async with _refusals():
            key, secret = await keys.create(*wanted, _now_ms())
        log.info("key created", key=key.name, scopes=key.scopes, who=access.who(head_of(request.scope)))
        return _json(schema.KeyOnceBody(**_fields(key), key=secret), 201)

    @routes.post(ROTATE, **schema.ROTATE)
    async def rotate_key(request: Request, name: str) -> Response:
        grace_ms = await read_json(request, JSON, of=_grace_ms) if _has_body(request) else 0
        Parameters(request.scope["query_string"]).check()
        async with _refusals():
            key, secret = await keys.rotate(name, grace_ms, _now_ms())
        log.info("key rotated", key=name, grace_ms=grace_ms, who=access.who(head_of(request.scope)))
        return _json(schema.KeyOnceBody(**_fields(key), key=secret))

    @routes.delete(ONE, **schema.REVOKE)
    async def revoke_key(request: Request, name: str) -> Response:
        Parameters(request.scope["query_string"]).check()
        who = access.who(head_of(request.scope))  # the request may revoke its own key
        async with _refusals():
            await keys.revoke(name)
        log.info("key revoked", key=name, who=who)
        return Response(status_code=204)

    return routes


def _name_fault(name: object) -> str | None:
    if name == ADMIN:
        return "must not be admin, the name of the admin key"
    valid = isinstance(name, str) and re.fullmatch(schema.NAME, name)
    return None if valid else schema.NAME_MUST


def _expiry_fault(expires_ms: object) -> str | None:
    """Return what is wrong with the instant at which a key expires; it may be in the past."""
    if not isinstance(expires_ms, int) or isinstance(expires_ms, bool):
        return "must be an instant in milliseconds, an integer"
    return None if 0 <= expires_ms <= MAX_EXACT else "must be from 0 to 2^53 - 1"


_KEY: Final = {
    "name": Rule(_name_fault),
    "scopes": Rule(
        must("must be a list of one scope or more", lambda scopes: isinstance(scopes, list) and scopes != [])
    ),
    "bound_to": Rule(
        must(
            f"must be a list of up to {schema.MAX_BOUND_TO} entities",
            lambda entities: isinstance(entities, list) and len(entities) <= schema.MAX_BOUND_TO,
        ),
        missing=None,
    ),
    "expires_ms": Rule(_expiry_fault, missing=None),
}


def wanted_of(body: Any) -> tuple[str, list[str], list[str], int | None]:
    """Return name, scopes, bounds and expiry of the key that a body asks for; null counts as missing.

    Raises:
        ProblemError: 422 that names every error.
    """
    if not isinstance(body, dict):
        raise unprocessable(FieldError("", "must be an object with name and scopes"))
    sent = {field: body[field] for field in _KEY if body.get(field) is not None}
    errors = _unknown(body, _KEY) + faults(sent, "", _KEY)
    wrong = {error.field for error in errors}
    scopes = [] if "/scopes" in wrong else _scopes(sent["scopes"], errors)
    bound_to = [] if "/bound_to" in wrong else _bound_to(sent.get("bound_to", []), errors)
    if bound_to and not BINDABLE.issuperset(scopes):
        allowed = " and ".join(scope for scope in PERMISSIONS if scope in BINDABLE)
        errors.append(
            FieldError("/bound_to", f"is valid with the scopes {allowed} only: the others name no entity")
        )
    if errors:
        raise unprocessable(*errors)
    return sent["name"], scopes, bound_to, sent.get("expires_ms")


def _unknown(body: dict[str, Any], known: Iterable[str]) -> list[FieldError]:
    return [FieldError(pointer(field), "is unknown") for field in body if field not in known]


def _scopes(scopes: list[Any], errors: list[FieldError]) -> list[str]:
    for place, scope in enumerate(scopes[:MAX_ERRORS]):  # longer lists have errors there
        if scope not in PERMISSIONS:
            errors.append(FieldError(f"/scopes/{place}", f"must be one of {', '.join(PERMISSIONS)}"))
        elif scope in scopes[:place]:
            errors.append(FieldError(f"/scopes/{place}", "is duplicated"))
    return [scope for scope in PERMISSIONS if scope in scopes]


def _bound_to(entities: list[Any], errors: list[FieldError]) -> list[str]:
    found: dict[str, None] = {}
    for place, spelled in enumerate(entities):
        try:
            found[str(Binding.parse(spelled if isinstance(spelled, str) else ""))] = None
        except EntityError as error:
            errors.append(FieldError(f"/bound_to/{place}", str(error)))
    return list(found)


def _grace_ms(body: Any) -> int:
    if not isinstance(body, dict):
        raise unprocessable(FieldError("", "must be an object, perhaps with grace_ms"))
    errors = _unknown(body, ("grace_ms",))
    grace_ms: int = body.get("grace_ms", 0)
    if not is_whole(grace_ms, 0, schema.MAX_GRACE_MS):
        errors.append(FieldError("/grace_ms", f"must be an integer from 0 to {schema.MAX_GRACE_MS}"))
    if errors:
        raise unprocessable(*errors)
    return grace_ms


def _has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


@asynccontextmanager
async def _refusals() -> AsyncIterator[None]:
    """Turn errors of the catalog into problems."""
    try:
        yield
    except KeyExistsError as taken:
        raise ProblemError(
            409, f"There is already a key named {taken}: revoke it, rotate it, or use another name."
        ) from None
    except KeyNotFoundError as missing:
        raise ProblemError(404, f"There is no key named {missing}.") from None
    except KeyExpiredError as expired:
        raise ProblemError(409, f"The key {expired} has expired: revoke it and create another.") from None
    except CatalogUnavailableError as error:
        raise away(schema.UNREACHABLE) from error


def _fields(key: Key) -> dict[str, Any]:
    """Return the fields of a key that may be shown."""
    return {field: getattr(key, field) for field in schema.KeyBody.__struct_fields__}


def _json(document: object, status: int = 200) -> Response:
    """Return an answer that no cache may keep, as it may hold a secret."""
    return answer(document, status, {"Cache-Control": "no-store"})
