"""An attack by one caller: three others must be answered by the store, as fast as before."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from tests.addresses import in_own_64
from tests.load.generator import Load, Outcome, outcomes
from tests.load.holding import AMPLE, SECRET, fallbacks_of, summary
from tests.report import say
from tests.service import Service, running

SLOWER_BY_MS: Final = 20.0
"""By how much the median wait of the others may grow during an attack, on a node that has a processor.

A node that has half of one takes twice as long for the same.
"""
ROUNDS: Final = 3
"""Shared machines stall: the time bound must hold in one of these rounds, everything else in each."""
HAND_OVERS: Final = 4
"""Node, store, node, caller: at each of them an ask may wait for a processor, which the test uses too."""
ATTACKER: Final = "127.0.0.66"
OTHERS: Final = ("127.0.0.11", "127.0.0.12", "127.0.0.13")
"""Addresses, which are also the names of the keys used from them."""
NOBODY: Final = ""
"""Means no key."""


@dataclass(frozen=True)
class Attack:
    """The requests of the hostile caller, and the number of its connections; see Load."""

    ask: str = ""
    batch: int = 0
    connections: int = 1
    pause_s: float = 0.0
    path: str = ""
    body: str = ""
    chunk: int = 0
    refused: str = ""


def asking(ids: int = 0, **ask: Any) -> str:
    """Return an ask of the hostile principal, for one request or for so many ids."""
    usage = {"producer_ids": list(range(ids))} if ids else {"requests": 1}
    return json.dumps({"principal": "hostile", "usage": usage, **ask})


@dataclass(frozen=True)
class AttackResult:
    """The median waits of the others, and the outcome of the attack.

    Attributes:
        calm_ms: without an attack.
        attacked_ms: during the attack.
        bound_ms: the upper bound during the attack.
    """

    calm_ms: float
    attacked_ms: float
    bound_ms: float
    attack: Sequence[Outcome]


@dataclass(frozen=True)
class Account:
    """How long the main thread of a process ran and waited for a processor, and how often (schedstat)."""

    ran_ns: int
    waited_ns: int
    turns: int

    @classmethod
    def of(cls, pid: int) -> Account:
        return cls(*map(int, Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()))

    def slower_by_ms(self, before: Account) -> float:
        """Return how much slower an ask may have been since then, given the node's share of the processor."""
        ran_ns, waited_ns = self.ran_ns - before.ran_ns, self.waited_ns - before.waited_ns
        stretch = (ran_ns + waited_ns) / max(ran_ns, 1)
        return SLOWER_BY_MS * stretch + HAND_OVERS * waited_ns / 1e6 / max(self.turns - before.turns, 1)


@dataclass(frozen=True)
class Site:
    """A node, and the API keys of callers that may only decide."""

    node: Service
    keys: dict[str, str]
    ca: str = ""
    """The certificate of the authority to trust; without it, the node has no TLS."""

    def source(self, address: str) -> str:
        """Return an address of IPv4's loopback; for a node on IPv6, an address in a /64 of its own.

        The node's network must have it.
        """
        return in_own_64(address) if ":" in self.node.address[0] else address

    def attack(self, attack: Attack, seconds: float, key: str, source: str = ATTACKER) -> Load:
        """Return the load of an attack with the key of this name, from an address."""
        return self._load(seconds=seconds, source=source, key=key, **asdict(attack))

    def check_others(
        self,
        name: str,
        seconds: float,
        *attack: Load,
        keys: Sequence[str] = OTHERS,
        during: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> AttackResult:
        """Check that the others are served as promised; return the result of the first good round.

        Args:
            attack: the loads of the attack.
            during: does the rest of the attack.
        """
        for _ in range(ROUNDS):
            calm, _ = self._asked(seconds / 2, keys)
            before = Account.of(self.node.pid)
            with during():
                others, attackers = self._asked(seconds, keys, *attack)
            calm_ms = typical_ms(calm)
            bound_ms = calm_ms + Account.of(self.node.pid).slower_by_ms(before)
            came = AttackResult(calm_ms, typical_ms(others), bound_ms, attackers)
            for each, load in zip(attackers, attack, strict=True):
                assert each.odd == []
                assert each.statuses.keys() <= {"200", "503", load.refused}
                assert each.waits_ms, "the attacker is served, too"
            if came.attacked_ms <= came.bound_ms:
                break
        say(
            f"{name}: others {came.calm_ms:.1f} ms, then {came.attacked_ms:.1f} of {came.bound_ms:.1f} ms;"
            f" attacker {' '.join(map(summary, attackers))}"
        )
        assert came.attacked_ms <= came.bound_ms
        return came

    def _asked(
        self, seconds: float, keys: Sequence[str], *attack: Load
    ) -> tuple[list[Outcome], list[Outcome]]:
        """Let others ask during an attack; check that the store answers them all. Return both outcomes."""
        before = fallbacks_of(self.node)
        came = outcomes(*self._others(seconds, keys), *attack)
        others, attackers = came[: len(OTHERS)], came[len(OTHERS) :]
        for each in others:
            assert each.statuses.keys() == {"200"}, summary(each)
            assert each.sources.keys() == {"store"}, f"{summary(each)}\n{self.node.logged()}"
            assert each.lost == each.unanswered == 0
        assert fallbacks_of(self.node) == before
        return others, attackers

    def _others(self, seconds: float, keys: Sequence[str]) -> list[Load]:
        """Return the loads of three callers with two connections each, for requests and ids that are seen."""
        return [
            self._load(
                ask=f'{{"principal":"other-{n}","usage":{{"requests":1,"producer_ids":["$c"]}}}}',
                connections=2,
                seconds=seconds,
                pause_s=0.02,
                source=source,
                key=key,
            )
            for n, (source, key) in enumerate(zip(OTHERS, keys, strict=True))
        ]

    def _load(self, *, source: str, key: str, **more: Any) -> Load:
        source, key = self.source(source), self.keys[key]
        return Load(address=self.node.address, source=source, key=key, ca=self.ca, **more)


def typical_ms(outcomes: Sequence[Outcome]) -> float:
    """Return the median of all waits."""
    return median(wait for each in outcomes for wait in each.waits_ms)


@contextmanager
def attacked(environment: Mapping[str, str] | None = None, ca: str = "", **more: Any) -> Iterator[Site]:
    """Run a node with quotas for everybody (for ids the largest limit there is) and with the keys."""
    trust = ssl.create_default_context(cafile=ca) if ca else None
    with running(environment={**SECRET, **(environment or {})}, trust=trust, **more) as node:
        node.put("user=*", **{**AMPLE, "producer_ids_rate": 500_000})
        keys = {NOBODY: ""}
        for name in (*OTHERS, ATTACKER):
            answer = node.http.post("/v1/keys", json={"name": name, "scopes": ["decide"]})
            keys[name] = answer.raise_for_status().json()["key"]
        yield Site(node, keys, ca)
