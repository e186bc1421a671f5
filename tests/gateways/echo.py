"""The site behind the gateways: it returns the request that reached it, and its path chooses the status."""

from __future__ import annotations

import asyncio
import hashlib
import json

from starlette.types import Receive, Scope, Send

SHED_AFTER_S = 0.4
"""A little longer than a check waits in a busy node before it is refused (300 ms)."""
SHED = {
    "decision": "throttle",
    "throttle_ms": 1700,
    "charged": False,
    "applied": 0,
    "source": "local",
    "limited_by": None,
}
OWN_HEADERS = ((b"ratelimit", b'"site";r=1;t=1'), (b"retry-after", b"77"), (b"x-site", b"yes"))


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """``/status/403`` answers 403, ``/shed`` as an overloaded Quotagate does, any other path 200."""
    if scope["type"] != "http":
        return
    digest, size, more = hashlib.sha256(), 0, True
    while more:
        message = await receive()
        part = message.get("body", b"")
        digest.update(part)
        size += len(part)
        more = message.get("more_body", False)
    if scope["path"] == "/shed":
        await _shed(scope, send)
        return
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


async def _shed(scope: Scope, send: Send) -> None:
    """Refuse a check late and undecided, as load shedding does, with the status that its query asks for."""
    await asyncio.sleep(SHED_AFTER_S)
    body = json.dumps(SHED).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"retry-after", b"2"),
        (b"x-throttle-ms", b"1700"),
    ]
    status = 403 if b"deny_status=403" in scope["query_string"] else 429
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
