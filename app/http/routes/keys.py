"""The routes of API keys: list, create, rotate and revoke, for admins only."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import structlog
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.catalog.errors import CatalogUnavailableError, KeyExistsError, KeyExpiredError, KeyNotFoundError
from app.catalog.keys import Key, Keys
from app.domain.binding import Binding
from app.domain.grant import BINDABLE, PERMISSIONS
from app.http.access.access import Access
from app.http.head import head_of
from app.http.openapi import keys as schema
from app.http.problems import (
    MAX_ERRORS,
    FieldError,
    ProblemError,
    away,
    unprocessable,
)
from app.http.query import Parameters
from app.http.routes.admin import admin_router
from app.http.strict import answer, read_struct

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
        wanted = await read_struct(request, schema.NewKeyBody, wanted_of)
        Parameters(request.scope["query_string"]).check()
        async with _refusals():
            key, secret = await keys.create(*wanted, _now_ms())
        log.info("key created", key=key.name, scopes=key.scopes, who=access.who(head_of(request.scope)))
        return _json(schema.KeyOnceBody(**_fields(key), key=secret), 201)

    @routes.post(ROTATE, **schema.ROTATE)
    async def rotate_key(request: Request, name: str) -> Response:
        grace_ms = schema.RotationBody().grace_ms
        if _has_body(request):
            grace_ms = await read_struct(request, schema.RotationBody, lambda sent: sent.grace_ms)
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


def wanted_of(sent: schema.NewKeyBody) -> tuple[str, list[str], list[str], int | None]:
    """Return name, scopes, bounds and expiry of the key that a body asks for.

    Raises:
        ProblemError: 422 that names every error which the types do not show.
    """
    errors = [
        FieldError(f"/scopes/{place}", "is duplicated")
        for place, scope in enumerate(sent.scopes[:MAX_ERRORS])  # longer lists have duplicates there
        if scope in sent.scopes[:place]
    ]
    bound_to = dict.fromkeys(str(Binding.parse(spelled)) for spelled in sent.bound_to or ())
    if bound_to and not BINDABLE.issuperset(sent.scopes):
        allowed = " and ".join(scope for scope in PERMISSIONS if scope in BINDABLE)
        errors.append(
            FieldError("/bound_to", f"is valid with the scopes {allowed} only: the others name no entity")
        )
    if errors:
        raise unprocessable(*errors)
    return sent.name, [each for each in PERMISSIONS if each in sent.scopes], [*bound_to], sent.expires_ms


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
