"""A real node to which tests push observations of volumes, by the caller's clock or the store's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from tests.service import Service, running

LIMIT: Final = 100
MINUTE: Final = 60_000
RULES: Final = {
    "QUOTAGATE_VOLUME_SOURCE": "push",
    "QUOTAGATE_VOLUME_MIN_AVAILABLE_BYTES": str(LIMIT),
}


def volume(broker: str, available: int | None, place: str = "/data") -> dict[str, Any]:
    """A volume of 1,000 bytes as an agent reports it."""
    return {"broker": broker, "dir": place, "total_bytes": 1_000, "available_bytes": available}


FULL: Final = volume("1", 5)
WELL: Final = volume("1", 500)


@contextmanager
def pushed(
    *, callers: bool = True, environment: Mapping[str, str] | None = None, **more: Any
) -> Iterator[Service]:
    """A node with the source `push`; further settings take precedence."""
    clock = {"QUOTAGATE_CLOCK": "caller"} if callers else {}
    with running(environment={**RULES, **clock, **(environment or {})}, **more) as node:
        yield node


def push(
    node: Service, *volumes: dict[str, Any], at_ms: int | None = None, complete: bool | None = True
) -> dict[str, Any]:
    """Push an observation, and return the new state of the volumes; ``complete=None`` omits that field."""
    query = {} if at_ms is None else {"at_ms": at_ms}
    said = {} if complete is None else {"complete": complete}
    answer = node.http.post("/v1/volumes", params=query, json={"volumes": volumes, **said})
    assert answer.status_code == 200, f"{answer.status_code} {answer.text}\n{node.logged()}"
    found: dict[str, Any] = answer.json()
    return found


def volumes_of(node: Service, at_ms: int | None = None) -> dict[str, Any]:
    """The state of the volumes."""
    answer = node.http.get("/v1/volumes", params={} if at_ms is None else {"at_ms": at_ms})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def factor(node: Service, at_ms: int | None = None) -> float:
    """The factor in force."""
    found: float = volumes_of(node, at_ms)["factor"]
    return found


def drill(node: Service, factor: float, for_ms: int) -> dict[str, Any]:
    """Begin a drill, and return the state of the volumes after it."""
    answer = node.http.post("/v1/volumes:drill", json={"factor": factor, "for_ms": for_ms})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found
