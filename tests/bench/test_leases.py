"""The cost of a decision from a lease, and the calls of a proxy that makes 100,000 decisions a second."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import IO

import pytest

from quotagate_client import Client
from tests.clients.scripted import ADMITTED, answer, serving
from tests.proofs import print_table
from tests.service import running

pytestmark = pytest.mark.bench

ROUNDS, TAKES = 15, 200_000
PRINCIPALS, CHUNKS, LINES = 20, 300, 500
LINE = b"x" * 99 + b"\n"
RATE = {"limit": 1_000_000_000, "enforcement": "deny"}
TICKS = os.sysconf("SC_CLK_TCK")
COMMAND = "make bench T=tests/bench/test_leases.py"
COLUMNS = ("", "measured", "target")
SINK = """
import asyncio
async def take(reader, writer):
    while await reader.read(1 << 20):
        pass
    writer.close()
async def main():
    server = await asyncio.start_server(take, "127.0.0.1", 0, limit=1 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
PROXY = Path(__file__).parents[2] / "examples" / "leases" / "proxy.py"


def test_local_decision_takes_less_than_a_microsecond():
    with serving() as script, Client(script.url) as client:
        body = {**ADMITTED, "lease": "a", "granted": {"fetch_bytes": 1e12}, "lease_ms": 10_000_000}
        script.plays(answer({**body, "renew_ms": 9_000_000, "settled": []}))
        work = client.leased(principal="alice", usage={"fetch_bytes": 1})
        assert work.decide().source == "local"
        taking, deciding = [], []
        for _ in range(ROUNDS):
            take, decide = work.take, work.decide
            began = time.process_time()
            for _ in range(TAKES):
                take(1)
            between = time.process_time()
            for _ in range(TAKES):
                decide(1)
            deciding.append((time.process_time() - between) / TAKES * 1e6)
            taking.append((between - began) / TAKES * 1e6)
        assert work.calls == 1
    rows = [
        (name, f"{median(times):.2f} us, least {min(times):.2f}", "below 1 us")
        for name, times in (("take", taking), ("decide", deciding))
    ]
    print_table("A decision from a lease in hand", COMMAND, COLUMNS, rows)
    assert min(taking) < 1.0
    assert min(deciding) < 1.0


async def send(host: str, port: int) -> None:
    async def one(number: int) -> None:
        _, writer = await asyncio.open_connection(host, port)
        writer.write(b"user-%d\n" % number)
        for _ in range(CHUNKS):
            writer.write(LINE * LINES)
            await writer.drain()
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(one(number) for number in range(PRINCIPALS)))


def cpu_s(pid: int) -> float:
    """The processor time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextmanager
def started(*command: str | Path, **environment: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A program and its output, killed at the end of the block."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as program:
        assert program.stdout is not None
        try:
            yield program, program.stdout
        finally:
            program.kill()


def test_proxy_decides_100000_lines_a_second_on_one_core():
    with running() as node, started(sys.executable, "-c", SINK) as (_, port_of_sink):
        node.put("user=*", producer_byte_rate=RATE)
        to = f"127.0.0.1:{port_of_sink.readline().strip()}"
        options = ("--listen", "127.0.0.1:0", "--url", node.url, "--to", to)
        with started(sys.executable, PROXY, *options, QUOTAGATE_KEY=node.admin_key) as (proxy, printed):
            host, _, port = printed.readline().split()[-1].rpartition(":")
            before, began = cpu_s(proxy.pid), time.monotonic()
            asyncio.run(send(host, int(port)))
            wanted = PRINCIPALS * CHUNKS * LINES
            counts = {"lines": 0}
            while counts["lines"] < wanted:
                proxy.send_signal(signal.SIGUSR1)
                counts = {k: int(v) for k, v in (one.split("=") for one in printed.readline().split())}
                time.sleep(0.05)  # the polling interval
            spent, lasted = cpu_s(proxy.pid) - before, time.monotonic() - began
    a_core, calls = wanted / spent, counts["calls"] / lasted
    rows = [
        ("decisions in a second of one core's time", f"{a_core:,.0f}", "100,000"),
        ("decisions a second", f"{wanted / lasted:,.0f}", ""),
        ("calls to the service a second", f"{calls:.0f}", "below 200"),
        ("decisions a call", f"{wanted / counts['calls']:,.0f}", ""),
    ]
    print_table(f"A proxy of {PRINCIPALS} principals", COMMAND, COLUMNS, rows)
    assert a_core >= 100_000
    assert calls < 200
