"""The programs of the example: Quotagate, a real broker, and the proxy between the broker and its clients."""
# ruff: noqa: INP001  an example is files to read and run, not a package

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from app.node.children import Child
from app.node.command_lines import quotagate
from examples.demo.arrangement import DidNotStart, free_port, start

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
PROJECT: Final = ROOT / "integrations" / "kafka-proxy"
JARS: Final = ROOT / ".tools" / "kafka-example"
WITHIN_S: Final = 300.0
SMALL: Final = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
BROKER: Final = """\
process.roles=broker,controller
node.id=1
listeners=PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{broker}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
controller.quorum.bootstrap.servers=127.0.0.1:{controller}
log.dirs={folder}/log
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
log.cleaner.dedupe.buffer.size=4194304
"""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The home of Quotagate, and all addresses; clients connect to `kafka`."""

    quotagate: str
    home: Path
    kafka: str


async def arrange(stack: AsyncExitStack, folder: Path, say: Callable[[str], None]) -> Arrangement:
    """Build missing parts and start all programs; the stack stops them, the last first."""
    say("The proxy and the broker are built. The first time, that takes minutes.")
    await asyncio.to_thread(build)
    say("A Kafka broker, Quotagate and the proxy start. Press q or Ctrl-C to end it all.")
    broker = await start_broker(stack, folder / "broker")
    port, home = free_port(stack), folder / "home"
    settings = {"QUOTAGATE_HOME": str(home), "QUOTAGATE_PORT": str(port)}
    url = f"http://127.0.0.1:{port}"
    await start(stack, folder / "quotagate", quotagate("up"), f"{url}/health/ready", settings)
    return Arrangement(url, home, await start_proxy(stack, folder / "proxy", broker, url, home))


def build() -> None:
    """Build the proxy, and fetch the broker's jars; nothing is done twice."""
    said(["make", "--no-print-directory", "-C", str(PROJECT)])
    if not (JARS / "pom.xml").is_file():
        goal = ("dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={JARS}")
        said([str(PROJECT.parent / "mvn.sh"), "-q", "-B", "-f", str(HERE / "pom.xml"), *goal])
        shutil.copy(HERE / "pom.xml", JARS)


async def start_broker(stack: AsyncExitStack, folder: Path) -> str:
    """Start one broker that is its own controller; return its address."""
    ports = {"broker": free_port(stack), "controller": free_port(stack)}
    properties = written(folder / "broker.properties", BROKER.format(folder=folder, **ports))
    classes = [java(), *SMALL, "-cp", f"{JARS}/*"]
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    formatting = ("format", "--standalone", f"--cluster-id={cluster}", "-c", str(properties))
    await asyncio.to_thread(said, [*classes, "kafka.tools.StorageTool", *formatting])
    await start_and_hear(stack, folder, [*classes, "kafka.Kafka", str(properties)], "Kafka Server started")
    return f"127.0.0.1:{ports['broker']}"


async def start_proxy(stack: AsyncExitStack, folder: Path, broker: str, quotagate: str, home: Path) -> str:
    """Start the proxy of `integrations/kafka-proxy/example.yaml` with its own ports; return its address."""
    port = free_port(stack)
    changes = {
        "bootstrapServers: 127.0.0.1:9092": f"bootstrapServers: {broker}",
        "bootstrapAddress: 127.0.0.1:19092": f"bootstrapAddress: 127.0.0.1:{port}",
        "url: http://127.0.0.1:8080": f"url: {quotagate}",
        "keyFile: quotagate.key": f"keyFile: {home / 'admin.key'}",
        "port: 9190": f"port: {free_port(stack)}",
    }
    text = (PROJECT / "example.yaml").read_text(encoding="utf-8")
    for line, other in changes.items():
        assert line in text, f"example.yaml has no {line!r}"
        text = text.replace(line, other)
    file = written(folder / "proxy.yaml", text)
    program = [java(), *SMALL, "-jar", str(PROJECT / "target" / "proxy.jar"), str(file)]
    await start_and_hear(stack, folder, program, "ready")
    return f"127.0.0.1:{port}"


def written(file: Path, text: str) -> Path:
    """Write a text to a file in a new folder; return the file."""
    file.parent.mkdir()
    file.write_text(text, encoding="utf-8")
    return file


async def start_and_hear(stack: AsyncExitStack, folder: Path, command: list[str], word: str) -> None:
    """Start a program and wait until its log has a word."""
    log = folder / "log.txt"
    writing = ("sh", "-c", 'exec "$@" >"$0" 2>&1', str(log))
    child = Child(folder.name, [*writing, *command], env=dict(os.environ), stop_within_s=WITHIN_S)
    stack.push_async_callback(child.stop)
    await child.start()
    death = asyncio.ensure_future(child.wait())
    try:
        async with asyncio.timeout(WITHIN_S):
            while not (log.is_file() and word in log.read_text(encoding="utf-8", errors="replace")):
                if death.done():
                    raise DidNotStart(f"{folder.name} did not start: {log.read_text(encoding='utf-8')}")
                await asyncio.sleep(0.05)
    finally:
        death.cancel()


def java() -> str:
    """A Java of 17 or later: the machine's, or the one that built the proxy."""
    unpacked = (ROOT / ".tools" / "debian" / "root" / "usr" / "lib" / "jvm").glob("*/bin/java")
    found = shutil.which("java") or next(map(str, unpacked), None)
    if found is None:
        raise DidNotStart("there is no Java here; on Debian: apt-get install openjdk-17-jre-headless")
    return found


def said(command: list[str]) -> None:
    """Run a program to its end, in the proxy's folder, which has Maven's settings."""
    done = subprocess.run(
        command, cwd=PROJECT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise DidNotStart(f"{command[0]} failed:\n{done.stdout}{done.stderr}")
