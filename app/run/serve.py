"""The API server: uvicorn with the wired app, in one process or several that share a listening socket."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import ssl
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
from pydantic import SecretStr

from app.node import home, open_files
from app.node.children import Child, stop_event
from app.node.command_lines import quotagate
from app.node.errors import ListenError, SettingsError, StartError
from app.node.settings import PREFIX, Settings

if TYPE_CHECKING:
    from app.http.connections import Connections

BACKLOG: Final = 2048
ACCEPTS_PER_TURN: Final = 16
"""New connections that one turn of the event loop accepts. libuv accepts one per listening socket, so the
socket is registered this many times. With one, connections behind 512 simultaneous ones waited for 4 s."""
SWITCH_INTERVAL_S: Final = 0.0005
"""How long another thread, such as one that renders metrics, may run before the event loop continues."""
SEND_BUFFER: Final = 65_536
"""Bytes (the kernel doubles them) of responses that the kernel keeps for a caller that does not read."""
FINISH_WITHIN_S: Final = 10
"""How long requests in flight may take at shutdown; a decision takes milliseconds."""


log = structlog.get_logger("quotagate")


def listen(settings: Settings) -> socket.socket:
    """Return a listening socket. The outermost process makes it, so it outlives each server process.

    Raises:
        ListenError: the address and port cannot be bound.
    """
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        raise ListenError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror} "
            f"(change {PREFIX}HOST or {PREFIX}PORT)"
        ) from None
    return listener


def serve(
    settings: Settings,
    *,
    fd: int | None = None,
    counts: Path | None = None,
    options: tuple[str, ...] = (),
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        fd: an inherited listening socket; without it, the function makes one.
        counts: the folder in which sibling processes share their metrics.
        options: command-line options for the child processes, if there are several.
    """
    if settings.redis_url is None:
        raise SettingsError(f"{PREFIX}REDIS_URL: not set; `quotagate up` has an embedded store")
    check_envoy(settings)
    if fd is None and settings.home.is_dir():
        home.restrict_access(settings.home.resolve())
    if settings.admin_key is None:
        key, made = home.admin_key(home.make(settings.home))
        settings = settings.model_copy(update={"admin_key": SecretStr(key)})
        if made:
            print_key(settings, key)
    listener = socket.socket(fileno=fd) if fd is not None else listen(settings)
    with listener:
        if settings.processes > 1:
            asyncio.run(_several(settings.processes, listener, options))
        else:
            _one(settings, listener, counts)


def check_envoy(settings: Settings) -> None:
    """Require that Envoy's rate-limit service can start, if its settings ask for it.

    Raises:
        SettingsError: something is missing, or the mapping is wrong.
    """
    if settings.envoy_port is not None or settings.envoy_mapping is not None:
        from app.run import envoy  # which loads more than other nodes need

        envoy.check(settings)


def print_key(settings: Settings, key: str) -> None:
    """Print a new admin key, once."""
    print(f"admin key, kept in {settings.home.resolve() / 'admin.key'}: {key}", flush=True)  # noqa: T201


def _one(settings: Settings, listener: socket.socket, counts: Path | None) -> None:
    # `up`, and the parent of several processes, need nothing of the API itself.
    import uvicorn

    from app.http.lane import LaneProtocol
    from app.run import wiring

    _limit_unread(listener)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    connections = _connections(settings)
    app = wiring.build(settings, counts, lambda: server.should_exit, connections)
    protocol = partial(LaneProtocol, allowed=connections, routes=app.hot, outbox=app.outbox)
    server = uvicorn.Server(uvicorn.Config(**_options(settings, app, protocol)))

    def stop(*_: object) -> None:
        """Handle a signal that comes before uvicorn installs its own handlers."""
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        server.run(sockets=[listener, *(_duplicate(listener) for _ in range(1, ACCEPTS_PER_TURN))])
    except SystemExit:
        raise StartError("the API did not start; see the log") from None


def _duplicate(listener: socket.socket) -> socket.socket:
    """Duplicate a socket; ``socket.dup`` would make it blocking, for the sibling processes too."""
    return socket.socket(fileno=os.dup(listener.fileno()))


def _connections(settings: Settings) -> Connections:
    """The limits that are set, or smaller ones if the limit of open files needs it, in the same ratio."""
    from app.http.connections import Connections

    most, per_address = settings.max_connections, settings.max_connections_per_address
    room = open_files.room_for(most)
    if room < most:
        per_address = max(1, per_address * room // most)
        log.warning(
            "the limit of open files allows fewer connections than the settings",
            connections=room,
            connections_per_address=per_address,
            set=most,
            limit_for_all=most + open_files.RESERVE,
        )
    return Connections(room, per_address)


def _limit_unread(listener: socket.socket) -> None:
    """Limit how much of a response the kernel keeps, and how long, if the caller does not read it.

    Connections inherit this from the listener, and keep it after we close them. Bytes that are still in this
    process are limited by the protocol.
    """
    from app.http.protocol import Protocol

    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    if listener.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
        unread_ms = round(Protocol.UNREAD_S * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)


def _options(settings: Settings, app: Callable[..., Any], protocol: Callable[..., Any]) -> dict[str, Any]:
    options: dict[str, Any] = {
        "app": app,
        "loop": "uvloop",
        "http": protocol,
        "ws": "none",
        "lifespan": "on",
        "backlog": BACKLOG,
        "log_config": None,
        "access_log": False,
        "server_header": False,
        # Whether a network may ask without a key depends on the socket's address, never on a header.
        "proxy_headers": False,
        # Longer than the idle timeout of common proxies (60 s), so that the proxy closes first.
        "timeout_keep_alive": 75,
        "timeout_graceful_shutdown": FINISH_WITHIN_S,
    }
    if settings.tls_cert:
        options |= {"ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key}
    if settings.tls_client_ca:
        options |= {"ssl_ca_certs": settings.tls_client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options


async def _several(count: int, listener: socket.socket, options: tuple[str, ...]) -> None:
    stop = stop_event()
    fd = listener.fileno()
    env = {**os.environ, f"{PREFIX}PROCESSES": "1"}
    counts = tempfile.mkdtemp(prefix="quotagate-counts-")
    command = quotagate("serve", "--fd", str(fd), "--counts", counts, *options)
    children = [Child(f"api {n}", command, env=env, pass_fds=(fd,)) for n in range(1, count + 1)]
    try:
        for child in children:
            await child.start()
            child.keep()
        await stop.wait()
    finally:
        await asyncio.gather(*(child.stop() for child in children))
        shutil.rmtree(counts, ignore_errors=True)
