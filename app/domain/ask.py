"""The question: what a caller wants to spend, and as whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Mode = Literal["admit", "peek", "record", "refund"]
MODES: Final[tuple[Mode, ...]] = ("admit", "peek", "record", "refund")

NO_PRODUCER_ID: Final = -1
"""Kafka's RecordBatch.NO_PRODUCER_ID; never counted."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One ask, checked and normalised.

    Attributes:
        usage: amounts by usage field, without ``producer_ids``; a field that is absent applies no quota.
        producer_ids: None if the ask names none; else its ids in order, as 64-bit integers or strings.
        client_id: may be ``""``, a client of that name; None is no client.
        ip: as RFC 5952 has it.
        at_ms: the caller's clock; None under the store's.
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
