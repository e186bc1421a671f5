"""The site behind the gateways: it tells what reached it, and answers with the status its path asks for."""

from __future__ import annotations

import hashlib
import json

from starlette.types import Receive, Scope, Send

OWN_HEADERS = ((b"ratelimit", b'"site";r=1;t=1'), (b"retry-after", b"77"), (b"x-site", b"yes"))


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """``/status/403`` answers 403, any other path 200."""
    if scope["type"] != "http":
        return
    digest, size, more = hashlib.sha256(), 0, True
    while more:
        message = await receive()
        part = message.get("body", b"")
        digest.update(part)
        size += len(part)
        more = message.get("more_body", False)
    headers = [(name.decode(), value.decode("latin-1")) for name, value in scope["headers"]]
    seen = {"method": scope["method"], "path": scope["path"], "headers": headers}
    body = json.dumps(seen | {"size": size, "sha256": digest.hexdigest()}).encode()
    _, asked, status = scope["path"].rpartition("/status/")
    await send(
        {
            "type": "http.response.start",
            "status": int(status) if asked else 200,
            "headers": [*OWN_HEADERS, (b"content-length", b"%d" % len(body))],
        }
    )
    await send({"type": "http.response.body", "body": body})
