"""Adversaries that take leases: they spend late, die, also ask directly, lower limits and set clocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

from app.domain.ask import Ask
from app.domain.entity import Entity
from app.domain.ladder import MatchingRules
from app.domain.oracle import Oracle
from app.domain.quota import KEYS, Quota

ALICE = Entity.of(user="alice")
BEGIN_MS = 1_000_000
RULES = MatchingRules()


class Lessor(Protocol):
    """The target of the attack: it admits at once, or grants leases."""

    def admits(self, quota: Quota, amount: int, now_ms: int) -> bool: ...

    def lease(self, quota: Quota, wish: int, now_ms: int, name: bytes, lease_ms: int) -> float: ...

    def settle(self, quota: Quota, spent: float, now_ms: int, name: bytes) -> bool: ...


class OracleLessor:
    """The oracle as the target."""

    def __init__(self) -> None:
        self.oracle = Oracle(b"k" * 32)

    def admits(self, quota: Quota, amount: int, now_ms: int) -> bool:
        ask = asking(quota, amount)
        return self.oracle.decide(ask, of_alice(quota), RULES, now_ms).decision == "admit"

    def lease(self, quota: Quota, wish: int, now_ms: int, name: bytes, lease_ms: int) -> float:
        ask = replace(asking(quota, wish), mode="record")
        leased = self.oracle.lease(ask, of_alice(quota), RULES, now_ms, name, lease_ms)
        return leased.granted.get(KEYS[quota.key].usage, 0.0)

    def settle(self, quota: Quota, spent: float, now_ms: int, name: bytes) -> bool:
        ask = replace(asking(quota, spent), mode="record")
        return self.oracle.settle(ask, of_alice(quota), RULES, now_ms, name)


class ChargingLessor(OracleLessor):
    """The planted fault: a lease is charged when it is granted, and nothing is held."""

    def lease(self, quota: Quota, wish: int, now_ms: int, name: bytes, lease_ms: int) -> float:
        while wish > 0 and not self.admits(quota, wish, now_ms):
            wish //= 2
        return wish

    def settle(self, quota: Quota, spent: float, now_ms: int, name: bytes) -> bool:
        return False


def asking(quota: Quota, amount: float) -> Ask:
    """An ask of alice to spend an amount of one quota."""
    return Ask({KEYS[quota.key].usage: amount}, None, "alice")


def of_alice(quota: Quota) -> dict[str, dict[Entity, Quota]]:
    """The quota, set on alice."""
    return {quota.key: {ALICE: quota}}


Style = Literal["late", "late and settled", "at once", "part", "unused"]
STYLES: tuple[Style, ...] = ("late", "late", "late and settled", "at once", "part", "unused")
"""When holders spend: in the last millisecond, without or with settling; at once; a part; or nothing."""


class Move(NamedTuple):
    """Wait, then act; ``amount`` None means as much as possible."""

    gap_ms: int
    what: Literal["ask", "lease", "lower", "raise", "back", "ahead"]
    amount: int | None
    lease_ms: int = 0
    style: Style = "late"


@dataclass
class Slice:
    """One holder's spending from a lease, and the time of its settlement."""

    name: bytes
    settles_ms: int
    spends: list[tuple[int, float]]


