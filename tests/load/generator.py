"""The load generator: a program of its own with many connections, each of which asks again when answered.

`python -m tests.load.generator` reads a Load as JSON and writes an Outcome as JSON. Tests call `loading` or
`outcomes`.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

import msgspec
import uvloop

from tests.addresses import in_url

ROOT: Final = Path(__file__).parents[2]
SHOWN: Final = 5
"""How many unexpected answers are kept to be shown."""
LAST_ANSWER_WITHIN_S: Final = 20.0
"""How long it waits at the end for outstanding answers."""
STARTS_WITHIN_S: Final = 60.0
CHECK: Final = "/v1/check"
OVERLOADED: Final = "urn:quotagate:overloaded"
RETRY_AFTER_S: Final = range(1, 4)


class Load(msgspec.Struct, kw_only=True):
    """The requests to send, the number of connections, and the duration.

    Attributes:
        ask: JSON, in which ``$c`` becomes the number of the connection, ``$n`` a new number for each ask, and
            each ``$i`` a new number of its own.
        batch: how many asks one request carries; 0 sends each ask as a single decision.
        path: the path to GET instead of asking, with these ``headers``.
        body: the body to POST to the path, unchanged.
        chunk: how many bytes of the body one chunk has; 0 announces its length.
        refused: a status that is a good answer, too.
        pause_s: the pause between an answer and the next request.
        source: the address to connect from.
        ca: the certificate of the authority to trust, a PEM file; without it, no TLS.
    """

    address: tuple[str, int]
    ask: str = ""
    batch: int = 0
    path: str = ""
    headers: dict[str, str] = {}
    body: str = ""
    chunk: int = 0
    refused: str = ""
    connections: int = 1
    seconds: float
    pause_s: float = 0.0
    source: str = "127.0.0.1"
    key: str = ""
    ca: str = ""


class Outcome(msgspec.Struct, kw_only=True):
    """The result of a load: answers by status, decisions by source and by outcome.

    Attributes:
        shed: answers that refuse because of overload, as API.md defines them: status 503, or 429 for a check.
        odd: the first answers that are neither shed nor good.
        lost: connections that the node ended.
        unanswered: requests without an answer at the end.
        waits_ms: the time until each good answer.
        first_at: when each source was first seen, by the monotonic clock that all programs share.
    """

    statuses: dict[str, int]
    sources: dict[str, int]
    decisions: dict[str, int]
    shed: int
    odd: list[str]
    lost: int
    unanswered: int
    waits_ms: list[float]
    first_at: dict[str, float]


class DecisionFields(msgspec.Struct):
    """The counted fields of a decision."""

    decision: str
    source: str


class BatchFields(msgspec.Struct):
    """The answer to a batch."""

    decisions: list[DecisionFields]


class Problem(msgspec.Struct):
    """The counted field of an error."""

    type: str = ""


class Requests:
    """Makes the bytes of requests; requests that never change are made once per connection."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._pieces = re.split(r"(\$[cni])", load.ask)
        self._fresh = itertools.count()
        self._same: dict[int, bytes] = {}
        self._changing = "$n" in self._pieces or "$i" in self._pieces

    def of(self, connection: int) -> bytes:
        """Return the next request of a connection."""
        if self._changing:
            return self._made(connection)
        if connection not in self._same:
            self._same[connection] = self._made(connection)
        return self._same[connection]

    def _made(self, connection: int) -> bytes:
        load = self._load
        method, path, body = "POST", "/v1/decisions", ""
        if load.path:
            method, path, body = "POST" if load.body else "GET", load.path, load.body
        elif load.batch:
            path = "/v1/decisions:batch"
            asks = ",".join(self._ask(connection) for _ in range(load.batch))
            body = f'{{"asks":[{asks}]}}'
        else:
            body = self._ask(connection)
        key = {"Authorization": f"Bearer {load.key}"} if load.key else {}
        framing = {"Content-Length": str(len(body))}
        if load.chunk:
            body, framing = _chunked(body, load.chunk), {"Transfer-Encoding": "chunked"}
        fields = {"Host": in_url(load.address[0]), **load.headers, **key, **framing}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        head = f"{method} {path} HTTP/1.1\r\n{lines}\r\n"
        return (head + body).encode()

    def _ask(self, connection: int) -> str:
        number = next(self._fresh)
        filled = {"$c": str(connection), "$n": str(number)}
        return "".join(
            str(next(self._fresh)) if piece == "$i" else filled.get(piece, piece) for piece in self._pieces
        )


def _chunked(body: str, size: int) -> str:
    parts = (body[at : at + size] for at in range(0, len(body), size))
    return "".join(f"{len(part):x}\r\n{part}\r\n" for part in parts) + "0\r\n\r\n"


