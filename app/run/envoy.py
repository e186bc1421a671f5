"""Envoy's rate-limit service in an API process; the only place that brings in the extra ``envoy``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Final

import structlog

from app.admission.metrics import Metrics
from app.admission.port import Decider
from app.envoy.mapping import DescriptorMapping, MappingError
from app.http.access import Access
from app.node.errors import ListenError, SettingsError
from app.node.settings import PREFIX, Settings

NEEDED: Final = ("grpc", "google.protobuf")

log = structlog.get_logger("quotagate.envoy")


def check(settings: Settings) -> DescriptorMapping:
    """Return the mapping, with all that the service needs in place if its port is set.

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
        raise SettingsError("\n".join(f"{PREFIX}ENVOY_MAPPING: {fault}" for fault in faults)) from None


@asynccontextmanager
async def serving(
    settings: Settings,
    mapping: DescriptorMapping,
    admission: Decider,
    access: Access,
    metrics: Metrics,
    is_ready: Callable[[], bool],
    *,
    shared: bool,
) -> AsyncIterator[None]:
    """Serve while the context lasts, if the port is set.

    Args:
        shared: sibling processes listen on the same port.

    Raises:
        ListenError: the address and port cannot be bound.
    """
    if settings.envoy_port is None:
        yield
        return
    from app.envoy import server

    certificates = None
    if settings.tls_cert is not None and settings.tls_key is not None:
        certificates = server.ServerCertificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    service = server.RateLimitService(admission, access, mapping, metrics)
    started = server.serving(
        service,
        server.HealthService(is_ready),
        (settings.host, settings.envoy_port),
        certificates,
        shared=shared,
    )
    try:
        port = await started.__aenter__()
    except OSError as error:
        raise ListenError(
            f"cannot listen on {settings.host} port {settings.envoy_port}: {error} "
            f"(change {PREFIX}HOST or {PREFIX}ENVOY_PORT)"
        ) from None
    log.info("the rate-limit service for Envoy listens", host=settings.host, port=port)
    try:
        yield
    finally:
        await started.__aexit__(None, None, None)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is not there
        return False