@dataclass
class Attack:
    """One run of a plan against a target.

    Times are real: by a clock that is never set. The store's clock may be set back or ahead.

    Attributes:
        spent: the real spending, as (time, amount).
        behind_ms: how far the store's clock was set back so far; below 0 if it was set ahead.
        out: units that holders had left when the store's clock was set ahead, which ended their leases early.
    """

    target: Lessor
    quota: Quota
    dice: random.Random
    now_ms: int = 0
    behind_ms: int = 0
    spent: list[tuple[int, float]] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    names: int = 0
    out: float = 0.0

    @property
    def store_ms(self) -> int:
        return BEGIN_MS + self.now_ms - self.behind_ms

    def run(self, plan: tuple[Move, ...]) -> None:
        full = self.quota
        for move in plan:
            self._wait(move.gap_ms)
            if move.what == "ask":
                self._ask(move.amount)
            elif move.what == "lease":
                self._take(move)
            elif move.what == "back":
                self.behind_ms += move.amount or 0
            elif move.what == "ahead":
                self._set_ahead(move.amount or 0)
            elif move.what == "lower":
                lower = max(full.limit // 4, 1)
                self.quota = replace(full, limit=lower, burst=full.burst / 4, max_debt=lower * 2.0)
            else:
                self.quota = full
        self._wait(20_000)

    def _wait(self, gap_ms: int) -> None:
        """Let time pass; holders settle at their planned times."""
        until = self.now_ms + gap_ms
        while due := [s for s in self.slices if s.settles_ms <= until]:
            first = min(due, key=lambda s: s.settles_ms)
            self.now_ms = first.settles_ms
            used = sum(amount for _, amount in first.spends)
            self.target.settle(self.quota, used, self.store_ms, first.name)
            self.slices.remove(first)
        self.now_ms = until

    def _set_ahead(self, by_ms: int) -> None:
        """Set the store's clock ahead; earlier spending moves back by as much, away from later spending."""
        self.behind_ms -= by_ms
        self.out += sum(amount for at, amount in self.spent if at > self.now_ms)
        self.spent = [(at - by_ms * (at <= self.now_ms), amount) for at, amount in self.spent]

    def _ask(self, amount: int | None) -> None:
        left = 1 << 14 if amount is None else amount
        if amount == 0:
            self.target.admits(self.quota, 0, self.store_ms)
        size = left
        while size > 0 and left > 0:
            if size <= left and self.target.admits(self.quota, size, self.store_ms):
                left -= size
                self.spent.append((self.now_ms, size))
            else:
                size //= 2

    def _take(self, move: Move) -> None:
        self.names += 1
        name = self.names.to_bytes(16, "big")
        wish = 1 << 14 if move.amount is None else move.amount
        granted = self.target.lease(self.quota, wish, self.store_ms, name, move.lease_ms)
        if not granted:
            return
        last = self.now_ms + move.lease_ms - 1  # a holder stops in time
        spends: list[tuple[int, float]] = []
        settles: int | None = None
        if move.style in ("late", "late and settled"):
            spends = [(last, granted)]
            settles = last if move.style == "late and settled" else None
        elif move.style == "at once":
            spends = [(self.now_ms, granted)]
            settles = self.dice.choice((None, self.now_ms, last))
        elif move.style == "part":
            half = granted // 2
            spends = [(self.now_ms, half), (last, granted // 4)]
            settles = last
        else:
            settles = self.dice.choice((self.now_ms, last, None))
        self.spent += spends
        if settles is not None:
            self.slices.append(Slice(name, settles, spends))


def most_in_a_window(spent: list[tuple[int, float]], window_ms: int) -> float:
    """The most that was spent in any span of one window."""
    best = inside = 0.0
    spent = sorted(spent)
    first = 0
    for now, amount in spent:
        inside += amount
        while now - spent[first][0] >= window_ms:
            inside -= spent[first][1]
            first += 1
        best = max(best, inside)
    return best


def plans(
    quota: Quota, dice: random.Random, number: int, *, ahead: bool = False
) -> Iterator[tuple[Move, ...]]:
    """Random plans, with waits at the edges of samples, windows and leases.

    Args:
        ahead: set the store's clock ahead too.
    """
    window = quota.bound[1]
    jumps = (1, quota.sample_ms, window // 2, 2 * window, 50 * window)
    for _ in range(number):
        clocks, limits = dice.random() < 0.3, dice.random() < 0.3
        moves = []
        for _ in range(dice.randint(4, 24)):
            gap, roll = _gap(quota, dice), dice.random()
            amount = dice.choice((None, None, 0, 1, dice.randint(1, 2_000)))
            if ahead and roll < 0.1:
                moves.append(Move(gap, "ahead", dice.choice(jumps)))
            elif clocks and roll < 0.1:
                moves.append(Move(gap, "back", dice.choice(jumps)))
            elif limits and roll < 0.2:
                moves.append(Move(gap, dice.choice(("lower", "raise")), None))
            elif roll < 0.5:
                moves.append(Move(gap, "ask", amount))
            else:
                lease_ms = dice.choice((2, quota.sample_ms, window // 2, window, dice.randint(1, 3 * window)))
                moves.append(Move(gap, "lease", amount or None, lease_ms, dice.choice(STYLES)))
        yield tuple(moves)


def _gap(quota: Quota, dice: random.Random) -> int:
    window = quota.bound[1]
    if dice.random() < 0.3:
        return dice.randint(0, window)
    return max(dice.choice((0, 1, quota.sample_ms, window // 2, window)) + dice.choice((-1, 0, 0, 1)), 0)


def worst(
    new: Callable[[], Lessor], quota: Quota, number: int, *, seed: int = 0, ahead: bool = False
) -> float:
    """The worst ratio of the spending in a window to the limit's allowance, over all plans.

    Units left in leases when the store's clock is set ahead are subtracted: they are the stated exception.
    """
    dice = random.Random(seed)
    window = quota.bound[1]
    ratio = 0.0
    for plan in plans(quota, dice, number, ahead=ahead):
        attack = Attack(new(), quota, dice)
        attack.run(plan)
        most = most_in_a_window(attack.spent, window) - attack.out
        ratio = max(ratio, most / (quota.limit * window / 1000))
    return ratio
