"""Routers of administration: each route demands its scope first, and a 405 lists all methods of its path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import APIRouter, Depends
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.http.access.access import Access, scope_of
from app.http.head import head_of
from app.http.problems import away
from app.store.port import StoreError


class AdminRoute(APIRoute):
    """A route whose 405 lists all methods of the path; Starlette lists the methods of one route only."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse with the methods that this path takes."""
        if scope["method"] not in (self.methods or ()):
            known = (context.original_route for context in iter_route_contexts(scope["app"].routes))
            same = (route for route in known if isinstance(route, APIRoute) and route.path == self.path)
            allowed = sorted(method for route in same for method in route.methods or ())
            raise HTTPException(405, headers={"Allow": ", ".join(allowed)})
        await super().handle(scope, receive, send)


def admin_router(tag: str, access: Access) -> APIRouter:
    """Return a router whose routes need the scope that ``scope_of`` names.

    ``Front`` requires this scope before a request is routed. The check here also protects a router without
    ``Front``.
    """

    async def guard(request: Request) -> None:
        access.require(head_of(request.scope), scope_of(request.method, request.scope["path"]))

    return APIRouter(
        tags=[tag], default_response_class=Response, route_class=AdminRoute, dependencies=[Depends(guard)]
    )


@contextmanager
def needing_store(detail: str) -> Iterator[None]:
    """Turn an error of the store into a 503, whose ``detail`` has a place for the ``{reason}``."""
    try:
        yield
    except StoreError as error:
        raise away(detail.format(reason=error.reason)) from error
