"""A canary: a principal whose answers are all known in advance; it asks in between the other requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from tests.fuzz.answers import Answer, Fault
from tests.fuzz.bodies import Json
from tests.fuzz.cases import ADMIN
from tests.fuzz.messages import BATCH, CHECK, ONE, message
from tests.service import Service

IDS: Final = 40
"""How many new ids pass; the canary asks for twice as many."""
BURST: Final = 60
LONGEST_WINDOW_MS: Final = 2_073_600_000
QUOTAS: Final[Json] = {
    "producer_ids_rate": {"limit": IDS, "window_ms": LONGEST_WINDOW_MS},
    "controller_mutation_rate": {
        "limit": 1e-9,
        "algorithm": "token_bucket",
        "burst": BURST,
        "enforcement": "deny",
    },
}
"""So long that nothing expires and no token returns during a run."""


@dataclass
class Canary:
    """The charges of one principal and its remembered ids; it asks one question at a time."""

    name: str
    chance: Random
    known: set[int] = field(default_factory=set)
    spent: int = 0
    asked: int = 0
    shed: int = 0
    _before: tuple[set[int], int] = field(default_factory=lambda: (set(), 0))

    def question(self) -> tuple[bytes, str, Any]:
        """A request, its method, and the expected answer."""
        self.asked += 1
        self._before = set(self.known), self.spent
        match self.chance.randrange(7):
            case 0:
                asks = [self._ask() for _ in range(self.chance.randint(1, 5))]
                text = message("POST", BATCH, (), json.dumps({"asks": [ask for ask, _ in asks]}).encode())
                return text, "POST", {"decisions": [decision for _, decision in asks]}
            case 1:
                return message("POST", ONE, (), json.dumps(self._peek()).encode()), "POST", self._buckets()
            case 2:
                tokens = self.chance.randint(0, 3)
                decision = self._mutations(tokens)
                headers = [f"X-Quotagate-Principal: {self.name}"]
                return message("GET", f"{CHECK}?mutations={tokens}", headers), "GET", decision
            case 3:
                tokens = self.chance.randint(0, self.spent)
                self.spent -= tokens
                ask = {"principal": self.name, "usage": {"mutations": tokens}, "mode": "refund"}
                decision = self._decision("controller_mutation_rate", passes=True)
                return message("POST", ONE, [ADMIN], json.dumps(ask).encode()), "POST", decision
            case _:
                ask, decision = self._ask()
                return message("POST", ONE, (), json.dumps(ask).encode()), "POST", decision

    def check(self, expected: Any, answer: Answer) -> None:
        """Compare an answer with the expected one; after load shedding the buckets are as before."""
        if answer.is_shed:
            self.shed += 1
            self.known, self.spent = self._before
            return
        said = answer.json()
        if isinstance(expected, list):
            right = answer.status == 200 and _buckets(said) == expected
        elif "decisions" in expected:
            pairs = zip(said.get("decisions", ()), expected["decisions"], strict=True)
            right = answer.status == 200 and all(_same(one, wanted) for one, wanted in pairs)
        else:
            right = answer.status in (200, 429) and _same(said, expected)
        if not right:
            raise Fault(f"{self.name} expected {expected}, and got {said}")

    def settle(self, node: Service) -> None:
        """Check that, at the end, its buckets hold exactly its charges."""
        held = _buckets(node.ask(**self._peek()))
        if held != self._buckets():
            raise Fault(f"{self.name} was charged {self._buckets()}, and its buckets hold {held}")

    def _peek(self) -> Json:
        nothing: Json = {"producer_ids": [], "mutations": 0}
        return {"principal": self.name, "usage": nothing, "mode": "peek", "detail": True}

    def _buckets(self) -> list[tuple[float, float]]:
        """Observed and remaining of both buckets."""
        return [(len(self.known), IDS - len(self.known)), (self.spent, BURST - self.spent)]

    def _ask(self) -> tuple[Json, Json]:
        if self.chance.random() < 0.5:
            tokens = self.chance.randint(0, 3)
            return {"principal": self.name, "usage": {"mutations": tokens}}, self._mutations(tokens)
        ids = self.chance.sample(range(2 * IDS), self.chance.randint(1, 3))
        unseen = set(ids) - self.known
        passes = len(self.known) + len(unseen) <= IDS
        if passes:
            self.known |= unseen
        ask = {"principal": self.name, "usage": {"producer_ids": ids}}
        is_new = passes and bool(unseen)  # the node answers other ids alone, if it remembers them
        sources = ("store",) if is_new else ("store", "local")
        return ask, self._decision("producer_ids_rate", passes=passes, sources=sources)

    def _mutations(self, tokens: int) -> Json:
        passes = self.spent + tokens <= BURST
        if passes:
            self.spent += tokens
        return self._decision("controller_mutation_rate", passes=passes)

    def _decision(self, quota: str, *, passes: bool, sources: Sequence[str] = ("store",)) -> Json:
        """The decision, with each source that it may have."""
        place = f"user={self.name}"
        return {
            "decision": "admit" if passes else "throttle",
            "charged": passes,
            "applied": 1,
            "source": sources,
            "limited_by": None if passes else {"quota": quota, "entity": place, "bucket": place},
        }


def _buckets(decision: Json) -> list[tuple[float, float]]:
    return [(round(q["observed"], 3), round(q["remaining"], 3)) for q in decision.get("quotas", ())]


def _same(said: Json, expected: Json) -> bool:
    """Check that the decision is the expected one, and has a wait exactly if it is throttled."""
    wait_ms = said.pop("throttle_ms")
    is_right = said.get("source") in expected["source"] and said == {**expected, "source": said["source"]}
    return is_right and (wait_ms == 0) is (expected["decision"] == "admit")
