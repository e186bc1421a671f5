"""Paths with several routes, and the methods of all of them."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send


def sharing(methods: Mapping[str, str]) -> type[APIRoute]:
    """Return a route class whose 405 lists all methods of the path; Starlette's lists those of one route."""

    class OneOfSeveral(APIRoute):
        async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
            """Answer, or refuse with the methods that this path takes."""
            if scope["method"] not in (self.methods or ()):
                raise HTTPException(405, headers={"Allow": methods[self.path]})
            await super().handle(scope, receive, send)

    return OneOfSeveral
