"""The routes of API keys: list, create, rotate and revoke, for admins only."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

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
from app.http.methods import sharing
from app.http.problems import FieldError, ProblemError, away, unprocessable
from app.http.strict import JSON, answer, read_json

PATH: Final = "/v1/keys"
ROTATE: Final = "/v1/keys/{name}:rotate"
ONE: Final = "/v1/keys/{name}"
METHODS: Final = {PATH: "GET, POST", ROTATE: "POST", ONE: "DELETE"}

log = structlog.get_logger("quotagate.keys")


class KeyRequest(NamedTuple):
    """The key that a request asks for."""

    name: str
    scopes: list[str]
    bound_to: list[str]
    expires_ms: int | None


def router(keys: Keys, access: Access) -> APIRouter:
    """Return the routes; only the answers to creation and rotation hold a secret, and none holds a hash."""
    routes = APIRouter(tags=["Keys"], default_response_class=Response, route_class=sharing(METHODS))

    @routes.get(PATH, **schema.LIST)
    async def get_keys(request: Request) -> Response:
        access.require(request.scope, "admin")
        async with _refusals():
            found = await keys.all()
        return _json(schema.KeyListBody([schema.KeyBody(**_fields(key)) for key in found]))

    @routes.post(PATH, **schema.CREATE)
    async def create_key(request: Request) -> Response:
        access.require(request.scope, "admin")
        wanted = wanted_of(await read_json(request, JSON))
        async with _refusals():
            key, secret = await keys.create(*wanted, _now_ms())
        log.info("key created", key=key.name, scopes=key.scopes, who=access.who(request.scope))
        return _json(schema.KeyOnceBody(**_fields(key), key=secret), 201)

    @routes.post(ROTATE, **schema.ROTATE)
    async def rotate_key(request: Request, name: str) -> Response:
        access.require(request.scope, "admin")
        grace_ms = _grace_ms(await read_json(request, JSON) if _has_body(request) else {})
        async with _refusals():
            key, secret = await keys.rotate(name, grace_ms, _now_ms())
        log.info("key rotated", key=name, grace_ms=grace_ms, who=access.who(request.scope))
        return _json(schema.KeyOnceBody(**_fields(key), key=secret))

    @routes.delete(ONE, **schema.REVOKE)
    async def revoke_key(request: Request, name: str) -> Response:
        access.require(request.scope, "admin")
        who = access.who(request.scope)  # the request may revoke its own key
        async with _refusals():
            await keys.revoke(name)
        log.info("key revoked", key=name, who=who)
        return Response(status_code=204)

    return routes


def wanted_of(body: Any) -> KeyRequest:
    """Return the key that a body asks for.

    Raises:
        ProblemError: 422 that names every error.
    """
    if not isinstance(body, dict):
        raise unprocessable(FieldError("", "must be an object with name and scopes"))
    errors = [*_unknown(body, KeyRequest._fields)]
    wanted = KeyRequest(
        _name(body.get("name"), errors),
        _scopes(body.get("scopes"), errors),
        _bound_to(body.get("bound_to"), errors),
        _expires_ms(body.get("expires_ms"), errors),
    )
    if wanted.bound_to and not BINDABLE.issuperset(wanted.scopes):
        allowed = " and ".join(scope for scope in PERMISSIONS if scope in BINDABLE)
        errors.append(
            FieldError("/bound_to", f"is valid with the scopes {allowed} only: the others name no entity")
        )
    if errors:
        raise unprocessable(*errors)
    return wanted


def _unknown(body: dict[str, Any], known: Iterable[str]) -> list[FieldError]:
    return [FieldError(pointer(field), "is unknown") for field in body if field not in known]


def _name(name: object, errors: list[FieldError]) -> str:
    if name is None:
        errors.append(FieldError("/name", "is required"))
    elif not isinstance(name, str) or not re.fullmatch(schema.NAME, name):
        errors.append(FieldError("/name", schema.NAME_MUST))
    elif name == ADMIN:
        errors.append(FieldError("/name", "must not be admin, the name of the admin key"))
    return str(name)


def _scopes(scopes: object, errors: list[FieldError]) -> list[str]:
    if not isinstance(scopes, list) or not scopes:
        message = "is required" if scopes is None else "must be a list of one scope or more"
        errors.append(FieldError("/scopes", message))
        return []
    for place, scope in enumerate(scopes):
        if scope not in PERMISSIONS:
            errors.append(FieldError(f"/scopes/{place}", f"must be one of {', '.join(PERMISSIONS)}"))
        elif scope in scopes[:place]:
            errors.append(FieldError(f"/scopes/{place}", "is duplicated"))
    return [scope for scope in PERMISSIONS if scope in scopes]


def _bound_to(entities: object, errors: list[FieldError]) -> list[str]:
    if entities is None:
        return []
    if not isinstance(entities, list) or len(entities) > schema.MAX_BOUND_TO:
        errors.append(FieldError("/bound_to", f"must be a list of up to {schema.MAX_BOUND_TO} entities"))
        return []
    found = []
    for place, spelled in enumerate(entities):
        try:
            found.append(str(Binding.parse(spelled if isinstance(spelled, str) else "")))
        except EntityError as error:
            errors.append(FieldError(f"/bound_to/{place}", str(error)))
    return list(dict.fromkeys(found))


def _expires_ms(expires_ms: object, errors: list[FieldError]) -> int | None:
    """Return the instant at which the key expires, which may be in the past."""
    if expires_ms is None:
        return None
    if not isinstance(expires_ms, int) or isinstance(expires_ms, bool):
        errors.append(FieldError("/expires_ms", "must be an instant in milliseconds, an integer"))
    elif not 0 <= expires_ms <= MAX_EXACT:
        errors.append(FieldError("/expires_ms", "must be from 0 to 2^53 - 1"))
    else:
        return expires_ms
    return None


def _grace_ms(body: Any) -> int:
    if not isinstance(body, dict):
        raise unprocessable(FieldError("", "must be an object, perhaps with grace_ms"))
    errors = _unknown(body, ("grace_ms",))
    grace_ms = body.get("grace_ms", 0)
    whole = isinstance(grace_ms, int) and not isinstance(grace_ms, bool)
    if not whole or not 0 <= grace_ms <= schema.MAX_GRACE_MS:
        errors.append(FieldError("/grace_ms", f"must be an integer from 0 to {schema.MAX_GRACE_MS}"))
    if errors:
        raise unprocessable(*errors)
    return int(grace_ms)


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
