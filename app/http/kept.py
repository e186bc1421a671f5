"""What is the same for everybody, made once and kept as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from starlette.types import Receive, Scope, Send

from app.http.decisions import Answer, refuse
from app.http.problems import Problem


class Kept:
    """A path that answers GET and HEAD with the same bytes, or says that they have not changed.

    Args:
        body: what is answered.
        media_type: as ``Content-Type`` has it.
        headers: what stands in the answer beside it.
    """

    def __init__(self, body: bytes, media_type: str, headers: Mapping[str, str] | None = None) -> None:
        self.body = body
        self._etag = b'"%s"' % sha256(body).hexdigest()[:32].encode()
        said = {
            "etag": self._etag.decode(),
            "cache-control": "no-cache",  # may be kept, and is asked for again with its tag
            "x-content-type-options": "nosniff",
            **(headers or {}),
        }
        self._unchanged = [(name.lower().encode(), value.encode()) for name, value in said.items()]
        self._headers = [
            *self._unchanged,
            (b"content-type", media_type.encode()),
            (b"content-length", b"%d" % len(body)),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = self.answer(scope)
        except Problem as problem:
            await refuse(problem, scope, receive, send)
            return
        await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
        await send({"type": "http.response.body", "body": answer.body})

    def answer(self, scope: Scope) -> Answer:
        """The answer, which is 304 to who has these bytes already.

        Raises:
            Problem: 405 for another method than GET and HEAD.
        """
        if scope["method"] not in ("GET", "HEAD"):
            raise Problem(405, f"This path does not take {scope['method']}.", headers={"Allow": "GET, HEAD"})
        for name, value in scope["headers"]:
            if name == b"if-none-match" and self._is_among(value):
                return Answer(304, [*self._unchanged], b"")
        return Answer(200, [*self._headers], self.body)

    def _is_among(self, tags: bytes) -> bool:
        return tags.strip() == b"*" or self._etag in (
            tag.strip().removeprefix(b"W/") for tag in tags.split(b",")
        )
