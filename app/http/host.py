"""The host that a request names: whether it is valid, and whether a page comes from it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import ip_address
from typing import Final, NamedTuple

LONGEST: Final = 261
"""The longest host, in bytes: a name of 255, a colon and a port."""

_HOST: Final = re.compile(
    r"(\[[0-9A-Fa-f:.]+\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::([0-9]*))?"
)
_ORIGIN: Final = re.compile(r"(https?)://(.+)")
_PORTS: Final = {"http": 80, "https": 443}


class HostName(NamedTuple):
    """A valid host.

    Attributes:
        name: in lower case; an IPv6 address without brackets.
        port: None without one.
        is_address: whether the name is an address, which no name server can redirect.
    """

    name: str
    port: int | None
    is_address: bool


def is_wrong(hosts: Sequence[bytes], *, version: str) -> bool:
    """Whether a request with these ``Host`` fields must be refused (RFC 9112, 3.2).

    >>> is_wrong([b"localhost:8080"], version="1.1"), is_wrong([b"[::1]"], version="1.1")
    (False, False)
    >>> is_wrong([], version="1.1"), is_wrong([], version="1.0"), is_wrong([b"a", b"a"], version="1.0")
    (True, False, True)
    >>> is_wrong([b"a b"], version="1.1"), is_wrong([b"a:99999"], version="1.1")
    (True, True)
    """
    if len(hosts) != 1:
        return bool(hosts) or version == "1.1"
    return len(hosts[0]) > LONGEST or parts(hosts[0]) is None


@lru_cache(1024)  # of at most LONGEST bytes each
def parts(host: bytes) -> HostName | None:
    """Return the parts of a host; None for an invalid one.

    >>> parts(b"LocalHost:8080"), parts(b"a/b")
    (HostName(name='localhost', port=8080, is_address=False), None)
    >>> parts(b"[::1]"), parts(b"example.").name
    (HostName(name='::1', port=None, is_address=True), 'example')
    """
    if not (found := _HOST.fullmatch(host.decode("latin-1"))):
        return None
    name, port = found[1].strip("[]").lower().removesuffix("."), found[2]
    is_address = _is_address(name)
    if found[1].startswith("[") and not is_address:
        return None
    if not port:
        return HostName(name, None, is_address)
    return HostName(name, int(port), is_address) if len(port) <= 5 and int(port) <= 65_535 else None


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_same(origin: bytes, host: bytes) -> bool:
    """Whether a page of this origin is on this host and port; proxies may change the scheme.

    >>> is_same(b"http://localhost:8080", b"localhost:8080"), is_same(b"https://q.example", b"q.example:443")
    (True, True)
    >>> is_same(b"http://localhost:3000", b"localhost:8080"), is_same(b"null", b"localhost")
    (False, False)
    """
    found = _ORIGIN.fullmatch(origin.decode("latin-1").lower())
    if not found or max(len(origin), len(host)) > 2 * LONGEST:
        return False
    default = _PORTS[found[1]]
    there, here = parts(found[2].encode("latin-1")), parts(host)
    if there is None or here is None:
        return False
    return (there.name, there.port or default) == (here.name, here.port or default)
