"""The API server: uvicorn with the wired app, in one process or several that share a listening socket."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
from pydantic import SecretStr

from app.node import home, memory, open_files
from app.node.children import SupervisorSignals
from app.node.errors import SettingsError, StartError
from app.node.settings import PREFIX, Settings
from app.run.api_processes import ApiProcesses
from app.run.listening import Listeners, listen_error

if TYPE_CHECKING:
    from app.http.server.connections import Connections

SWITCH_INTERVAL_S: Final = 0.0005
"""How long another thread, such as one that renders metrics, may run before the event loop continues."""
FINISH_WITHIN_S: Final = 10
"""How long requests in flight may take at shutdown; a decision takes milliseconds."""
FIXED: Final = ("host", "port", "envoy_port", "home")
"""The settings that API processes cannot change while the outermost process holds the listening sockets."""


log = structlog.get_logger("quotagate")


def serve(
    settings: Settings,
    read: Callable[[], Settings],
    *,
    fd: int | None = None,
    envoy_fd: int | None = None,
    ready_fd: int | None = None,
    counts: Path | None = None,
    options: tuple[str, ...] = (),
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        read: reads the settings again, when SIGHUP asks for a restart of several processes.
        fd, envoy_fd: inherited sockets of the ports; others are bound here.
        ready_fd: an inherited pipe, written to when the process is ready.
        counts: the folder in which sibling processes share their metrics.
        options: command-line options for the child processes, if there are several.
    """
    _checked(settings)
    if fd is None and settings.home.is_dir():
        home.restrict_access(settings.home.resolve())
    if settings.admin_key is None:
        key, made = home.admin_key(home.make(settings.home))
        settings = settings.model_copy(update={"admin_key": SecretStr(key)})
        if made:
            print_key(settings, key)
    with Listeners.of(settings, fd, envoy_fd) as listeners:
        if settings.processes > 1:
            asyncio.run(_several(settings, read, listeners, options))
        else:
            _one(settings, listeners, counts, ready_fd)


def check_envoy(settings: Settings) -> Settings:
    """Return the settings, if Envoy's rate-limit service is off or can start by them.

    Raises:
        SettingsError: something is missing, or the mapping is wrong.
    """
    if settings.envoy_port is not None or settings.envoy_mapping is not None:
        from app.run import envoy  # which loads more than other nodes need

        envoy.check(settings)
    return settings


def print_key(settings: Settings, key: str) -> None:
    """Print a new admin key, once."""
    print(f"admin key, kept in {settings.home.resolve() / 'admin.key'}: {key}", flush=True)  # noqa: T201


def _one(settings: Settings, listeners: Listeners, counts: Path | None, ready_fd: int | None) -> None:
    # `up`, and the parent of several processes, need nothing of the API itself.
    import uvicorn

    from app.http.server.acceptor import PortTakenError
    from app.http.server.drain import DrainState
    from app.http.server.hot_protocol import HttpPort
    from app.http.server.parsing import ParsingTurns
    from app.http.server.protocol import PARSING_S
    from app.http.server.server import Server
    from app.run import wiring

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    connections, drain = _connections(settings), DrainState()

    def fail(why: str) -> None:
        log.error("the API cannot go on", why=why)
        server.should_exit = True

    def is_stopping() -> bool:
        return drain.has_begun or server.should_exit

    app = wiring.build(settings, counts, is_stopping, connections, fail, listeners.envoy)
    port = HttpPort(app.hot, app.outbox, drain, ParsingTurns(PARSING_S), app.handed_over)
    config = uvicorn.Config(**_options(settings, app, port))

    def announce() -> bool:
        """Tell the supervisor that this process is ready; return False while it is not."""
        if not app.ready().can_decide:
            return False
        if ready_fd is not None:
            os.write(ready_fd, b"ready\n")
            os.close(ready_fd)
        return True

    server = Server(
        config,
        listeners.http,
        connections,
        announce=announce,
        drain=drain,
        drain_s=settings.drain_ms / 1000,
        drained=app.drained,
        short=app.short,
    )

    def stop(*_: object) -> None:
        """Handle a signal that comes before uvicorn installs its own handlers."""
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        server.run()
    except PortTakenError as error:
        raise listen_error(settings, "port", error) from None
    except SystemExit:
        raise StartError("the API did not start; see the log") from None


def _connections(settings: Settings) -> Connections:
    """The connection limits by the settings; smaller ones in the same ratio if open files are limited."""
    from app.http.server.connections import Connections, usual_bounds

    most, per_address = usual_bounds(with_tls=settings.tls_cert is not None)
    most = settings.max_connections or most
    per_address = settings.max_connections_per_address or per_address
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
    connections = Connections(room, per_address)
    if settings.tls_cert is not None:
        connections.freed = memory.give_back
    return connections


def _options(settings: Settings, app: Callable[..., Any], protocol: Callable[..., Any]) -> dict[str, Any]:
    options: dict[str, Any] = {
        "app": app,
        "loop": "uvloop",
        "http": protocol,
        "ws": "none",
        "lifespan": "on",
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


def _checked(settings: Settings) -> Settings:
    if settings.redis_url is None:
        raise SettingsError(f"{PREFIX}REDIS_URL: not set; `quotagate up` has an embedded store")
    return check_envoy(settings)


def pinned(settings: Settings) -> dict[str, str]:
    """The variables of the settings in ``FIXED``, for API processes that read all settings again."""
    values = {name: getattr(settings, name) for name in FIXED}
    return {PREFIX + name.upper(): "" if value is None else str(value) for name, value in values.items()}


async def _several(
    settings: Settings, read: Callable[[], Settings], listeners: Listeners, options: tuple[str, ...]
) -> None:
    signals = SupervisorSignals()
    env = {**os.environ, **pinned(settings)}
    arguments = (*listeners.arguments, *options)
    api = ApiProcesses(settings, arguments, env=env, fixed=FIXED, pass_fds=listeners.descriptors)

    async def work() -> None:
        try:
            await api.start()
            api.keep()
            await api.obey(signals.restart, lambda: _checked(read()))
        finally:
            await api.stop(signals.stopped_by)

    await signals.run(work())
