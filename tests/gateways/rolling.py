"""Rolling restarts of two nodes behind a gateway, while callers ask without a pause."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final

import httpx

from tests import stores
from tests.service import Service, eventually, running

CALLERS: Final = 4
PAUSE_S: Final = 0.005
"""The pause of a caller between an answer and the next ask."""
DRAIN_MS: Final = 2_000
KEPT: Final = {"limit": 0.0001, "algorithm": "token_bucket", "burst": 1_000_000, "enforcement": "deny"}
"""A bucket that keeps its charges: a twentieth of a token is refilled in the longest test."""

Caller = Callable[[], AbstractContextManager[Callable[[], int]]]
"""Opens a connection of a caller; the function asks once and returns the status."""


@dataclass(slots=True)
class Answers:
    """The answers to all callers."""

    statuses: Counter[int | str] = field(default_factory=Counter)
    slowest_s: float = 0.0

    def __str__(self) -> str:
        return f"{dict(self.statuses)}, the slowest after {self.slowest_s * 1_000:.0f} ms"


@contextmanager
def asked_by(caller: Caller, callers: int = CALLERS) -> Iterator[Answers]:
    """Ask from several threads while the context lasts; they leave the processor to the nodes."""
    answers, lock, stop = Answers(), threading.Lock(), threading.Event()

    def go_on() -> None:
        with caller() as ask:
            while not stop.is_set():
                began = time.perf_counter()
                status: int | str
                try:
                    status = ask()
                except httpx.TransportError as error:
                    status = repr(error)
                took = time.perf_counter() - began
                with lock:
                    answers.statuses[status] += 1
                    answers.slowest_s = max(answers.slowest_s, took)
                stop.wait(PAUSE_S)

    with ThreadPoolExecutor(callers) as pool:
        threads = [pool.submit(go_on) for _ in range(callers)]
        try:
            eventually(lambda: answers.statuses.total() > callers)
            yield answers
        finally:
            stop.set()
        for each in threads:
            each.result()


class Pair:
    """Two nodes with one store and one catalog; each can be restarted at its address.

    Args:
        environments: the variables of each node.
    """

    def __init__(self, stack: ExitStack, environments: Sequence[Mapping[str, str]]) -> None:
        self._stack = stack
        self._environments = environments
        self._store_url = stack.enter_context(stores.running("valkey"))
        self._database_url: str | None = None
        self.nodes: list[Service] = []
        for n in range(2):
            self.nodes.append(self._start(n, ("127.0.0.1", 0)))
            self._database_url = self.nodes[0].database_url

    def _start(self, n: int, address: tuple[str, int]) -> Service:
        drain = {"QUOTAGATE_DRAIN_MS": str(DRAIN_MS)}
        return self._stack.enter_context(
            running(
                store_url=self._store_url,
                database_url=self._database_url,
                environment={**drain, **self._environments[n]},
                address=address,
            )
        )

    def restart(self, n: int) -> None:
        """Restart a node as an operator does, and wait until the gateway asks it again."""
        assert self.nodes[n].stop() == 0
        self.nodes[n] = self._start(n, self.nodes[n].address)
        eventually(lambda: decided_by(self.nodes[n]))

    def limit(self, entity: str, principal: str) -> None:
        """Count the requests of a principal from now on at both nodes; they are never throttled."""
        self.nodes[0].put(entity, request_rate=KEPT)
        eventually(lambda: all(is_limited(node, principal) for node in self.nodes))

    def charged(self, principal: str) -> int:
        """The number of requests charged to a principal."""
        return charged(self.nodes[1], principal)


def charged(node: Service, principal: str) -> int:
    """The number of requests charged to a principal, as a node shows it."""
    ask = {"principal": principal, "usage": {"requests": 0}, "mode": "peek", "detail": True}
    observed: float = node.ask(**ask)["quotas"][0]["observed"]
    return round(observed)


def is_limited(node: Service, principal: str, usage: str = "requests") -> bool:
    """Whether a node applies a quota to the usage of a principal."""
    applied: int = node.ask(principal=principal, usage={usage: 0}, mode="peek")["applied"]
    return applied > 0


def decided_by(node: Service) -> float:
    """How many decisions a node has counted."""
    lines = node.http.get("/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith("quotagate_decisions_total{")
    )
