"""Connections to a store that can be opened while this process can open no more files.

A limit of open files may be reached at any time, for instance by callers that connect. Each connection to the
store therefore has a spare: a socket that was made at start and needs no new descriptor to connect. While the
process is short of descriptors, it uses the last known addresses and certificates.
"""

from __future__ import annotations

import socket
import ssl
import weakref
from collections.abc import Mapping
from contextlib import suppress
from threading import Lock
from typing import Any, Final

from redis.asyncio.connection import RedisSSLContext

from app.node.shortage import is_out_of_descriptors, shortage_of

Found = list[tuple[socket.AddressFamily, Any]]
"""Addresses to connect to, each with its family."""

_TLS_OPTIONS: Final = (
    *("keyfile", "certfile", "cert_reqs", "include_verify_flags", "exclude_verify_flags"),
    *("ca_certs", "ca_data", "ca_path", "check_hostname", "min_version", "ciphers", "password"),
)
"""The options of ``RedisSSLContext``; in a URL each begins with ``ssl_``."""

_TLS_DEFAULTS: Final = {"cert_reqs": "required", "check_hostname": True}


class Sockets:
    """Opens TCP and Unix connections, and keeps spare sockets for a shortage. Threads may share it.

    Args:
        spares: how many sockets to keep.
        family: the family of the first spares; later spares have the family that was used last.
    """

    def __init__(self, spares: int, family: socket.AddressFamily) -> None:
        self._count = spares
        self._family = family
        self._spares: list[socket.socket] = []
        weakref.finalize(self, _close_all, self._spares)
        self._lock = Lock()
        self._found: dict[tuple[str, int], Found] = {}
        self._contexts: dict[str, ssl.SSLContext] = {}
        self.refill()

    def keep(self, spares: int) -> None:
        """Keep this many spare sockets from now on, as far as they can be made."""
        with self._lock:
            self._count = spares
            while len(self._spares) > spares:
                self._spares.pop().close()
        self.refill()

    def refill(self) -> None:
        """Make the spare sockets that are missing or of another family, as far as that is possible."""
        with self._lock, suppress(OSError):
            others = [spare for spare in self._spares if spare.family != self._family]
            while others or len(self._spares) < self._count:
                self._spares.append(socket.socket(self._family, socket.SOCK_STREAM))
                if others:
                    self._spares.remove(other := others.pop())
                    other.close()

    def connect(self, host: str, port: int, within_s: float | None) -> socket.socket:
        """Open a TCP connection.

        Raises:
            OSError: there is no such host, it refused, or it did not answer in time.
        """
        failed: OSError | None = None
        for family, address in self._addresses(host, port):
            try:
                opened = self._connect(family, address, within_s)
            except OSError as error:
                failed = error
            else:
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return opened
        raise failed or OSError(f"{host} has no address")

    def connect_unix(self, path: str, within_s: float | None) -> socket.socket:
        """Open a connection to a Unix socket.

        Raises:
            OSError: nobody listens there.
        """
        return self._connect(socket.AF_UNIX, path, within_s)

    def tls(self, options: Mapping[str, Any]) -> ssl.SSLContext:
        """Return the TLS context for the options of a URL.

        Raises:
            OSError: a certificate cannot be read.
        """
        tls_options = {name: options[f"ssl_{name}"] for name in _TLS_OPTIONS if f"ssl_{name}" in options}
        key = repr(tls_options)
        if key not in self._contexts or not is_out_of_descriptors():
            self._contexts[key] = RedisSSLContext(**{**_TLS_DEFAULTS, **tls_options}).get()
        return self._contexts[key]

    def close(self) -> None:
        """Close the spare sockets."""
        self.keep(0)

    def _addresses(self, host: str, port: int) -> Found:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError:
            known = self._found.get((host, port))
            if known is None or not is_out_of_descriptors():
                raise
            return known
        addresses = self._found[host, port] = [(family, address) for family, *_, address in found]
        return addresses

    def _connect(self, family: socket.AddressFamily, address: Any, within_s: float | None) -> socket.socket:
        opened = self._socket(family)
        try:
            opened.settimeout(within_s)
            opened.connect(address)
        except OSError as error:
            if isinstance(error, TimeoutError):
                opened.close()
            else:
                self._give_back(opened)  # Linux lets a refused socket connect again
            raise
        self._family = family
        return opened

    def _socket(self, family: socket.AddressFamily) -> socket.socket:
        try:
            return socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            with self._lock:
                spare = next((each for each in self._spares if each.family == family), None)
                if spare is None or shortage_of(error) is None:
                    raise
                self._spares.remove(spare)
                return spare

    def _give_back(self, unused: socket.socket) -> None:
        with self._lock:
            if len(self._spares) < self._count:
                self._spares.append(unused)
                return
        unused.close()


def _close_all(sockets: list[socket.socket]) -> None:
    """Close the spare sockets of an unreferenced store, even one that was never opened."""
    for each in sockets:
        each.close()
