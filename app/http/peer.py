"""The name in a client certificate, read once per connection."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.domain.entity import check_name

PEER: Final = "peer"
"""The key of this name in the ``state`` of a scope; absent without a certificate."""


class PeerProtocol(HttpToolsProtocol):
    """Uvicorn's protocol, plus the name in the verified client certificate."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Store the name in the state, of which each request gets a copy."""
        super().connection_made(transport)
        if certificate := transport.get_extra_info("peercert"):
            self.app_state = {**self.app_state, PEER: name_of(certificate)}


def name_of(certificate: Mapping[str, Any]) -> str:
    """Return the common name, or else the only URI, or else the only DNS name; ``""`` if that is not valid.

    Several names of one kind are ambiguous, and give ``""`` too.

    >>> name_of({"subject": ((("organizationName", "x"),), (("commonName", "alice"),))})
    'alice'
    >>> name_of({"subjectAltName": (("DNS", "a.example"), ("URI", "spiffe://example/a"))})
    'spiffe://example/a'
    >>> name_of({"subject": ((("commonName", "a"), ("commonName", "b")),), "subjectAltName": (("DNS", "c"),)})
    ''
    """
    subject = [field for fields in certificate.get("subject", ()) for field in fields]
    others = certificate.get("subjectAltName", ())
    for kind, names in (("commonName", subject), ("URI", others), ("DNS", others)):
        found = [name for name_kind, name in names if name_kind == kind]
        if found:
            return found[0] if len(found) == 1 and check_name(found[0]) is None else ""
    return ""
