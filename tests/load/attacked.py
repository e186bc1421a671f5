"""One hostile caller beside three others: answered by the store, as quickly as before, never shed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from tests.load.generator import Load, Outcome, outcomes
from tests.load.holding import AMPLE, SECRET, made_up, told
from tests.said import say
from tests.service import Service, running

SLOWER_BY_MS: Final = 20.0
"""By how much the median of the others may be longer beside an attack."""
ROUNDS: Final = 3
"""A machine that is shared stalls: the time must hold in one of these, all else in each."""
HAND_OVERS: Final = 4
"""To the node, to the store, back, and back: each may wait for a processor, which a test takes, too."""
ATTACKER: Final = "127.0.0.66"
OTHERS: Final = ("127.0.0.11", "127.0.0.12", "127.0.0.13")
"""Addresses, and the names of the keys of who comes from them."""
NOBODY: Final = ""
"""The name of no key."""


@dataclass(frozen=True)
class Attack:
    """What one caller sends, and over how many connections; see Load."""

    ask: str = ""
    batch: int = 0
    connections: int = 1
    pause_s: float = 0.0
    path: str = ""


def asking(ids: int = 0, **ask: Any) -> str:
    """An ask of the hostile principal's, for one request or for so many ids."""
    usage = {"producer_ids": list(range(ids))} if ids else {"requests": 1}
    return json.dumps({"principal": "hostile", "usage": usage, **ask})


@dataclass(frozen=True)
class Beside:
    """How others were answered, in milliseconds, without an attack and beside it; what came of the attack.

    ``crowded_ms`` is how long the node waited whenever it wanted a processor.
    """

    calm_ms: float
    beside_ms: float
    crowded_ms: float
    attack: Sequence[Outcome]


@dataclass(frozen=True)
class Account:
    """By the kernel: how long a program's first thread waited for a processor, and how often it got one."""

    waited_ns: int
    ran: int

    @classmethod
    def of(cls, pid: int) -> Account:
        _, waited, ran = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
        return cls(int(waited), int(ran))

    def waited_ms(self, before: Account) -> float:
        """How long it waited each time since."""
        return (self.waited_ns - before.waited_ns) / 1e6 / max(self.ran - before.ran, 1)


@dataclass(frozen=True)
class Site:
    """A node, with the keys of callers that may only decide."""

    node: Service
    keys: dict[str, str]

    def attack(self, attack: Attack, seconds: float, key: str, source: str = ATTACKER) -> Load:
        """An attack with a key, by its name, from an address."""
        return Load(
            address=self.node.address, seconds=seconds, source=source, key=self.keys[key], **asdict(attack)
        )

    def held(
        self,
        name: str,
        seconds: float,
        *attack: Load,
        keys: Sequence[str] = OTHERS,
        beside: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Beside:
        """Hold the node to what it promised the others; their times are those of the first good round.

        An attack is loads, and what `beside` does.
        """
        for _ in range(ROUNDS):
            calm, _ = self._asked(seconds / 2, keys)
            before = Account.of(self.node.pid)
            with beside():
                others, attackers = self._asked(seconds, keys, *attack)
            crowded_ms = Account.of(self.node.pid).waited_ms(before)
            came = Beside(typical_ms(calm), typical_ms(others), crowded_ms, attackers)
            bound_ms = came.calm_ms + SLOWER_BY_MS + HAND_OVERS * crowded_ms
            for each in attackers:
                assert each.odd == []
                assert each.statuses.keys() <= {"200", "503"}
                assert each.waits_ms, "the attacker was heard, too"
            if came.beside_ms <= bound_ms:
                break
        say(
            f"{name}: others {came.calm_ms:.1f} ms, then {came.beside_ms:.1f} of {bound_ms:.1f} ms;"
            f" attacker {' '.join(map(told, attackers))}"
        )
        assert came.beside_ms <= bound_ms
        return came

    def _asked(
        self, seconds: float, keys: Sequence[str], *attack: Load
    ) -> tuple[list[Outcome], list[Outcome]]:
        """Let others ask beside an attack: all their answers are the store's. What came of both."""
        before = made_up(self.node)
        came = outcomes(*self._others(seconds, keys), *attack)
        others, attackers = came[: len(OTHERS)], came[len(OTHERS) :]
        for each in others:
            assert each.statuses.keys() == {"200"}, told(each)
            assert each.sources.keys() == {"store"}, told(each)
            assert each.lost == each.unanswered == 0
        assert made_up(self.node) == before
        return others, attackers

    def _others(self, seconds: float, keys: Sequence[str]) -> list[Load]:
        """Three callers with two connections each, who ask for requests and for ids that are known."""
        return [
            Load(
                address=self.node.address,
                ask=f'{{"principal":"other-{n}","usage":{{"requests":1,"producer_ids":["$c"]}}}}',
                connections=2,
                seconds=seconds,
                pause_s=0.02,
                source=source,
                key=self.keys[key],
            )
            for n, (source, key) in enumerate(zip(OTHERS, keys, strict=True))
        ]


def typical_ms(outcomes: Sequence[Outcome]) -> float:
    """The median of all their waits."""
    return median(wait for each in outcomes for wait in each.waits_ms)


@contextmanager
def attacked(**more: Any) -> Iterator[Site]:
    """A node with quotas for everybody, of which that of ids is the largest there is, and with the keys."""
    with running(environment=SECRET, **more) as node:
        node.put("user=*", **{**AMPLE, "producer_ids_rate": 500_000})
        keys = {NOBODY: ""}
        for name in (*OTHERS, ATTACKER):
            answer = node.http.post("/v1/keys", json={"name": name, "scopes": ["decide"]})
            keys[name] = answer.raise_for_status().json()["key"]
        yield Site(node, keys)
