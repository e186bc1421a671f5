"""The head of a request: the part that access control and the hot routes read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct
from starlette.types import Scope

from app.http.peer import PEER

AUTHORIZATION: Final = b"authorization"
HOST: Final = b"host"
TRACEPARENT: Final = b"traceparent"
"""The field of W3C Trace Context that names the span of the caller."""
EXPECT: Final = b"expect"

HeadFields = Mapping[bytes, Sequence[bytes]]
"""The values of each header field, by its name in lower case."""


class RequestHead(Struct, gc=False):
    """The head of a request.

    Attributes:
        path: the path of the target, unescaped.
        query: the query of the target, as it was sent.
        address: the IP address of the caller; empty for a unix socket.
        peer: the name in the client certificate, or None without a certificate; an invalid name is empty.
    """

    path: str = ""
    query: bytes = b""
    fields: HeadFields = {}
    address: str = ""
    peer: str | None = None

    @property
    def host(self) -> bytes | None:
        """The first ``Host``; None without one."""
        hosts = self.fields.get(HOST)
        return hosts[0] if hosts else None


def head_of(scope: Scope) -> RequestHead:
    """Return the head of a request that came by ASGI."""
    client = scope.get("client")
    fields: dict[bytes, list[bytes]] = {}
    for name, value in scope["headers"]:
        fields.setdefault(name, []).append(value)
    return RequestHead(
        scope["path"],
        scope["query_string"],
        fields,
        client[0] if client else "",
        (scope.get("state") or {}).get(PEER),
    )
