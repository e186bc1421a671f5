"""Envoy's rate-limit service in an API process; the only place that brings in the extra ``envoy``."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import structlog

from app.admission.metrics.metrics import Metrics
from app.admission.port import Decider
from app.envoy.mapping import DescriptorMapping, MappingError
from app.http.access.access import Access
from app.http.server.acceptor import LAST_S, Acceptor, PortTakenError
from app.http.server.connections import Connections
from app.http.server.intake import Intake
from app.node.errors import SettingsError
from app.node.settings import PREFIX, Settings
from app.run.listening import listen_error

NEEDED: Final = ("h2", "google.protobuf")

if TYPE_CHECKING:
    from app.envoy.server import EnvoyPort

CALLS_WITHIN_S: Final = 5.0
"""How long calls in flight may take at shutdown."""

log = structlog.get_logger("quotagate.envoy")


def check(settings: Settings) -> DescriptorMapping:
    """Return the mapping; if the port is set, check that the service can start.

    Raises:
        SettingsError: something is missing, or the mapping is wrong.
    """
    if settings.envoy_port is None:
        if settings.envoy_mapping is not None:
            raise SettingsError(f"{PREFIX}ENVOY_MAPPING: needs {PREFIX}ENVOY_PORT")
        return DescriptorMapping()
    if not all(map(_is_there, NEEDED)):
        raise SettingsError(f"{PREFIX}ENVOY_PORT: needs the extra envoy: pip install 'quotagate[envoy]'")
    try:
        return DescriptorMapping.load(settings.envoy_mapping)
    except MappingError as wrong:
        faults = str(wrong).splitlines()
        raise SettingsError(*(f"{PREFIX}ENVOY_MAPPING: {fault}" for fault in faults)) from None


def port(
    mapping: DescriptorMapping,
    admission: Decider,
    access: Access,
    metrics: Metrics,
    is_ready: Callable[[], bool],
    intake: Intake,
) -> EnvoyPort:
    """Return the object that makes the protocols of the port's connections, and stops them."""
    from app.envoy import server

    service = server.RateLimitService(admission, access, mapping, metrics)
    return server.EnvoyPort(service, server.HealthService(is_ready), intake, metrics)


@asynccontextmanager
async def serving(
    settings: Settings,
    opened: EnvoyPort | None,
    listener: socket.socket | None,
    connections: Connections,
    short: Callable[[OSError], None],
) -> AsyncIterator[None]:
    """Serve while the context lasts, if the port is set.

    Args:
        listener: the bound socket of the port.
        connections: the connections of all ports of the process.
        short: called with the ``OSError`` when the kernel has no room for a connection.

    Raises:
        ListenError: another program listens on the port.
    """
    if opened is None or listener is None:
        yield
        return
    wait_s = LAST_S if settings.drain_ms else 0.0
    accepted = accepting(opened, listener, tls(settings), connections, short, wait_s=wait_s)
    try:
        await accepted.__aenter__()
    except PortTakenError as error:
        raise listen_error(settings, "envoy_port", error) from None
    log.info("the rate-limit service for Envoy listens", host=settings.host, port=settings.envoy_port)
    try:
        yield
    finally:
        await accepted.__aexit__(None, None, None)


@asynccontextmanager
async def accepting(
    opened: EnvoyPort,
    listener: socket.socket,
    certificates: ssl.SSLContext | None,
    connections: Connections,
    short: Callable[[OSError], None] = lambda _error: None,
    *,
    wait_s: float = 0.0,
) -> AsyncIterator[None]:
    """Accept connections while the context lasts, and close them gracefully at its end.

    Args:
        wait_s: how long the connections that were accepted last may take until their first bytes arrive.

    Raises:
        PortTakenError: another program listens on the port.
    """
    acceptor = Acceptor(listener, "envoy", connections, opened.connect, certificates, short)
    try:
        acceptor.start()
    except OSError:
        listener.close()
        raise
    try:
        yield
    finally:
        await acceptor.close(wait_s)
        await opened.stop(CALLS_WITHIN_S)


def tls(settings: Settings) -> ssl.SSLContext | None:
    """Return a TLS context with the certificates of the HTTP API; None without TLS."""
    if settings.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(settings.tls_cert, settings.tls_key)
    context.set_alpn_protocols(["h2"])
    if settings.tls_client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(settings.tls_client_ca)
    return context


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is not there
        return False
