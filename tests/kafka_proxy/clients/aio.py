"""Idempotent producers of aiokafka that tests drive line by line: `python aio.py BOOTSTRAP USER PASSWORD`.

The commands and the outcomes are those of `go/main.go`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError


def say(*words: object) -> None:
    print(" ".join(str(word).replace("\n", " ") for word in words), flush=True)


class Sender:
    """A producer with its name and its commands, which run one after the other."""

    def __init__(self, login: Mapping[str, str], name: str) -> None:
        self._login = login
        self._name = name
        self._count = 0
        self._outcomes: set[asyncio.Task[None]] = set()
        self._producer: AIOKafkaProducer | None = None
        self.commands: asyncio.Queue[list[str]] = asyncio.Queue()

    async def run(self) -> None:
        """Run commands as they come."""
        self._producer = AIOKafkaProducer(**self._login, client_id=self._name, enable_idempotence=True)
        try:
            await self._producer.start()
        except KafkaError as error:
            say("error", self._name, repr(error))
            return
        while True:
            command, _, topic, size, *numbers = await self.commands.get()
            if command == "send":
                for _ in range(int(numbers[0])):
                    await self._send(topic, int(size))
            else:
                await self._push(topic, int(size), *map(int, numbers))

    async def _push(self, topic: str, size: int, rate: int, seconds: int) -> None:
        began, before = time.monotonic(), self._count
        number = 0
        while (elapsed := time.monotonic() - began) < seconds and number < rate * seconds:
            await asyncio.sleep(number / rate - elapsed)
            await self._send(topic, size)
            number += 1
        say("pushed", self._name, self._count - before)

    async def _send(self, topic: str, size: int) -> None:
        value = f"{self._name}:{self._count}".ljust(size).encode()
        self._count += 1
        assert self._producer is not None
        # `send` returns once there is room for the record; its future is done once that is acknowledged.
        outcome = asyncio.ensure_future(self._outcome(await self._producer.send(topic, value)))
        self._outcomes.add(outcome)
        outcome.add_done_callback(self._outcomes.discard)

    async def _outcome(self, acknowledged: asyncio.Future[object]) -> None:
        try:
            await acknowledged
        except KafkaError as error:
            say("error", self._name, repr(error))
        else:
            say("sent", self._name)


async def main(bootstrap: str, user: str, password: str) -> None:
    login = {
        "bootstrap_servers": bootstrap,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": user,
        "sasl_plain_password": password,
    }
    senders: dict[str, Sender] = {}
    running = set()
    say("ready")
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        words = line.split()
        if words[1] not in senders:
            senders[words[1]] = Sender(login, words[1])
            running.add(asyncio.create_task(senders[words[1]].run()))
        senders[words[1]].commands.put_nowait(words)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
