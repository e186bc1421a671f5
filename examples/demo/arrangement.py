"""The programs of the demo: Quotagate with its own home, a site, and nginx between people and the site."""
# ruff: noqa: INP001  an example is files to read and run, not a package

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import sys
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from app.node.children import Child
from app.node.command_lines import quotagate

ROOT: Final = Path(__file__).parents[2]
ADDRESS: Final = "127.0.0.7"
"""The address of the guests; all others come from 127.0.0.1."""
GUESTS: Final = ("guest1", "guest2", "guest3")
PASSWORD: Final = "demo"  # noqa: S105  everybody's, at a site on loopback that lives for a minute
WITHIN_S: Final = 60.0


class DidNotStart(Exception):
    """A program of the demo is missing or did not start; the text says why."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The URLs and the home of Quotagate; without nginx, why it is missing."""

    quotagate: str
    home: Path
    nginx: str | None
    why_not: str


async def arrange(stack: AsyncExitStack, folder: Path) -> Arrangement:
    """Start all programs; the stack stops them, the last first."""
    port, home = free_port(stack), folder / "home"
    settings = {"QUOTAGATE_HOME": str(home), "QUOTAGATE_PORT": str(port)}
    url = f"http://127.0.0.1:{port}"
    await start(stack, folder / "quotagate", quotagate("up"), f"{url}/health/ready", settings)
    try:
        nginx, why_not = await start_nginx(stack, folder / "nginx", port), ""
    except DidNotStart as error:
        nginx, why_not = None, str(error)
    return Arrangement(url, home, nginx, why_not)


async def start_nginx(stack: AsyncExitStack, folder: Path, quotagate_port: int) -> str:
    """Start the gateway of `examples/nginx` with ports and people of the demo; return its URL."""
    places = (str(ROOT / ".tools" / "debian" / "bin"), os.environ.get("PATH", ""), "/usr/sbin")
    nginx = shutil.which("nginx", path=os.pathsep.join(places))
    if nginx is None:
        raise DidNotStart("there is no nginx here, a package of that name brings it")
    if sys.platform != "linux":
        raise DidNotStart(f"only Linux has {ADDRESS}, where guests behind nginx would come from")
    site = await stack.enter_async_context(await asyncio.start_server(welcome, "127.0.0.1", 0))
    port = free_port(stack)
    changes = {
        "listen 8000;": f"listen 127.0.0.1:{port};",
        "listen [::]:8000;": "",  # not every machine has IPv6
        "server 127.0.0.1:8080 ": f"server 127.0.0.1:{quotagate_port} ",
        "server 127.0.0.1:9000;": f"server 127.0.0.1:{site.sockets[0].getsockname()[1]};",
    }
    shutil.copytree(ROOT / "examples" / "nginx", folder)
    text = (folder / "quotagate.conf").read_text(encoding="utf-8")
    for line, other in changes.items():
        assert line in text, f"quotagate.conf has no {line!r}"
        text = text.replace(line, other)
    (folder / "quotagate.conf").write_text(text, encoding="utf-8")
    passwords = (f"{name}:{{PLAIN}}{PASSWORD}\n" for name in ("alice", "bob", "mallory", *GUESTS))
    (folder / "passwords").write_text("".join(passwords), encoding="utf-8")
    # One process: worker processes of root's nginx could not read this folder.
    options = ("-p", ".", "-c", "nginx.conf", "-e", "stderr", "-g", "daemon off; master_process off;")
    await start(stack, folder, [nginx, *options], f"http://127.0.0.1:{port}")
    return f"http://127.0.0.1:{port}"


async def start(
    stack: AsyncExitStack, folder: Path, command: list[str], url: str, settings: dict[str, str] | None = None
) -> None:
    """Start a program in a folder and wait until it answers; the stack stops it."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("QUOTAGATE_")}
    in_folder = ("sh", "-c", 'mkdir -p "$0" && cd "$0" && exec "$@" >log 2>&1', str(folder))
    child = Child(folder.name, [*in_folder, *command], env=bare | (settings or {}), stop_within_s=WITHIN_S)
    stack.push_async_callback(child.stop)
    await child.start()
    death = asyncio.ensure_future(child.wait())
    with suppress(TimeoutError):
        async with asyncio.timeout(WITHIN_S), httpx.AsyncClient(trust_env=False) as client:
            while not death.done():
                with suppress(httpx.HTTPError):
                    if (await client.get(url)).status_code < 500:
                        death.cancel()
                        return
                await asyncio.sleep(0.05)
    raise DidNotStart(f"{folder.name} did not start: {(folder / 'log').read_text(encoding='utf-8').strip()}")


async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The site: every request that reaches it is welcome."""
    with suppress(OSError, asyncio.IncompleteReadError):
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nWelcome\n")
            await writer.drain()
    writer.close()


def free_port(stack: AsyncExitStack) -> int:
    """A free port below the ephemeral ports of the system.

    On Linux, a socket that does not listen keeps others from the port while the stack is open. A server with
    SO_REUSEADDR can listen there all the same.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        held = stack.enter_context(socket.socket())
        with suppress(OSError):
            held.bind(("127.0.0.1", port))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sys.platform != "linux":
                held.close()  # there, nothing else could listen on the port
            return port
    raise DidNotStart("no port is free")