class Counts:
    """Reads answers and counts them."""

    def __init__(self, load: Load) -> None:
        self.statuses: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        self.decisions: Counter[str] = Counter()
        self.shed = self.lost = self.waiting = 0
        self.odd: list[str] = []
        self.waits_ms: list[float] = []
        self.first_at: dict[str, float] = {}
        self.over = False
        self._checks = load.path.startswith(CHECK)
        self._plain = bool(load.path) and not self._checks
        self._good = {"200", load.refused}
        self._one = msgspec.json.Decoder(DecisionFields)
        self._many = msgspec.json.Decoder(BatchFields) if load.batch else None

    def count_answer(self, head: bytes, body: bytes, began: float) -> None:
        """Count an answer to a request sent at that time."""
        now = time.monotonic()
        status = head[9:12].decode()
        self.statuses[status] += 1
        if status in self._good:
            self.waits_ms.append(round(1000 * (now - began), 2))
            if not self._plain:
                self._count(body, now)
        elif self._checks and status == "429" and self._one.decode(body).source == "store":
            self._count(body, now)
        elif self._sheds(status, head, body):
            self.shed += 1
        elif len(self.odd) < SHOWN:
            self.odd.append((head + body[:500]).decode(errors="replace"))

    def _count(self, body: bytes, now: float) -> None:
        for decision in self._many.decode(body).decisions if self._many else (self._one.decode(body),):
            self.decisions[decision.decision] += 1
            self.sources[decision.source] += 1
            self.first_at.setdefault(decision.source, now)

    def _sheds(self, status: str, head: bytes, body: bytes) -> bool:
        """Return whether an answer says that the node is overloaded, as API.md defines it."""
        after = re.search(rb"\r\nretry-after: (\d+)\r\n", head.lower())
        if after is None or int(after[1]) not in RETRY_AFTER_S:
            return False
        if self._checks:
            return status == "429" and self._one.decode(body).decision == "throttle"
        return status == "503" and msgspec.json.decode(body, type=Problem).type == OVERLOADED

    def outcome(self) -> Outcome:
        return Outcome(
            statuses=dict(self.statuses),
            sources=dict(self.sources),
            decisions=dict(self.decisions),
            shed=self.shed,
            odd=self.odd,
            lost=self.lost,
            unanswered=self.waiting,
            waits_ms=self.waits_ms,
            first_at=self.first_at,
        )


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    _transport: asyncio.Transport

    def __init__(self, number: int, load: Load, requests: Requests, counts: Counts) -> None:
        self._number = number
        self._pause_s = load.pause_s
        self._requests = requests
        self._counts = counts
        self._buffer = bytearray()
        self._began = 0.0
        self._waits = False
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._ask()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head_ends = self._buffer.find(b"\r\n\r\n") + 4
        if head_ends < 4:
            return
        head = bytes(self._buffer[:head_ends])
        length = re.search(rb"\r\ncontent-length: (\d+)\r\n", head.lower())
        ends = head_ends + (int(length[1]) if length else 0)
        if len(self._buffer) < ends:
            return
        body = bytes(self._buffer[head_ends:ends])
        del self._buffer[:ends]
        self._waits = False
        self._counts.waiting -= 1
        self._counts.count_answer(head, body, self._began)
        if self._pause_s and not self._counts.over:
            asyncio.get_running_loop().call_later(self._pause_s, self._ask)
        else:
            self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        self._counts.lost += not self._counts.over or self._waits
        if not self.ended.done():
            self.ended.set_result(None)

    def _ask(self) -> None:
        if self._transport.is_closing():
            return
        if self._counts.over:
            self._transport.close()
            return
        self._waits = True
        self._counts.waiting += 1
        self._began = time.monotonic()
        self._transport.write(self._requests.of(self._number))


async def generate(load: Load) -> Outcome:
    """Send a load and count the answers."""
    loop = asyncio.get_running_loop()
    requests, counts = Requests(load), Counts(load)
    tls = ssl.create_default_context(cafile=load.ca) if load.ca else None
    ended = []
    for number in range(load.connections):
        _, connection = await loop.create_connection(
            lambda number=number: Connection(number, load, requests, counts),
            *load.address,
            local_addr=(load.source, 0),
            ssl=tls,
        )
        ended.append(connection.ended)
    await asyncio.sleep(load.seconds)  # the duration of the load
    counts.over = True
    await asyncio.wait(ended, timeout=LAST_ANSWER_WITHIN_S)
    return counts.outcome()


class RunningLoad:
    """A running load generator."""

    def __init__(self, load: Load) -> None:
        self._ends_within_s = STARTS_WITHIN_S + load.seconds + LAST_ANSWER_WITHIN_S
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  a pipe holds only 64 KiB; closed by end()
        self.program = subprocess.Popen(
            [sys.executable, "-m", "tests.load.generator"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=self._output,
        )
        assert self.program.stdin is not None
        self.program.stdin.write(msgspec.json.encode(load))
        self.program.stdin.close()
        self.program.stdin = None

    def outcome(self) -> Outcome:
        """Return the outcome when the load is over."""
        assert self.program.wait(self._ends_within_s) == 0
        self._output.seek(0)
        return msgspec.json.decode(self._output.read(), type=Outcome)

    def end(self) -> None:
        """Kill the program if it is still running."""
        self.program.kill()
        self.program.wait()
        self._output.close()


@contextmanager
def loading(*loads: Load) -> Iterator[list[RunningLoad]]:
    """Start loads, each as a program of its own."""
    running: list[RunningLoad] = []
    try:
        running += [RunningLoad(load) for load in loads]
        yield running
    finally:
        for each in running:
            each.end()


def outcomes(*loads: Load) -> list[Outcome]:
    """Run loads at the same time and return their outcomes."""
    with loading(*loads) as running:
        return [each.outcome() for each in running]


if __name__ == "__main__":
    print(
        msgspec.json.encode(
            uvloop.run(generate(msgspec.json.decode(sys.stdin.buffer.read(), type=Load)))
        ).decode()
    )
