"""Bound sockets for the ports of a node."""

from __future__ import annotations

import socket
from typing import Literal

from app.node.errors import ListenError
from app.node.settings import PREFIX, Settings

PortSetting = Literal["port", "envoy_port"]


def bound(settings: Settings, name: PortSetting, *, shared: bool = False) -> socket.socket:
    """Return a bound socket for the port of a setting; an acceptor lets it listen.

    Args:
        shared: other processes bind a socket to the same port.

    Raises:
        ListenError: the address and port cannot be bound.
    """
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            settings.host, getattr(settings, name), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise listen_error(settings, name, error) from None
    return listener


def listen_error(settings: Settings, name: PortSetting, error: OSError) -> ListenError:
    """Return the error of a port that cannot be bound, or at which another program listens."""
    return ListenError(
        f"cannot listen on {settings.host} port {getattr(settings, name)}: {error.strerror} "
        f"(change {PREFIX}HOST or {PREFIX}{name.upper()})"
    )
