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


# Final instead of frozen: it is made for every ask (docs/decisions/0051)
@dataclass(slots=True, unsafe_hash=True)
class Ask:
    """One ask, validated and normalised.

    Attributes:
        usage: amounts by usage field, without ``producer_ids``. No quota applies to a field that is absent.
        producer_ids: its ids in order, as 64-bit integers or strings; None if the ask has no such field.
        client_id: ``""`` is a client of that name; None means no client.
        ip: spelled as RFC 5952 says.
        at_ms: the time by the caller's clock; None if the store's clock is used.
    """

    usage: Final[Mapping[str, float]] = field(default_factory=dict)
    producer_ids: Final[tuple[int | str, ...] | None] = None
    principal: Final[str | None] = None
    client_id: Final[str | None] = None
    ip: Final[str | None] = None
    broker: Final[str | None] = None
    listener: Final[str | None] = None
    mode: Final[Mode] = "admit"
    deny: Final[bool] = False
    recheck: Final[bool] = False
    cluster_action: Final[bool] = False
    detail: Final[bool] = False
    id: Final[str | None] = None
    at_ms: Final[int | None] = None
