"""Static content, made once and kept as bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from hashlib import sha256
from typing import Final

from starlette.types import Receive, Scope, Send

from app.http.problems import ProblemError
from app.http.server.hot import HttpAnswer, refuse

AT_ONCE: Final = 4
"""The most large answers in one iteration of the event loop, since decisions wait for them."""


class IterationLimit:
    """Lets a few callers pass in each iteration of the event loop; the others pass in later ones, in order.

    Callers hold no place: one that does not read its answer does not block others.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._places = asyncio.Semaphore(at_once)

    async def wait(self) -> None:
        """Wait for a place in this iteration or a later one."""
        await self._places.acquire()
        asyncio.get_running_loop().call_soon(self._places.release)


class StaticPage:
    """A path that answers GET and HEAD with the same bytes, or with 304.

    Args:
        body: the content.
        media_type: for ``Content-Type``.
        headers: further headers.
    """

    def __init__(self, body: bytes, media_type: str, headers: Mapping[str, str] | None = None) -> None:
        self.body = body
        self._etag = b'"%s"' % sha256(body).hexdigest()[:32].encode()
        fields = {
            "etag": self._etag.decode(),
            "cache-control": "no-cache",  # caches must revalidate it with its tag
            "x-content-type-options": "nosniff",
            **(headers or {}),
        }
        self._unchanged = [(name.lower().encode(), value.encode()) for name, value in fields.items()]
        self._headers = [
            *self._unchanged,
            (b"content-type", media_type.encode()),
            (b"content-length", b"%d" % len(body)),
        ]

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        try:
            answer = self.answer(scope)
        except ProblemError as problem:
            await refuse(problem, scope, send)
            return
        await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
        await send({"type": "http.response.body", "body": answer.body})

    def answer(self, scope: Scope) -> HttpAnswer:
        """Return the answer, which is 304 if the client has these bytes already.

        Raises:
            ProblemError: 405 for methods other than GET and HEAD.
        """
        if scope["method"] not in ("GET", "HEAD"):
            raise ProblemError(
                405, f"This path does not take {scope['method']}.", headers={"Allow": "GET, HEAD"}
            )
        for name, value in scope["headers"]:
            if name == b"if-none-match" and self._is_among(value):
                return HttpAnswer(304, [*self._unchanged], b"")
        return HttpAnswer(200, [*self._headers], self.body)

    def _is_among(self, tags: bytes) -> bool:
        return tags.strip() == b"*" or self._etag in (
            tag.strip().removeprefix(b"W/") for tag in tags.split(b",")
        )


class Redirect(StaticPage):
    """A path that leads to another one, which must be relative: a proxy may have removed a prefix."""

    def __init__(self, place: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(b"", "text/plain; charset=utf-8", {"Location": place, **(headers or {})})

    def answer(self, scope: Scope) -> HttpAnswer:
        """Return the redirect.

        Raises:
            ProblemError: 405 for methods other than GET and HEAD.
        """
        found = super().answer(scope)
        return HttpAnswer(302, found.headers, b"")
