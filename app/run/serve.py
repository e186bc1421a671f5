"""The API alone: uvicorn around the wired app, in one process or several that share one listening socket."""

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
from typing import Any, Final

import structlog
import uvicorn
from pydantic import SecretStr

from app.http.connections import Connections
from app.http.protocol import Protocol
from app.run import home, open_files
from app.run.children import Child, quotagate, stop_asked
from app.run.errors import CannotListen, CannotStart, SettingsRefused
from app.run.settings import PREFIX, Settings

BACKLOG: Final = 2048
ACCEPTED_AT_ONCE: Final = 16
"""New connections that a turn of the event loop takes in. libuv takes one for each listening socket, so the
socket stands there so often: behind 512 connections that come at once others waited for four seconds."""
THREADS_SWITCH_S: Final = 0.0005
"""How long a thread beside the loop runs before the loop's turn, such as one that makes a page of metrics."""
SENT_AND_UNREAD: Final = 65_536
"""Bytes of answers, doubled by the kernel, that it keeps for a connection whose caller does not read."""
FINISH_WITHIN_S: Final = 10
"""What is in flight at the end may take this long; a decision takes its budget, some milliseconds."""


log = structlog.get_logger("quotagate")


def listen(settings: Settings) -> socket.socket:
    """The listening socket, made by the outermost program so that it outlives each server behind it."""
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        raise CannotListen(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror} "
            f"({PREFIX}HOST and {PREFIX}PORT choose another)"
        ) from None
    return listener


def serve(
    settings: Settings,
    *,
    fd: int | None = None,
    counts: Path | None = None,
    options: tuple[str, ...] = (),
) -> None:
    """Serve until SIGTERM or SIGINT; on the inherited socket `fd`, else on one of our own.

    `counts` is the folder in which sibling processes leave their metrics for each other; `options` go to the
    children of a service of several processes.
    """
    if settings.redis_url is None:
        raise SettingsRefused(f"{PREFIX}REDIS_URL: not set; `quotagate up` brings an embedded store")
    if fd is None and settings.home.is_dir():
        home.close(settings.home.resolve())
    if settings.admin_key is None:
        key, made = home.admin_key(home.make(settings.home))
        settings = settings.model_copy(update={"admin_key": SecretStr(key)})
        if made:
            print_key(settings, key)
    listener = socket.socket(fileno=fd) if fd is not None else listen(settings)
    with listener:
        _bound_what_is_unread(listener)
        if settings.processes > 1:
            asyncio.run(_several(settings.processes, listener, options))
        else:
            _one(settings, listener, counts)


def print_key(settings: Settings, key: str) -> None:
    """Said once, when the key was made."""
    print(f"admin key, kept in {settings.home.resolve() / 'admin.key'}: {key}", flush=True)  # noqa: T201


def _one(settings: Settings, listener: socket.socket, counts: Path | None) -> None:
    from app.run import wiring  # noqa: PLC0415  the parent of several has no use for the whole app

    sys.setswitchinterval(THREADS_SWITCH_S)
    connections = _connections(settings)
    app = wiring.build(settings, counts, lambda: server.should_exit, connections)
    server = uvicorn.Server(uvicorn.Config(**_options(settings, app, connections)))

    def stop(*_: object) -> None:
        """Obey a signal that comes before uvicorn listens; afterwards it is raised again, obeyed already."""
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        server.run(sockets=[listener, *(_again(listener) for _ in range(1, ACCEPTED_AT_ONCE))])
    except SystemExit:
        raise CannotStart("the API could not start; the log says why") from None


def _again(listener: socket.socket) -> socket.socket:
    """The same socket once more; ``dup`` would make it block, for our siblings that accept from it, too."""
    return socket.socket(fileno=os.dup(listener.fileno()))


def _connections(settings: Settings) -> Connections:
    """As many as are set, or as fit: then those of one address are fewer in the same measure."""
    most, of_an_address = settings.max_connections, settings.max_connections_per_address
    room = open_files.room_for(most)
    if room < most:
        of_an_address = max(1, of_an_address * room // most)
        log.warning(
            "the limit of open files leaves room for fewer connections than are set",
            connections=room,
            connections_per_address=of_an_address,
            set=most,
            limit_for_all=most + open_files.RESERVE,
        )
    return Connections(room, of_an_address)


def _bound_what_is_unread(listener: socket.socket) -> None:
    """How much of an answer the kernel keeps, and how long, where nobody reads it.

    Every connection has this from its listener, also after we closed it; what the program itself has not
    handed over yet is the protocol's matter.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENT_AND_UNREAD)
    if listener.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
        unread_ms = round(Protocol.UNREAD_S * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)


def _options(settings: Settings, app: Callable[..., Any], connections: Connections) -> dict[str, Any]:
    options: dict[str, Any] = {
        "app": app,
        "loop": "uvloop",
        "http": partial(Protocol, allowed=connections),
        "ws": "none",
        "lifespan": "on",
        "backlog": BACKLOG,
        "log_config": None,
        "access_log": False,
        "server_header": False,
        # Networks that may ask without a key are judged by the socket's address, never by a header.
        "proxy_headers": False,
        # Longer than the idle time of common proxies (60 s), so that they are the ones who close.
        "timeout_keep_alive": 75,
        "timeout_graceful_shutdown": FINISH_WITHIN_S,
    }
    if settings.tls_cert:
        options |= {"ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key}
    if settings.tls_client_ca:
        options |= {"ssl_ca_certs": settings.tls_client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options


async def _several(count: int, listener: socket.socket, options: tuple[str, ...]) -> None:
    asked = stop_asked()
    fd = listener.fileno()
    env = {**os.environ, f"{PREFIX}PROCESSES": "1"}
    counts = tempfile.mkdtemp(prefix="quotagate-counts-")
    command = quotagate("serve", "--fd", str(fd), "--counts", counts, *options)
    children = [Child(f"api {n}", command, env=env, pass_fds=(fd,)) for n in range(1, count + 1)]
    try:
        for child in children:
            await child.start()
            child.keep()
        await asked.wait()
    finally:
        await asyncio.gather(*(child.stop() for child in children))
        shutil.rmtree(counts, ignore_errors=True)
