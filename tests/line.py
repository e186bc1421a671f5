"""A caller's connection to a node, kept open and much faster than httpx."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

Json = dict[str, Any]


class Line:
    """One connection, one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, ask: Json) -> tuple[int, Json]:
        """The status and the body of one decision."""
        return await self.send("POST", "/v1/decisions", json.dumps(ask))

    async def send(self, method: str, path: str, body: str = "") -> tuple[int, Json]:
        """The status and the JSON body of one answer."""
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body.encode())}\r\n\r\n"
        self._writer.write((head + body).encode())
        answer = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(answer.split("content-length: ")[1].split()[0])
        return int(answer.split()[1]), json.loads(await self._reader.readexactly(length))


@asynccontextmanager
async def line(address: tuple[str, int]) -> AsyncIterator[Line]:
    """A connection to a node at an address."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        yield Line(reader, writer)
    finally:
        writer.close()
        await writer.wait_closed()
