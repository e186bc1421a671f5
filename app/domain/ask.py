"""The ask: what a caller wants to spend, and for which principal, client, address, broker and listener."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Mode = Literal["admit", "peek", "record", "refund"]
MODES: Final[tuple[Mode, ...]] = ("admit", "peek", "record", "refund")

COUNTS: Final = ("requests", "connections", "mutations")
AMOUNTS: Final = ("produce_bytes", "fetch_bytes", "request_time_ms")
"""The usage fields of an ask besides ``producer_ids``: counts are whole numbers, amounts need not be."""

NO_PRODUCER_ID: Final = -1
"""Kafka's ``RecordBatch.NO_PRODUCER_ID``, which is never counted."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One ask, validated and normalised.

    Attributes:
        usage: amounts by usage field, without ``producer_ids``. No quota applies to a field that is absent.
        producer_ids: its ids in order, as 64-bit integers or strings; None if the ask has no such field.
        client_id: ``""`` is a client of that name; None means no client.
        ip: spelled as RFC 5952 says.
        at_ms: the time by the caller's clock; None if the store's clock is used.
    """

    usage: Mapping[str, float] = field(default_factory=dict)
    producer_ids: tuple[int | str, ...] | None = None
    principal: str | None = None
    client_id: str | None = None
    ip: str | None = None
    broker: str | None = None
    listener: str | None = None
    mode: Mode = "admit"
    deny: bool = False
    recheck: bool = False
    cluster_action: bool = False
    detail: bool = False
    id: str | None = None
    at_ms: int | None = None
