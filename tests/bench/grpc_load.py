"""A program that calls the rate-limit service for Envoy without a pause; prints how many answers came."""

from __future__ import annotations

import asyncio
import sys
from time import monotonic
from typing import Any, Final

import grpc

from app.envoy.protos.ratelimit_pb2 import RateLimitDescriptor, RateLimitRequest, RateLimitResponse
from app.envoy.server import METHOD

CALLS: Final = 64
"""Calls in flight, over one connection, as a worker of Envoy makes them."""


async def main(port: int, seconds: float, descriptors: int) -> int:
    """Return how many answers came; each must be OK."""
    entry = RateLimitDescriptor.Entry
    asked = [
        RateLimitDescriptor(entries=[entry(key=b"principal", value=b"user-%d" % number)])
        for number in range(descriptors)
    ]
    body = RateLimitRequest(domain="bench", descriptors=asked).SerializeToString()
    until, answers = monotonic() + seconds, 0

    async def call_on(call: Any) -> None:
        nonlocal answers
        while monotonic() < until:
            answer = RateLimitResponse.FromString(await call(body))
            assert answer.overall_code == RateLimitResponse.OK
            answers += 1

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", [("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_unary(METHOD)
        await asyncio.gather(*(call_on(call) for _ in range(CALLS)))
    return answers


if __name__ == "__main__":
    print(asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))))
