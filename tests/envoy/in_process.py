"""The port for Envoy in this process, on a socket of its own."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_network
from typing import Any

import grpc

from app.admission.metrics.metrics import Metrics
from app.envoy.mapping import DescriptorMapping
from app.envoy.server import EnvoyPort
from app.http.access.access import Access
from app.http.server.connections import Connections
from app.http.server.intake import Intake
from app.run import envoy


@asynccontextmanager
async def opened(
    admission: Any,
    metrics: Metrics,
    is_ready: Callable[[], bool] = lambda: True,
    intake: Intake | None = None,
) -> AsyncIterator[tuple[EnvoyPort, int]]:
    """The port, and its number."""
    access = Access("the-admin-key-of-it", [ip_network("127.0.0.0/8")])
    made = envoy.port(DescriptorMapping(), admission, access, metrics, is_ready, intake or Intake())
    listener = socket.create_server(("127.0.0.1", 0))
    async with envoy.accepting(made, listener, None, Connections()):
        yield made, listener.getsockname()[1]


def channel_to(port: int) -> grpc.aio.Channel:
    """A channel of grpcio to the port."""
    return grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.enable_http_proxy", 0)])
