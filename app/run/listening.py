"""The sockets of a node's ports: the outermost process binds them, and its API processes share them."""

from __future__ import annotations

import socket
from contextlib import suppress
from types import TracebackType
from typing import Literal, NamedTuple, Self

from app.node.errors import ListenError
from app.node.settings import PREFIX, Settings

PortSetting = Literal["port", "envoy_port"]


class Listeners(NamedTuple):
    """The bound sockets; an acceptor lets them listen. As a context, they are closed at its end.

    A process that stops leaves the connections that it has not accepted to the others. With a socket for each
    process, the kernel would reset them.

    Attributes:
        envoy: the socket of the rate-limit service; None without it.
    """

    http: socket.socket
    envoy: socket.socket | None

    @classmethod
    def of(cls, settings: Settings, http: int | None = None, envoy: int | None = None) -> Self:
        """Return the sockets for the ports of these settings.

        Args:
            http, envoy: the descriptors of inherited sockets; others are bound here.

        Raises:
            ListenError: an address and port cannot be bound.
        """
        first = _socket(settings, "port", http)
        try:
            return cls(first, None if settings.envoy_port is None else _socket(settings, "envoy_port", envoy))
        except BaseException:
            first.close()
            raise

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors that a child must inherit."""
        return tuple(each.fileno() for each in self if each is not None)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The options of `quotagate serve` that name them."""
        http = ("--fd", str(self.http.fileno()))
        return http if self.envoy is None else (*http, "--envoy-fd", str(self.envoy.fileno()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self:
            if each is not None:
                with suppress(OSError):
                    each.close()


def _socket(settings: Settings, name: PortSetting, inherited: int | None) -> socket.socket:
    """Return the inherited socket, or a bound one for the port of a setting.

    Raises:
        ListenError: the address and port cannot be bound.
    """
    if inherited is not None:
        return socket.socket(fileno=inherited)
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            settings.host, getattr(settings, name), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
