"""Sends the cases over many connections at once, checks each answer, and counts them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from tests.fuzz.answers import Answer, Fault, Line
from tests.fuzz.canary import Canary
from tests.fuzz.cases import LEDGERS, Case, Expected, Request, Visit
from tests.fuzz.generate import case

CALLERS: Final = 48
LONGEST_TRAIN: Final = 12
ADMINISTRATORS: Final = 4
"""How many callers change quotas at once; with dozens, on a busy machine, some would get 503."""
ANSWER_WITHIN_S: Final = 120.0
"""A later answer is a fault: the case hangs."""
MAX_FAULTS: Final = 10
LONGEST_PAUSE_S: Final = 0.03
"""The pause between two pieces of a slow sender; the other connections continue meanwhile."""


@dataclass
class Storm:
    """Sends cases, by number, to the node at an address.

    Attributes:
        counts: how often a kind of case was answered with a status; 0 is no answer.
        spent: the sum of charges to each ledger, according to the answers.
        faults: the faults found, each with the number of its case, which can be repeated.
    """

    seed: int
    address: tuple[str, int]
    canaries: Sequence[Canary]
    counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    spent: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(LEDGERS, 0)))
    faults: list[str] = field(default_factory=list)
    number: int = 0
    requests: int = 0
    administrators: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(ADMINISTRATORS))

    async def rage(self, until: int) -> None:
        """Continue until this total number of requests."""
        async with asyncio.TaskGroup() as group:
            for canary in self.canaries:
                group.create_task(self._caller(canary, until))

    async def _caller(self, canary: Canary, until: int) -> None:
        """Send trains of requests on a connection that stays open, and visits between two trains."""
        chance = canary.chance
        connection: Connection | None = None
        while self.requests < until and len(self.faults) < MAX_FAULTS:
            train: list[tuple[int, Request]] = []
            visit: tuple[int, Visit] | None = None
            length = chance.randint(1, LONGEST_TRAIN)
            while len(train) < length and visit is None:
                number, made = self._next()
                if isinstance(made, Visit):
                    visit = number, made
                else:
                    train.append((number, made))
            if connection is None or chance.random() < 0.05:
                if connection is not None:
                    await connection.close()
                connection = await Connection.open(self.address, chance)
            changes = any(request.expected.changes for _, request in train)
            async with self.administrators if changes else contextlib.nullcontext():
                went_well = await self._train(connection, train, canary)
            if not went_well:
                await connection.close()
                connection = None
            if visit is not None:
                await self._visit(*visit, chance)
        if connection is not None:
            await connection.close()

    def _next(self) -> tuple[int, Case]:
        self.number += 1
        made = case(self.seed, self.number)
        self.requests += made.requests
        self.kinds[made.kind] += made.requests
        return self.number, made

    async def _train(
        self, connection: Connection, train: Sequence[tuple[int, Request]], canary: Canary
    ) -> bool:
        """Send requests in one write, with the canary's question among them; return whether all went well."""
        text, method, wanted = canary.question()
        at = canary.chance.randint(0, len(train))
        texts = [request.text for _, request in train]
        connection.writer.write(b"".join([*texts[:at], text, *texts[at:]]))
        place = 0
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                for place, (_, request) in enumerate(train):
                    if place == at:
                        canary.check(wanted, await connection.must_answer(method))
                    self._judge(
                        request.kind, request.expected, await connection.must_answer(request.expected.method)
                    )
                if at == len(train):
                    canary.check(wanted, await connection.must_answer(method))
        except (Fault, OSError, TimeoutError, ValueError) as error:
            number, kind = (train[place][0], train[place][1].kind) if train else (0, canary.name)
            self._fault(number, f"{kind}, or {canary.name} at the same time", error)
            return False
        return True

    async def _visit(self, number: int, visit: Visit, chance: Random) -> None:
        connection = await Connection.open(self.address, chance)
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                await self._visited(visit, connection, chance)
        except (Fault, OSError, TimeoutError, ValueError) as error:
            self._fault(number, visit.kind, error)
        finally:
            await connection.close()

    async def _visited(self, visit: Visit, connection: Connection, chance: Random) -> None:
        for piece in visit.sends:
            connection.writer.write(piece)
            if visit.slow:
                await asyncio.sleep(chance.random() * LONGEST_PAUSE_S)
        if visit.end in ("cut", "reset"):
            self.counts[visit.kind, 0] += visit.requests
            if visit.end == "reset":
                connection.reset()
            return
        for expected in visit.expected:
            self._judge(visit.kind, expected, await connection.must_answer(expected.method))
        if visit.end == "half":
            connection.end_our_side()
        more = await self._what_else(visit, connection)
        if not visit.expected and not more:
            self.counts[visit.kind, 0] += visit.requests

    async def _what_else(self, visit: Visit, connection: Connection) -> int:
        """Read to the end of the connection; return the number of answers."""
        more = 0
        try:
            while (answer := await connection.line.next("GET")) is not None:
                answer.check("GET")
                self.counts[visit.kind, answer.status] += 1
                more += 1
        except ConnectionResetError:  # it closed with something of ours unread
            pass
        return more

    def _judge(self, kind: str, expected: Expected, answer: Answer) -> None:
        self.counts[kind, answer.status] += 1
        answer.check(expected.method)
        if answer.is_shed:
            return
        if answer.status not in expected.statuses:
            wanted = ", ".join(map(str, sorted(expected.statuses)[:6]))
            raise Fault(f"{answer.status} and not {wanted}: {answer.body[:500]!r}")
        if expected.spends:
            said = answer.json()
            for decision in said.get("decisions", [said]):
                if (decision["decision"], decision["charged"], decision["source"]) != (
                    "admit",
                    True,
                    "store",
                ):
                    raise Fault(f"a ledger got {decision}")
            self.spent.update(expected.spends)

    def _fault(self, number: int, kind: str, error: BaseException) -> None:
        said = "".join(traceback.format_exception_only(error)).strip()
        self.faults.append(f"case({self.seed}, {number}) {kind}: {said}")


@dataclass
class Connection:
    """One connection of ours."""

    writer: asyncio.StreamWriter
    line: Line

    @classmethod
    async def open(cls, address: tuple[str, int], chance: Random) -> Connection:
        # Several addresses of this host, as each has only so many ports that are not still in use.
        here = (f"127.0.0.{chance.randint(2, 200)}", 0)
        reader, writer = await asyncio.open_connection(*address, local_addr=here)
        return cls(writer, Line(reader))

    async def must_answer(self, method: str) -> Answer:
        answer = await self.line.next(method)
        if answer is None:
            raise Fault("the connection ended before the answer")
        return answer

    def end_our_side(self) -> None:
        with contextlib.suppress(OSError):  # it is closed already
            self.writer.write_eof()

    def reset(self) -> None:
        """Leave with a reset instead of an orderly end."""
        own: Any = self.writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()
