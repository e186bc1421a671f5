"""Strimzi's vectors of volumes, each tried on a real node to which observations are pushed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from tests.pushing import MINUTE, factor, push, volume, volumes_of
from tests.service import Service

Node = Callable[[str, str], Service]
"""Returns the node with this validity and this fallback."""


def limit(vector: Mapping[str, Any], node: Node) -> None:
    """E01: a volume at the limit violates."""
    assert vector["cfg"] == {"min_available_bytes": 100}
    service = node("PT5M", "0.5")
    for at, (available, expected) in enumerate(vector["rows"]):
        now_ms = at * MINUTE
        seen = push(service, *(volume("1", size, f"/d{n}") for n, size in enumerate(available)), at_ms=now_ms)
        assert (seen["factor"], factor(service, now_ms)) == (expected, expected), available


def validity(vector: Mapping[str, Any], node: Node) -> None:
    """E06: a factor is valid up to and including the end of its validity."""
    service = node(vector["cfg"]["validity"], "0.5")
    began = _later(service)
    push(service, volume("1", 500), at_ms=began)
    assert "exactly 5m VALID; 5m+1ns expired" in vector["rows"]
    ages = [0, 5 * MINUTE - 1, 5 * MINUTE, 5 * MINUTE + 1]
    assert [factor(service, began + age) for age in ages] == [1.0, 1.0, 1.0, 0.5]


def observations(vector: Mapping[str, Any], node: Node) -> None:
    """E07 as `here` says: a volume's report is valid up to and including its validity, and then unknown."""
    assert "up to and including" in vector["here"]
    service = node(vector["cfg"]["entries_valid_for"], "0.5")
    for age, expected, second in [
        (MINUTE - 1, 0.0, "violating"),
        (MINUTE, 0.0, "violating"),
        (MINUTE + 1, 0.0, "unknown"),  # the factor is valid, as the violation renewed it
        (2 * MINUTE + 1, 0.5, "unknown"),
    ]:
        began = _later(service)
        push(service, volume("1", 500), volume("2", 5), volume("3", 500), at_ms=began)
        after = push(service, volume("1", 500), at_ms=began + age, complete=False)
        states = {found["broker"]: found["state"] for found in after["volumes"]}
        assert (after["factor"], len(states), states["2"]) == (expected, 3, second), age
    whole = push(service, volume("1", 500), at_ms=began + age + 1)
    assert (whole["factor"], len(whole["volumes"])) == (1.0, 1), "evicted by a complete observation"


def timeline(vector: Mapping[str, Any], node: Node) -> None:
    """E09: the proposal's own timeline; a failed observation is a missing push."""
    service = node(vector["cfg"]["validity"], str(vector["cfg"]["fallback"]))
    began = _later(service)
    for row, expected in vector["rows"]:
        step = re.fullmatch(r"(\d)m (ok|fail)", row)
        assert step
        now_ms = began + int(step[1]) * MINUTE
        if step[2] == "ok":
            push(service, volume("1", 500), at_ms=now_ms)
        assert factor(service, now_ms) == expected, row


VOLUMES: Final[Mapping[str, Callable[[Mapping[str, Any], Node], None]]] = {
    "E01": limit,
    "E06": validity,
    "E07": observations,
    "E09": timeline,
}
"""The check of each vector, by its id."""


def _later(node: Service) -> int:
    """A time at which all earlier pushes have expired."""
    return int(volumes_of(node)["since_ms"]) + 1_000 * MINUTE
