"""Ways to ask the same question: the oracle, and a running node, with detail or without."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from app.domain.entity import Entity
from app.domain.errors import EntityError, QuotaValueError
from app.domain.ladder import MatchingRules
from app.domain.oracle import Oracle
from app.domain.quota import KEYS, Defaults
from app.domain.quota_value import Definition, alter, check_all, resolve
from app.http.wire import encode_decision
from tests.service import Service
from tests.steps import decode_ask

Json = dict[str, Any]
AT_ONCE: Final = 1_000
"""How many asks a batch holds."""


class Driver(ABC):
    """Asks under the caller's clock, and sets quotas; returned statuses are HTTP statuses."""

    @abstractmethod
    def asks(self, asks: Sequence[Json]) -> list[Json]:
        """Decisions on asks, in order."""

    @abstractmethod
    def put(self, entity: str, quotas: Mapping[str, object]) -> int:
        """Replace an entity's quotas."""

    @abstractmethod
    def patch(self, entity: str, quotas: Mapping[str, object]) -> int:
        """Merge into an entity's quotas."""

    @abstractmethod
    def delete(self, entity: str) -> int:
        """Delete an entity's quotas."""

    @abstractmethod
    def get(self, entity: str) -> Json | None:
        """The limit of each of an entity's quotas, or None."""

    def ask(self, at_ms: int, usage: Json, **ask: object) -> Json:
        """The decision on one ask, with detail."""
        return self.asks([{"at_ms": at_ms, "usage": usage, "detail": True, **ask}])[0]

    def shown(self, at_ms: int, usage: str, **who: object) -> Json:
        """The state, at a moment, of the first bucket that a usage field charges."""
        nothing: object = [] if usage == "producer_ids" else 0
        found: Json = self.ask(at_ms, {usage: nothing}, mode="peek", **who)["quotas"][0]
        return found


class OracleDriver(Driver):
    """The domain alone: definitions in a dict, decisions by the oracle, wire forms by the codec."""

    def __init__(self, rules: MatchingRules, *, sequential: bool = False) -> None:
        self._oracle = Oracle(b"s" * 32, sequential=sequential)
        self._rules = rules
        self._definitions: dict[Entity, Mapping[str, Definition]] = {}

    def asks(self, asks: Sequence[Json]) -> list[Json]:
        quotas = {
            key: {
                entity: resolve(key, said[key], entity, Defaults(), 0)
                for entity, said in self._definitions.items()
                if key in said
            }
            for key in KEYS
        }
        decided = []
        for sent in asks:
            ask = decode_ask(json.dumps(sent).encode(), "caller")
            decision = self._oracle.decide(ask, quotas, self._rules, sent["at_ms"])
            decided.append(json.loads(encode_decision(decision)))
        return decided

    def put(self, entity: str, quotas: Mapping[str, object]) -> int:
        return self._change(entity, lambda place, _: check_all(quotas, place, Defaults()))

    def patch(self, entity: str, quotas: Mapping[str, object]) -> int:
        def merged(place: Entity, now: Mapping[str, Definition]) -> Mapping[str, Definition]:
            after = {**now, **alter(now, quotas, place, Defaults())}
            return {key: said for key, said in after.items() if said is not None}

        return self._change(entity, merged)

    def delete(self, entity: str) -> int:
        return self._change(entity, lambda _place, _now: {})

    def get(self, entity: str) -> Json | None:
        said = self._definitions.get(Entity.parse(entity))
        return {key: definition["limit"] for key, definition in said.items()} if said else None

    def _change(
        self, entity: str, edit: Callable[[Entity, Mapping[str, Definition]], Mapping[str, Definition]]
    ) -> int:
        try:
            place = Entity.parse(entity)
            before = self._definitions.get(place, {})
            after = edit(place, before)
        except (EntityError, QuotaValueError):
            return 422
        if not after:
            return 204 if self._definitions.pop(place, None) else 404
        self._definitions[place] = after
        return 200 if before else 201


class HttpDriver(Driver):
    """The real HTTP API of a running node."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def asks(self, asks: Sequence[Json]) -> list[Json]:
        if len(asks) == 1:
            return [self._service.ask(**asks[0])]
        parts = [list(asks[at : at + AT_ONCE]) for at in range(0, len(asks), AT_ONCE)]
        return [decision for part in parts for decision in self._service.batch(part)]

    def alter(self, entity: str, quotas: Mapping[str, object]) -> bool:
        """Alter an entity's quotas, and return whether the node accepted that."""
        alterations = {"alterations": [{"entity": entity, "quotas": quotas}]}
        answer = self._service.http.post("/v1/quotas:alter", json=alterations)
        (result,) = answer.raise_for_status().json()["results"]
        return bool(result["ok"])

    def put(self, entity: str, quotas: Mapping[str, object]) -> int:
        return self._sent("PUT", entity, quotas)

    def patch(self, entity: str, quotas: Mapping[str, object]) -> int:
        return self._sent("PATCH", entity, quotas)

    def delete(self, entity: str) -> int:
        return self._sent("DELETE", entity)

    def get(self, entity: str) -> Json | None:
        answer = self._service.http.get(f"/v1/quotas/{entity}")
        if answer.status_code == 404:
            return None
        return {key: quota["limit"] for key, quota in answer.raise_for_status().json()["quotas"].items()}

    def _sent(self, method: str, entity: str, quotas: Mapping[str, object] | None = None) -> int:
        status: int = self._service.http.request(method, f"/v1/quotas/{entity}", json=quotas).status_code
        return status


class OrdinaryDriver(Driver):
    """A running node that is asked without detail, so that ordinary asks take the fast path.

    Its decisions must equal the oracle's decisions, which supply the details.
    """

    def __init__(self, node: Driver, oracle: Driver) -> None:
        self._node = node
        self._oracle = oracle

    def asks(self, asks: Sequence[Json]) -> list[Json]:
        decided = self._node.asks([{**ask, "detail": False} for ask in asks])
        expected = self._oracle.asks(asks)
        assert decided == [{name: each[name] for name in each if name != "quotas"} for each in expected]
        return expected

    def put(self, entity: str, quotas: Mapping[str, object]) -> int:
        return _same(self._node.put(entity, quotas), self._oracle.put(entity, quotas))

    def patch(self, entity: str, quotas: Mapping[str, object]) -> int:
        return _same(self._node.patch(entity, quotas), self._oracle.patch(entity, quotas))

    def delete(self, entity: str) -> int:
        return _same(self._node.delete(entity), self._oracle.delete(entity))

    def get(self, entity: str) -> Json | None:
        return self._node.get(entity)


def _same(status: int, other: int) -> int:
    assert status == other
    return status
