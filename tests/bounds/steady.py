"""Equal holders with a steady demand above the limit: how much of the limit they use, and their shares."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from app.domain.oracle import Oracle
from app.domain.quota import KEYS, Quota
from tests.bounds.leases import BEGIN_MS, RULES, asking, of_alice

TICK_MS = 5
RENEW_AT = 0.8


@dataclass
class Holder:
    """One holder with a steady demand.

    Attributes:
        demand: the units that the holder would spend in one tick.
        owed: the unmet demand; demand beyond four ticks is lost.
    """

    number: int
    demand: float
    lease_ms: int
    dice: random.Random
    leases: int = 0
    name: bytes = b""
    granted: float = 0.0
    left: float = 0.0
    ends_ms: int = 0
    asks_ms: int = 0
    owed: float = 0.0
    used: float = 0.0
    calls: int = 0

    def tick(self, oracle: Oracle, quota: Quota, now_ms: int) -> None:
        """Spend the demand of one tick, and renew the lease when most of it is used."""
        self.owed = min(self.owed + self.demand, self.demand * 4)
        if now_ms >= self.ends_ms:
            self.left = 0.0
        spends = min(float(int(self.owed)), self.left)
        self.left -= spends
        self.owed -= spends
        self.used += spends
        short = self.left <= self.granted * (1 - RENEW_AT) or now_ms + TICK_MS >= self.ends_ms
        if short and now_ms >= self.asks_ms:
            self._renew(oracle, quota, now_ms)

    def _renew(self, oracle: Oracle, quota: Quota, now_ms: int) -> None:
        self.calls += 1
        if self.name:
            spent = replace(asking(quota, self.granted - self.left), mode="record")
            oracle.settle(spent, of_alice(quota), RULES, now_ms, self.name)
        self.leases += 1
        wish = max(int(self.demand / TICK_MS * self.lease_ms), 1)
        name = self.number.to_bytes(8, "big") + self.leases.to_bytes(8, "big")
        ask = replace(asking(quota, wish), mode="record")
        leased = oracle.lease(ask, of_alice(quota), RULES, now_ms, name, self.lease_ms)
        self.granted = self.left = leased.granted.get(KEYS[quota.key].usage, 0.0)
        self.name = name if self.granted else b""
        self.ends_ms = now_ms + self.lease_ms if self.granted else 0
        pause_ms = max(leased.decision.throttle_ms, self.lease_ms // 10)
        self.asks_ms = now_ms + int(pause_ms * self.dice.uniform(1, 1.5))


def shares(quota: Quota, holders: int, lease_ms: int, run_ms: int, demand: float = 2.0) -> list[Holder]:
    """Run equal holders whose demand together is ``demand`` times the limit."""
    oracle = Oracle(b"k" * 32)
    each = demand * quota.limit * TICK_MS / 1000 / holders
    dice = random.Random(0)
    them = [Holder(number, each, lease_ms, dice) for number in range(holders)]
    for now in range(0, run_ms, TICK_MS):
        # each holder is first in turn
        first = now // TICK_MS % holders
        for holder in (*them[first:], *them[:first]):
            holder.tick(oracle, quota, BEGIN_MS + now)
    return them
