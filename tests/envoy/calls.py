"""A client of the rate-limit service, and nodes that offer it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from app.envoy.protos.health_pb2 import HealthCheckRequest, HealthCheckResponse
from app.envoy.protos.ratelimit_pb2 import RateLimitDescriptor, RateLimitRequest, RateLimitResponse
from app.envoy.server import HEALTH, METHOD
from tests.ports import free_port
from tests.service import Service, running

WITHIN_S = 60.0
Entries = Mapping[str, str] | Sequence[tuple[str, str | bytes]]
Descriptor = RateLimitDescriptor | Entries


def descriptor(entries: Entries, hits: int | None = None) -> RateLimitDescriptor:
    """A descriptor with these entries; ``hits`` is its own addend."""
    pairs = entries.items() if isinstance(entries, Mapping) else entries
    made = RateLimitDescriptor(
        entries=[
            RateLimitDescriptor.Entry(
                key=key.encode(), value=value if isinstance(value, bytes) else value.encode()
            )
            for key, value in pairs
        ]
    )
    if hits is not None:
        made.hits_addend.value = hits
    return made


def request(*descriptors: Descriptor, domain: str = "shop", hits: int = 0) -> RateLimitRequest:
    """A request with these descriptors."""
    return RateLimitRequest(
        domain=domain,
        descriptors=[d if isinstance(d, RateLimitDescriptor) else descriptor(d) for d in descriptors],
        hits_addend=hits,
    )


@dataclass(frozen=True, slots=True)
class Client:
    """A client on one connection; ``key`` is sent with each call."""

    channel: grpc.Channel
    key: str | None = None

    def ask(
        self, *descriptors: Descriptor, domain: str = "shop", hits: int = 0, within_s: float = WITHIN_S
    ) -> RateLimitResponse:
        """The answer to a request."""
        return self.send(request(*descriptors, domain=domain, hits=hits), within_s)

    def send(self, asked: RateLimitRequest, within_s: float = WITHIN_S) -> RateLimitResponse:
        return RateLimitResponse.FromString(self.send_bytes(asked.SerializeToString(), within_s))

    def send_bytes(self, body: bytes, within_s: float = WITHIN_S) -> bytes:
        metadata = [("authorization", f"Bearer {self.key}")] if self.key else []
        answer: bytes = self.channel.unary_unary(METHOD)(body, timeout=within_s, metadata=metadata)
        return answer

    def code(self, *descriptors: Descriptor, domain: str = "shop", hits: int = 0) -> str:
        """The overall code: OK or OVER_LIMIT."""
        return RateLimitResponse.Code.Name(self.ask(*descriptors, domain=domain, hits=hits).overall_code)

    def codes(self, *descriptors: Descriptor, hits: int = 0) -> list[str]:
        """The code of each descriptor."""
        statuses = self.ask(*descriptors, hits=hits).statuses
        return [RateLimitResponse.Code.Name(status.code) for status in statuses]

    def health(self, service: str = "") -> str:
        call = self.channel.unary_unary(
            f"/{HEALTH}/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        status = call(HealthCheckRequest(service=service), timeout=WITHIN_S).status
        return HealthCheckResponse.ServingStatus.Name(status)


@contextmanager
def serving(
    mapping: Path | None = None, environment: Mapping[str, str] | None = None, **arguments: Any
) -> Iterator[tuple[Service, int]]:
    """A node with the service; takes the arguments of ``tests.service.running``."""
    port = free_port()
    settings = {"QUOTAGATE_ENVOY_PORT": str(port), **(environment or {})}
    if mapping is not None:
        settings["QUOTAGATE_ENVOY_MAPPING"] = str(mapping)
    with running(environment=settings, **arguments) as node:
        yield node, port


@contextmanager
def connected(
    port: int, *, key: str | None = None, credentials: grpc.ChannelCredentials | None = None
) -> Iterator[Client]:
    """A client of a node on this machine."""
    options: Sequence[tuple[str, Any]] = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
    made = (
        grpc.insecure_channel(f"127.0.0.1:{port}", options)
        if credentials is None
        else grpc.secure_channel(f"localhost:{port}", credentials, options)
    )
    with made as channel:
        yield Client(channel, key)
