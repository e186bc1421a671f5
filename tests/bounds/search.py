"""Search for the times and sizes of asks that get the most from a limiter within one window."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Limiter(Protocol):
    """The target of an attack. It admits an amount and remembers it, or refuses and remembers nothing."""

    def admits(self, amount: int, at_ms: int) -> bool: ...


class Move(NamedTuple):
    """Wait, then take an amount: 0 (which only touches the bucket), 1, …, or None for all that is left."""

    gap_ms: int
    most: int | None


Plan = tuple[Move, ...]


@dataclass(frozen=True)
class Target:
    """A limiter to attack.

    Attributes:
        new: returns an empty limiter.
        allowance: the units that the limit allows in one window.
        window_ms: the length of the window.
        gaps: waits after which something happens in the limiter: edges, and 1 ms before and after each.
    """

    new: Callable[[], Limiter]
    allowance: int
    window_ms: int
    gaps: tuple[int, ...]


class Found(NamedTuple):
    """The worst plan that a search found."""

    ratio: float
    plan: Plan
    tried: int


def worst(target: Target, tries: int, seed: int = 0) -> Found:
    """The worst ratio in any span of one window, by random plans and hill climbing from the best."""
    dice = random.Random(seed)
    best = Found(0.0, (), 0)
    for tried in range(1, tries + 1):
        climbing = best.plan and dice.random() < 0.7
        plan = mutated(best.plan, target, dice) if climbing else drawn(target, dice)
        ratio = most_in_a_window(target, taken(target.new(), plan, target.allowance)) / target.allowance
        if ratio > best.ratio or (ratio == best.ratio and len(plan) < len(best.plan)):
            best = Found(ratio, plan, tried)
    return best._replace(tried=tries)


def drawn(target: Target, dice: random.Random) -> Plan:
    return tuple(move(target, dice) for _ in range(dice.randint(2, 8)))


def mutated(plan: Plan, target: Target, dice: random.Random) -> Plan:
    """A plan with one move changed, shifted, added or removed."""
    at = dice.randrange(len(plan))
    changed = {
        "change": (move(target, dice),),
        "shift": (plan[at]._replace(gap_ms=max(0, plan[at].gap_ms + dice.choice((-2, -1, 1, 2)))),),
        "add": (plan[at], move(target, dice)),
        "drop": () if len(plan) > 1 else (plan[at],),
    }
    return (*plan[:at], *changed[dice.choice(tuple(changed))], *plan[at + 1 :])


def move(target: Target, dice: random.Random) -> Move:
    gap = dice.choice(target.gaps) if dice.random() < 0.8 else dice.randint(0, target.window_ms)
    return Move(gap, dice.choice((None, None, 0, 1, dice.randint(1, target.allowance))))


def taken(limiter: Limiter, plan: Plan, allowance: int) -> list[tuple[int, int]]:
    """The (time, amount) pairs that a plan gets; to take all that is left, amounts are halved down to 1."""
    now, got = 0, []
    for gap_ms, most in plan:
        now += gap_ms
        got += [(now, amount) for amount in _asked(limiter, now, allowance if most is None else most)]
    return got


def _asked(limiter: Limiter, now: int, most: int) -> Iterator[int]:
    if most == 0:
        limiter.admits(0, now)
    amount, left = most, most if most <= 1 else 4 * most
    while amount > 0 and left > 0:
        if amount <= left and limiter.admits(amount, now):
            left -= amount
            yield amount
        else:
            amount //= 2


def most_in_a_window(target: Target, got: Sequence[tuple[int, int]]) -> int:
    """The most admitted in any span of one window: its first and last millisecond lie window - 1 apart."""
    best = inside = first = 0
    for now, amount in got:
        inside += amount
        while now - got[first][0] >= target.window_ms:
            inside -= got[first][1]
            first += 1
        best = max(best, inside)
    return best
