"""The name in a caller's certificate, read once for each connection."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.domain.entity import check_name

PEER: Final = "peer"
"""Where it stands in the ``state`` of a scope; absent without a certificate."""


class PeerProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which tells whom the verified certificate of the other end names."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take down the name; each request of the connection is given a copy of the state."""
        super().connection_made(transport)
        if certificate := transport.get_extra_info("peercert"):
            self.app_state = {**self.app_state, PEER: name_of(certificate)}


def name_of(certificate: Mapping[str, Any]) -> str:
    """The common name; without one the only URI, or else the only DNS name; ``""`` if that names nobody.

    Several names of a kind are nobody's: which of them was meant is anyone's guess.

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
        found = [name for its_kind, name in names if its_kind == kind]
        if found:
            return found[0] if len(found) == 1 and check_name(found[0]) is None else ""
    return ""
