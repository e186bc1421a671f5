"""A server that got SIGTERM serves on for a while, and each answer ends its connection."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import pytest

from tests.http.conftest import Node, eventually, serving
from tests.http.test_protocol import ASK, LIVE, Caller, calling

LONG_S = 600.0


@pytest.fixture
async def node(way: str) -> AsyncIterator[Node]:
    async with serving(drain_s=LONG_S) as node:
        yield node


async def told_to_stop(node: Node) -> None:
    node.server.handle_exit(signal.SIGTERM, None)
    await eventually(lambda: node.drain.has_begun)


async def closes(caller: Caller, request: bytes) -> None:
    """Check that a request is answered, and that its answer ends the connection."""
    caller.send(request)
    (answer,) = await caller.hears(200)
    assert answer.headers[b"connection"] == b"close"
    await caller.hears_no_more()


@pytest.mark.parametrize("before", [0, 1, 3], ids=["new", "asked once", "known"])
@pytest.mark.parametrize("request_", [ASK, LIVE], ids=["hot", "other"])
async def test_open_connections_get_their_answer_and_its_end(node: Node, before: int, request_: bytes):
    async with calling(node) as caller:
        for _ in range(before):
            caller.send(request_)
            await caller.hears(200)
        await told_to_stop(node)
        await closes(caller, request_)


@pytest.mark.parametrize("request_", [ASK, LIVE], ids=["hot", "other"])
async def test_new_connections_are_accepted_and_answered(node: Node, request_: bytes):
    await told_to_stop(node)
    async with calling(node) as caller:
        await closes(caller, request_)


@pytest.mark.parametrize("before", [0, 2], ids=["new", "known"])
async def test_request_in_flight_is_answered_and_ends_its_connection(node: Node, before: int):
    async with calling(node) as caller:
        for _ in range(before):
            caller.send(ASK)
            await caller.hears(200)
        node.admission.gate = asyncio.Event()
        caller.send(ASK)
        await eventually(lambda: node.admission.waiting)
        await told_to_stop(node)
        node.admission.gate.set()
        (answer,) = await caller.hears(200)
        assert answer.headers[b"connection"] == b"close"
        await caller.hears_no_more()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_second_signal_ends_the_drain(node: Node, number: signal.Signals):
    async with calling(node) as idle:
        idle.send(LIVE)
        await idle.hears(200)
        await told_to_stop(node)
        node.server.handle_exit(number, None)
        await idle.hears_no_more()


async def test_sigint_ends_without_a_drain(node: Node):
    async with calling(node) as idle:
        idle.send(LIVE)
        await idle.hears(200)
        node.server.handle_exit(signal.SIGINT, None)
        await idle.hears_no_more()


async def test_idle_connections_end_with_the_drain():
    async with serving(drain_s=0.2) as node, calling(node) as idle, calling(node) as silent:
        idle.send(LIVE)
        await idle.hears(200)
        node.server.handle_exit(signal.SIGTERM, None)
        await idle.hears_no_more()
        await silent.hears_no_more()


async def test_connections_that_the_kernel_has_accepted_at_the_end_are_answered(node: Node):
    """The listener is not looked at any more, as if the signal came first."""
    await told_to_stop(node)
    acceptor = node.server._acceptor
    assert acceptor is not None
    asyncio.get_running_loop().remove_reader(acceptor._listener)
    async with calling(node) as caller:
        caller.send(ASK)
        node.server.handle_exit(signal.SIGTERM, None)
        await caller.hears(200)
        await caller.hears_no_more()
