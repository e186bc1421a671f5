"""The state machine with charges that are undone, perhaps long after, and with other events in between."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

from hypothesis import strategies as st
from hypothesis.stateful import rule
from msgspec.structs import replace as with_

from app.admission.compiled import compiled_again
from app.domain.ask import Ask, Mode
from app.domain.quota import KEYS, Algorithm
from app.domain.undo import Stamp
from app.store.compiled_quota import DENY, RECORDS
from app.store.encoding import undo_plan
from app.store.port import Charge, UndoResult
from tests.charging import decision_on, plan_for
from tests.contract import machine
from tests.contract.histories import asks
from tests.contract.machine import RULES, SECRET, Difference, Machine

BETWEEN = (
    *("nothing", "asks", "reset", "burst", "back", "there and back", "debt", "failover"),
    *("refund", "return", "far", "lowered"),
)
"""The events between a charge and its undo."""

COUNTED = [key for key in KEYS if key != "producer_ids_rate"]
"""The keys whose charges can be undone."""


class Charged(NamedTuple):
    """A charge, with its stamps by the store and by the oracle."""

    charge: Charge
    stored: Stamp
    expected: Stamp


class UndoMachine(Machine):
    """Also sends asks that are charged with stamps, and undoes charges later."""

    def __init__(self) -> None:
        super().__init__()
        self.charged: list[Charged] = []

    @rule(ask=asks(), mode=st.sampled_from(("admit", "admit", "record")), deny=st.booleans())
    def charge(self, ask: Ask, mode: Mode, deny: bool) -> None:
        """Charge an ask in a way that can be undone."""
        self._charge(replace(ask, producer_ids=None, mode=mode, deny=deny, detail=True, id=None))

    def _charge(self, ask: Ask) -> None:
        ask = replace(ask, at_ms=self.now)
        plan = plan_for(ask, self.quotas, RULES, SECRET)
        if plan is None:
            return
        (answer,) = self.loop.run_until_complete(self.store.decide([with_(plan, stamped=True)]))
        expected = self.oracle.decide(ask, self.quotas, RULES, self.now)
        got = decision_on(ask, plan, answer, sequential=self.sequential)
        if got != expected:
            raise Difference(f"{ask}\nstore:  {got}\noracle: {expected}")
        if not expected.charged:
            return
        for charge, stored, result in zip(plan.charges, answer.stamps, answer.results, strict=True):
            if result.reason == "store_full":
                continue
            own = self.oracle.stamp(charge.applied, self.now)
            if stored[1:3] != own[1:3] or not stored.birth:
                raise Difference(f"{ask}\nstamp of the store: {stored}\nof the oracle: {own}")
            self.charged.append(Charged(charge, stored, own))
            self.met["charged with a stamp"] += 1

    @rule(data=st.data())
    def undo(self, data: Any) -> None:
        """Undo one of the last charges, under the present quota."""
        if not self.charged:
            return
        place = data.draw(st.integers(max(len(self.charged) - 12, 0), len(self.charged) - 1))
        self._undo(self.charged.pop(place))

    @rule(
        key=st.sampled_from(COUNTED),
        amount=st.sampled_from((1, 1, 2, 3, 20)),
        between=st.lists(st.sampled_from(BETWEEN), min_size=3, max_size=6),
        ms=st.sampled_from((0, 1, 50, 400, 1_200)),
        algorithm=st.sampled_from(("sampled_rate", "token_bucket")),
    )
    def regret(self, key: str, amount: int, between: list[str], ms: int, algorithm: Algorithm) -> None:
        """Several times, charge an ask and undo it after an event that may make the undo impossible."""
        for entity, quota in list(self.quotas[key].items()):
            own = replace(quota, algorithm=algorithm, limit=8, burst=24.0, shadow=False)
            self._set(key, entity, own)
        usage = {KEYS[key].usage: amount * KEYS[key].per_unit}
        ask = Ask(usage, None, "a", "c", "10.0.0.1", "1", "L", detail=True)
        for each in between:
            self._regret(ask, each, ms)

    def _regret(self, ask: Ask, between: str, ms: int) -> None:
        if between in {"return", "there and back"}:
            self.now += 61_000  # the bucket is full, and its samples are over
        before = len(self.charged)
        self._charge(replace(ask, mode="admit" if ms < 50 else "record"))
        charged, self.charged = self.charged[before:], self.charged[:before]
        self.now += ms
        if between == "reset":
            for each in charged:
                self.loop.run_until_complete(self.store.forget([each.charge.key]))
                self.oracle.reset(each.charge.applied, 0)
            self._charge(replace(ask, mode="record"))
        if between in {"burst", "lowered"}:
            for each in charged:
                self._lower(each.charge)
        if between == "back":
            self.now -= 90_000
        if between == "debt":
            self.owe(charged[0].charge.quota.key if charged else COUNTED[0], "admit", 3, deny=False)
        if between == "failover":
            cast("Any", self.redis).execute_command("DEBUG", "CHANGE-REPL-ID")
            self.oracle.history += b"1"
        if between == "there and back":
            self.now -= 90_000
            self._decide([ask])
            self.now += 90_000
        if between == "far":
            self.now += 4_000
        if between in {"refund", "return"}:
            self._decide([replace(ask, mode="refund")] * (2 if between == "refund" else 1))
        if between not in {"nothing", "return", "lowered"}:  # nothing is written after it was lowered
            self._decide([ask, replace(ask, mode="record")])
        for each in charged:
            given = self._undo(each)
            self.met[f"given back after {between}"] += given > 0
            self.met[f"not given back after {between}"] += given == 0 < each.stored.taken
        self._decide([replace(ask, mode="peek")])

    def _lower(self, charge: Charge) -> None:
        """Lower the limit and the burst of a quota, so that the next charge cuts off tokens."""
        key = charge.quota.key
        for entity, quota in list(self.quotas[key].items()):
            self._set(key, entity, replace(quota, limit=quota.limit / 2, burst=max(quota.burst / 2, 1.0)))

    def _undo(self, charged: Charged) -> float:
        charge, stored, expected = charged
        found = charge.applied
        for quotas in self.quotas[found.quota.key].values():
            if (quotas.identity, quotas.epoch) == (found.quota.identity, found.quota.epoch):
                found = replace(found, quota=quotas)  # its limit may have changed meanwhile
        manner = DENY if charge.enforcement == "deny" else RECORDS
        plan = undo_plan([(compiled_again(charge, found.quota, manner), stored)], self.now)
        assert plan is not None
        (answer,) = self.loop.run_until_complete(self.store.decide([plan]))
        if answer.error is not None:
            raise Difference(f"{charged}\nstore: {answer.error}")
        own = self.oracle.undo(found, expected, self.now)
        (result,) = answer.results
        assert isinstance(result, UndoResult)
        given_back = result.given_back
        if given_back != own:
            raise Difference(f"{charged}\nthe store gave back {given_back}, the oracle {own}")
        if self.redis.pttl(charge.key) == -1:
            raise Difference(f"no expiry on {charge.key!r}")
        self.met["undone"] += own > 0
        self.met["not undone"] += own == 0
        return own


run = partial(machine.run, machine=UndoMachine)
"""Runs `UndoMachine`, as ``machine.run`` runs `Machine`."""
