"""Leases: granted parts of a quota, from which a program decides by itself, and their renewal.

A `Holder` does no I/O. Both clients carry out its dialogues, one at a time; `take` may be called meanwhile.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Final, TypedDict, cast

from quotagate_client.asks import Ask
from quotagate_client.dialogues import Dialogue, Dialogues
from quotagate_client.errors import Problem, QuotagateError
from quotagate_client.results import Decision, Grant

LONGEST_MS: Final = 10_000
LONGEST_PRODUCE_MS: Final = 1_000
LEASE_MS: Final = 500
RENEW_AT: Final = 0.8
"""After this part of a lease is spent, the next lease is asked for."""
USED_WITHIN: Final = 0.7
"""A wish is the demand in this part of a lease's time. It is less than ``RENEW_AT``, because a lease waits
until the last fifth of the lease before it is spent, and must be spent before its own end."""
STOP_AT: Final = 0.98
"""After this part of its time a lease is not spent from any more: clocks do not run equally fast."""
SMOOTHING: Final = 0.5
"""The weight of the newest measurement of the demand."""
PAUSE: Final = 0.1
"""How long to wait, as a part of a lease, after less than the wish was granted."""
PAUSE_JITTER: Final = 0.5
AWAY_S: Final = 10.0
"""How long to ask directly after the service could not or would not grant leases."""
FAILED_S: Final = 1.0
"""How long to ask directly after a call failed."""
INTEGERS: Final = frozenset({"requests", "connections", "mutations"})
MOST: Final = 2**53 - 1

GRANTED: Final = Decision("admit", 0, charged=True, applied=1, source="local")
"""The decision on work that a lease covers."""


class LeasedNames(TypedDict, total=False):
    """The names that a lease is for."""

    principal: str | None
    client_id: str | None
    ip: str | None
    broker: str | None
    listener: str | None


@dataclass(slots=True)
class Slice:
    """A lease in hand.

    Attributes:
        granted: the granted amounts, by usage field.
        units: the units of work that the amounts cover.
        left: the unspent units; for the current lease the holder counts them.
        ends_s: when to stop, by the client's clock.
        renew_s: when to ask for the next lease at the latest.
    """

    name: str
    granted: Mapping[str, float]
    units: float
    left: float
    ends_s: float
    renew_s: float


class Holder:
    """Holds leases for one caller's work, and decides by itself as long as they last.

    Args:
        usage: of one unit of work; `take` counts in these units.
        lease_ms: how long a lease lasts; of ``produce_bytes`` the service grants at most 1,000.
        wake: called when the next lease should be asked for.

    Attributes:
        calls: the number of calls to the service, for leases and for single decisions.
    """

    def __init__(
        self,
        dialogues: Dialogues,
        names: LeasedNames,
        usage: Mapping[str, float],
        lease_ms: int = LEASE_MS,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        if not usage or not all(0 < amount <= MOST for amount in usage.values()) or "producer_ids" in usage:
            raise ValueError("usage must have a number above 0 for each field, and no producer_ids")
        if not 1 <= lease_ms <= LONGEST_MS:
            raise ValueError(f"lease_ms must be from 1 to {LONGEST_MS}")
        self.calls = 0
        self._dialogues = dialogues
        self._clock = dialogues.clock
        self._names = {name: value for name, value in names.items() if value is not None}
        self._usage = usage
        self._lease_ms = min(lease_ms, LONGEST_PRODUCE_MS) if "produce_bytes" in usage else lease_ms
        self._wake = wake
        self._turn = Lock()
        self._slice: Slice | None = None
        self._next: Slice | None = None
        self._spent: list[Slice] = []  # leases to settle with the next call
        self._left = 0.0
        self._low = -1.0
        self._ends_s = -math.inf
        self._is_low = False
        self._wanted = 0.0
        self._since_s = self._clock()
        self._demand: float | None = None
        self._paused_until_s = -math.inf
        self._direct_until_s = -math.inf
        self._meanwhile: Decision | None = None

    def take(self, units: float = 1.0) -> bool:
        """Spend units of the lease in hand; False if it has too few, or is over. Never waits."""
        with self._turn:
            left = self._left - units
            if not 0 <= left <= self._left or self._clock() >= self._ends_s:
                return self._missed(units)
            self._wanted += units
            self._left = left
            if left > self._low:
                return True
            self._low = -1.0
            self._is_low = True
        self._wake()
        return True

    def decide(self, units: float) -> Dialogue[Decision]:
        """Decide after `take` found too little: by the next lease, by the last refusal, or by asking.

        Raises:
            QuotagateError: a direct call to the service failed.
        """
        if not 0 <= units <= MOST:
            raise ValueError("units must be a number from 0")
        if self._taken(units):
            return GRANTED
        if self._clock() >= self._direct_until_s:
            if (known := self._known(units)) is not None:
                return known
            yield from self._lease(units)
            if self._taken(units):
                return GRANTED
            if self._clock() >= self._direct_until_s and (known := self._known(units)) is not None:
                return known
        self.calls += 1
        ask = {**self._names, "usage": self._amounts(units), "enforcement": "deny"}
        return (yield from self._dialogues.decide(cast("Ask", ask)))

    def due_s(self) -> float | None:
        """Return in how many seconds to call `renew`; None if not before `take` asks for it."""
        now = self._clock()
        with self._turn:
            last = self._next or self._slice
            at = math.inf if last is None else last.renew_s
            if self._is_low and self._next is None:
                at = min(at, self._paused_until_s)
            return None if at == math.inf else max(at - now, 0.0)

    def renew(self) -> Dialogue[None]:
        """Ask for the next lease if that is due; give back a lease whose time is nearly over."""
        if self.due_s() != 0.0:
            return
        now = self._clock()
        with self._turn:
            last = self._next or self._slice
            timed = last is not None and now >= last.renew_s
            idle = timed and not self._wanted
            self._is_low = False
        if timed:
            self._put_back()
        if now < self._direct_until_s or now < self._paused_until_s or idle:
            yield from self._settle()
        else:
            yield from self._lease(0.0)

    def close(self) -> Dialogue[None]:
        """Give back the unspent units."""
        self._put_back()
        yield from self._settle()

    def _missed(self, units: float) -> bool:
        """Spend units of the next lease, as the current one has too few; without one, wake the renewal."""
        if not 0 <= units <= MOST:
            return False
        self._wanted += units
        if self._spend(units):
            return True
        if not self._is_low and self._next is None and self._clock() >= self._direct_until_s:
            self._is_low = True
            self._wake()
        return False

    def _spend(self, units: float) -> bool:
        """Spend units of the current lease, or of the next one if the current one has too few."""
        now = self._clock()
        if units > self._left or now >= self._ends_s:
            after = self._next
            if after is None or units > after.units or now >= after.ends_s:
                return False
            self._retire()
            self._install(after)
            self._next = None
        self._left -= units
        return True

    def _taken(self, units: float) -> bool:
        with self._turn:
            return self._spend(units)

    def _known(self, units: float) -> Decision | None:
        """The last decision on units that no lease covers, repeated until the pause is over."""
        wait_s = self._paused_until_s - self._clock()
        if wait_s <= 0 or self._meanwhile is None:
            return None
        if self._meanwhile.may_go_ahead:  # without its store the service does not limit
            return self._meanwhile
        last = self._next or self._slice
        if last is not None and units > last.units:
            return None  # more than a lease covers
        return replace(self._meanwhile, throttle_ms=max(math.ceil(wait_s * 1000), 1))

    def _lease(self, units: float) -> Dialogue[None]:
        """Ask for a lease of the demand, or of ``units`` if that is more."""
        began = self._clock()
        wish = max(self._wish(began), units)
        with self._turn:
            if self._left == 0 or units > self._left:  # so this call settles it
                self._retire()
        try:
            grant = yield from self._call(wish)
        except QuotagateError as error:
            refused = isinstance(error, Problem) and error.status < 500
            self._direct_until_s = self._clock() + (AWAY_S if refused else FAILED_S)
            return
        pause_s = self._dialogues.jittered(self._lease_ms / 1000 * PAUSE, PAUSE_JITTER)
        decision = grant.decision
        if grant.lease is not None:
            self._receive(grant, grant.lease, wish, began, pause_s)
        elif decision.decision == "reject":
            self._direct_until_s = self._clock() + AWAY_S
        else:
            self._paused_until_s = self._clock() + max(
                self._dialogues.jittered(decision.throttle_ms / 1000), pause_s
            )
            self._meanwhile = decision
        with self._turn:
            self._is_low = False

    def _receive(self, grant: Grant, name: str, wish: float, began: float, pause_s: float) -> None:
        per = self._usage
        units = min(grant.granted.get(field, 0.0) / amount for field, amount in per.items())
        seconds = grant.lease_ms / 1000
        slice_ = Slice(
            name, grant.granted, units, units, began + seconds * STOP_AT, began + grant.renew_ms / 1000
        )
        self._meanwhile = None
        self._paused_until_s = -math.inf
        if units < wish:
            self._paused_until_s = began + pause_s
            self._meanwhile = replace(grant.decision, decision="throttle", source="local")
        with self._turn:
            if self._next is not None:
                self._spent.append(self._next)
                self._next = None
            if self._left > 0 and self._clock() < self._ends_s:
                self._next = slice_
            else:
                self._retire()
                self._install(slice_)

    def _install(self, slice_: Slice) -> None:
        """Spend from this lease from now on."""
        self._slice, self._left, self._ends_s = slice_, slice_.left, slice_.ends_s
        self._low = slice_.units - slice_.units * RENEW_AT
        self._is_low = False

    def _retire(self) -> None:
        """Spend no more from the lease in hand; the next call settles it."""
        if self._slice is not None:
            self._slice.left = self._left
            self._spent.append(self._slice)
        self._slice, self._left, self._low, self._ends_s = None, 0.0, -1.0, -math.inf

    def _put_back(self) -> None:
        """Spend no more from any lease."""
        with self._turn:
            self._retire()
            if self._next is not None:
                self._spent.append(self._next)
            self._next = None

    def _settle(self) -> Dialogue[None]:
        """Settle spent and returned leases, without another wish; if that fails, the leases lapse."""
        if self._spent:
            try:
                yield from self._call(0.0)
            except QuotagateError:
                self._direct_until_s = self._clock() + FAILED_S

    def _call(self, wish: float) -> Dialogue[Grant]:
        now = self._clock()
        settled = [
            {"lease": slice_.name, "usage": self._spent_of(slice_)}
            for slice_ in self._spent
            if now < slice_.ends_s  # a lease that is over counts as spent already
        ]
        self._spent.clear()
        body: dict[str, Any] = {
            "ask": {**self._names, "usage": self._amounts(wish)},
            "lease_ms": self._lease_ms,
            "settle": settled,
        }
        self.calls += 1
        return (yield from self._dialogues.lease(json.dumps(body, ensure_ascii=False).encode()))

    def _wish(self, now: float) -> float:
        """The units for the demand during one lease, smoothed over the last leases."""
        with self._turn:
            wanted, self._wanted = self._wanted, 0.0
        seconds = self._lease_ms / 1000
        measured = wanted / max(now - self._since_s, seconds * PAUSE)
        before = measured if self._demand is None else self._demand
        self._since_s, self._demand = now, before + (measured - before) * SMOOTHING
        return min(
            float(max(math.ceil(self._demand * seconds * USED_WITHIN), 1)), MOST / max(self._usage.values())
        )

    def _amounts(self, units: float) -> dict[str, float]:
        """The usage of so many units."""
        return {
            field: math.ceil(units * amount) if field in INTEGERS else units * amount
            for field, amount in self._usage.items()
        }

    def _spent_of(self, slice_: Slice) -> dict[str, float]:
        spent = self._amounts(slice_.units - slice_.left)
        return {field: min(amount, slice_.granted[field]) for field, amount in spent.items()}
