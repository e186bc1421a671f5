"""A service of the clients' leases without I/O: the oracle answers, in simulated time."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import httpx

from app.domain.ask import Ask
from app.domain.oracle import Oracle
from app.domain.quota import KEYS, Quota
from quotagate_client import CheckHeaders, Retries
from quotagate_client.dialogues import Dialogue, Dialogues, Send, Sleep, carried_out
from quotagate_client.leases import Holder
from tests.bounds.leases import BEGIN_MS, RULES, of_alice

T = TypeVar("T")
TICK_MS = 5


@dataclass
class Lessor:
    """Grants and settles leases of one quota of alice.

    Attributes:
        calls: how many requests it answered.
        granted: the units of each lease, by its name.
    """

    quota: Quota
    now_ms: int = 0
    calls: int = 0
    granted: dict[str, float] = field(default_factory=dict)
    oracle: Oracle = field(default_factory=lambda: Oracle(b"k" * 32))
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def usage(self) -> str:
        return KEYS[self.quota.key].usage

    def dialogues(self) -> Dialogues:
        """The dialogues of one client."""
        return Dialogues(Retries(), 0.1, CheckHeaders(), lambda: self.now_ms / 1000, self.dice)

    def holder(self, lease_ms: int) -> Holder:
        """A holder of alice's leases; one unit of its work is one unit of the quota."""
        return Holder(self.dialogues(), {"principal": "alice"}, {self.usage: 1}, lease_ms)

    def carry_out(self, dialogue: Dialogue[T]) -> T:
        return carried_out(dialogue, self.answer)

    def answer(self, sent: Send | Sleep) -> httpx.Response:
        assert isinstance(sent, Send), "a holder never sleeps"
        self.calls += 1
        assert sent.content is not None
        body = json.loads(sent.content)
        answered = self._leased(body) if sent.path == "/v1/leases" else self._decided(body)
        return httpx.Response(200, json=answered)

    def _decided(self, body: dict[str, Any]) -> dict[str, Any]:
        ask = Ask(body["usage"], None, body["principal"], deny=True)
        decision = self.oracle.decide(ask, of_alice(self.quota), RULES, BEGIN_MS + self.now_ms)
        return _decision(decision) | {"applied": 1}

    def _leased(self, body: dict[str, Any]) -> dict[str, Any]:
        quotas, now = of_alice(self.quota), BEGIN_MS + self.now_ms
        for each in body["settle"]:
            spent = each["usage"][self.usage]
            assert spent <= self.granted.pop(each["lease"]), "a lease is settled once, and not beyond it"
            ask = Ask({self.usage: spent}, None, "alice", mode="record")
            self.oracle.settle(ask, quotas, RULES, now, bytes.fromhex(each["lease"]))
        lease_ms = body["lease_ms"]
        answer = {"lease": None, "granted": {}, "lease_ms": lease_ms, "renew_ms": int(lease_ms * 0.8)}
        wish = Ask(body["ask"]["usage"], None, "alice", mode="record")
        if not wish.usage[self.usage]:
            return answer | _decision(None)
        name = self.calls.to_bytes(16, "big")
        leased = self.oracle.lease(wish, quotas, RULES, now, name, lease_ms)
        if leased.granted:
            self.granted[name.hex()] = leased.granted[self.usage]
            answer |= {"lease": name.hex(), "granted": leased.granted}
        return answer | _decision(leased.decision)


def _decision(decision: Any) -> dict[str, Any]:
    outcome, throttle_ms = ("admit", 0) if decision is None else (decision.decision, decision.throttle_ms)
    return {
        "decision": outcome,
        "throttle_ms": throttle_ms,
        "charged": False,
        "source": "store",
        "limited_by": None,
    }


@dataclass
class Worker:
    """A steady stream of work that a holder decides; refused work is lost.

    Attributes:
        spent: the admitted work: (time in ms, units).
        asked: how many units came up.
    """

    lessor: Lessor
    holder: Holder
    a_tick: float
    spent: list[tuple[int, float]] = field(default_factory=list)
    asked: int = 0
    owed: float = 0.0

    def tick(self) -> None:
        if self.holder.due_s() == 0:
            self.lessor.carry_out(self.holder.renew())
        self.owed += self.a_tick
        while self.owed >= 1:
            self.owed -= 1
            self.asked += 1
            admitted = self.holder.take()
            if not admitted:
                admitted = self.lessor.carry_out(self.holder.decide(1)).may_go_ahead
            if admitted:
                self.spent.append((self.lessor.now_ms, 1.0))


def working(lessor: Lessor, holders: int, lease_ms: int, a_second: float, run_ms: int) -> list[Worker]:
    """Equal workers, after so much time."""
    a_tick = a_second * TICK_MS / 1000 / holders
    workers = [Worker(lessor, lessor.holder(lease_ms), a_tick) for _ in range(holders)]
    for number, worker in enumerate(workers):
        worker.owed = number / holders  # so that they do not all ask in one tick
    for now in range(0, run_ms, TICK_MS):
        lessor.now_ms = now
        first = now // TICK_MS % holders
        for worker in (*workers[first:], *workers[:first]):
            worker.tick()
    return workers


def lowered(quota: Quota, part: float) -> Quota:
    """The quota with a part of its limit."""
    return replace(quota, limit=quota.limit * part, burst=quota.burst * part)
