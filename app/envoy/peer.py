"""Who calls over gRPC: the address and the client certificate, as the HTTP API has them in a scope."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote

from app.http.peer import PEER, name_of

_ADDRESS: Final = re.compile(r"ipv[46]:(?:\[([^\]]+)\]|([^:]+)):([0-9]+)")
_ESCAPED: Final = re.compile(r"\\.", re.DOTALL)
_SEPARATOR: Final = re.compile("[,+]")
"""What is escaped in a subject, as RFC 2253 writes it, and what separates its parts."""

Metadata = Iterable[tuple[str, str | bytes]]
AuthContext = Mapping[str, Iterable[bytes]]


def scope_of(peer: str, metadata: Metadata, auth: AuthContext, path: str) -> dict[str, Any]:
    """Return a call as the scope of a request.

    Args:
        peer: as grpcio spells it, such as ``ipv4:127.0.0.1:50000``.
        auth: what is known of the connection; empty without TLS.
    """
    sent = [value for name, value in metadata if name == "authorization"]
    headers = [(b"authorization", value if isinstance(value, bytes) else value.encode()) for value in sent]
    scope: dict[str, Any] = {"type": "grpc", "path": path, "headers": headers, "client": client_of(peer)}
    if "x509_pem_cert" in auth:
        scope["state"] = {PEER: certified_name(auth)}
    return scope


@lru_cache(4096)
def client_of(peer: str) -> tuple[str, int] | None:
    """Return the address and port of a caller; None for a unix socket.

    >>> client_of("ipv4:127.0.0.1:50000"), client_of("ipv6:%5B::1%5D:50000"), client_of("unix:/run/it")
    (('127.0.0.1', 50000), ('::1', 50000), None)
    """
    found = _ADDRESS.fullmatch(unquote(peer))
    return None if found is None else (found[1] or found[2], int(found[3]))


def certified_name(auth: AuthContext) -> str:
    """Return the name in a client certificate, by the rules of the HTTP API; ``""`` if it has none.

    >>> certified_name({"x509_subject": [b"CN=alice,O=x"], "x509_common_name": [b"alice"]})
    'alice'
    >>> certified_name({"x509_subject": [b"CN=bob,CN=alice"], "x509_common_name": [b"alice"]})
    ''
    >>> certified_name({"x509_subject": [b"O=x"], "peer_uri": [b"spiffe://example/a"]})
    'spiffe://example/a'
    """
    subject = _ESCAPED.sub("", b"".join(auth.get("x509_subject", ())).decode(errors="replace"))
    names = [part for part in _SEPARATOR.split(subject) if part.upper().startswith("CN=")]
    # grpcio gives the first common name alone; how many there are, the subject says.
    common = [*_texts(auth.get("x509_common_name", ()))] * len(names)
    others = [("URI", name) for name in _texts(auth.get("peer_uri", ()))]
    others += [("DNS", name) for name in _texts(auth.get("peer_dns", ()))]
    return name_of({"subject": [[("commonName", name)] for name in common], "subjectAltName": others})


def _texts(values: Iterable[bytes]) -> Sequence[str]:
    return [value.decode(errors="replace") for value in values]
