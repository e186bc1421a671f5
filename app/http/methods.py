"""Paths that several routes share: which methods they take together."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send


def sharing(methods: Mapping[str, str]) -> type[APIRoute]:
    """Routes that know their path's methods: Starlette's own 405 allows those of one route only."""

    class OneOfSeveral(APIRoute):
        async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
            """Answer, or say which methods this path takes."""
            if scope["method"] not in (self.methods or ()):
                raise HTTPException(405, headers={"Allow": methods[self.path]})
            await super().handle(scope, receive, send)

    return OneOfSeveral
