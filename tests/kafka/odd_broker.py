"""A broker with scripted answers that a real broker cannot be made to give."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from kafka.protocol.admin import (
    DescribeClusterRequest,
    DescribeClusterResponse,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
)
from kafka.protocol.metadata import ApiVersionsRequest, ApiVersionsResponse, MetadataRequest, MetadataResponse

Directory = DescribeLogDirsResponse.DescribeLogDirsResult
Node = DescribeClusterResponse.DescribeClusterBroker

UNSUPPORTED_VERSION: Final = 35
MESSAGES: Final = {
    request.API_KEY: (request, response)
    for request, response in (
        (ApiVersionsRequest, ApiVersionsResponse),
        (MetadataRequest, MetadataResponse),
        (DescribeClusterRequest, DescribeClusterResponse),
        (DescribeLogDirsRequest, DescribeLogDirsResponse),
    )
}
NEWEST: Final = {
    ApiVersionsRequest: 4,
    MetadataRequest: 12,
    DescribeClusterRequest: 1,
    DescribeLogDirsRequest: 4,
}

Answer = Callable[[Any], Any]
"""The answer to a request; bytes are sent unchanged, and then the connection is cut."""


class OddBroker:
    """Speaks Kafka's protocol; its answers and its newest versions can be changed at any time."""

    def __init__(self, broker_id: int) -> None:
        self.id = broker_id
        self.port = 0
        self.newest: dict[Any, int] = dict(NEWEST)
        self.nodes: list[tuple[int, int]] = []
        """The ids and ports of the brokers that it names."""
        self.answers: dict[Any, Answer] = {
            DescribeClusterRequest: self._cluster,
            MetadataRequest: self._metadata,
            DescribeLogDirsRequest: lambda _: telling(Directory(error_code=0, log_dir="/d", topics=[])),
        }
        self.connections = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection until it ends."""
        self.connections += 1
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4))
                answer = await self._answer(await reader.readexactly(size))
                writer.write(answer if isinstance(answer, bytes) else answer[0])
                await writer.drain()
                if not isinstance(answer, bytes):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, frame: bytes) -> bytes | tuple[bytes]:
        key, version = int.from_bytes(frame[:2]), int.from_bytes(frame[2:4])
        kind, response_kind = MESSAGES[key]
        if version > self.newest[kind]:
            # Like Kafka: answer ApiVersions in the oldest form, and hang up on anything else.
            if kind is not ApiVersionsRequest:
                return (b"",)
            version, answer = 0, self._versions(UNSUPPORTED_VERSION)
            correlation = int.from_bytes(frame[4:8])
        else:
            request = kind.decode(frame, version=version, header=True)
            correlation = request.header.correlation_id
            answer = self._versions(0) if kind is ApiVersionsRequest else self.answers[kind](request)
            if isinstance(answer, Awaitable):
                answer = await answer
        if isinstance(answer, bytes):
            return (answer,)
        assert isinstance(answer, response_kind)
        answer.API_VERSION = version
        answer.with_header(correlation_id=correlation)
        encoded: bytes = bytes(answer.encode(header=True, framed=True))
        return encoded

    def _versions(self, error_code: int) -> Any:
        Known = ApiVersionsResponse.ApiVersion  # noqa: N806 - it is a class
        known = [
            Known(api_key=kind.API_KEY, min_version=0, max_version=newest)
            for kind, newest in self.newest.items()
        ]
        return ApiVersionsResponse(error_code=error_code, api_keys=known, throttle_time_ms=0)

    def _cluster(self, _request: Any) -> Any:
        nodes = [
            Node(broker_id=number, host="127.0.0.1", port=port, rack=None) for number, port in self.nodes
        ]
        return DescribeClusterResponse(
            throttle_time_ms=0,
            error_code=0,
            error_message=None,
            endpoint_type=1,
            cluster_id="odd",
            controller_id=self.id,
            brokers=nodes,
            authorized_operations=[],
        )

    def _metadata(self, _request: Any) -> Any:
        nodes = [
            MetadataResponse.MetadataResponseBroker(node_id=number, host="127.0.0.1", port=port, rack=None)
            for number, port in self.nodes
        ]
        return MetadataResponse(
            throttle_time_ms=0, brokers=nodes, cluster_id="odd", controller_id=self.id, topics=[]
        )


def telling(*directories: Any, error_code: int = 0) -> Any:
    """An answer about log directories."""
    return DescribeLogDirsResponse(throttle_time_ms=0, error_code=error_code, results=list(directories))


def directory(path: str, total_bytes: int, usable_bytes: int, error_code: int = 0) -> Any:
    """The description of one broker."""
    return Directory(
        error_code=error_code, log_dir=path, topics=[], total_bytes=total_bytes, usable_bytes=usable_bytes
    )


@asynccontextmanager
async def running(count: int = 2) -> AsyncIterator[Mapping[int, OddBroker]]:
    """Run this many of them, with ids from 1 on; each of them names all."""
    brokers = {number: OddBroker(number) for number in range(1, count + 1)}
    servers = []
    try:
        for broker in brokers.values():
            server = await asyncio.start_server(broker.serve, "127.0.0.1", 0)
            servers.append(server)
            broker.port = server.sockets[0].getsockname()[1]
        for broker in brokers.values():
            broker.nodes = [(other.id, other.port) for other in brokers.values()]
            broker.answers[DescribeLogDirsRequest] = lambda _: telling(directory("/d", 1000, 400))
        yield brokers
    finally:
        for server in servers:
            server.close()
