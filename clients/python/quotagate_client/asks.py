"""Asks as JSON, and the splitting of large batches into calls of the size that the service takes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, Required, TypedDict

MAX_ASKS: Final = 1_000
MAX_IDS: Final = 10_000
MAX_BODY: Final = 1_048_576
_FRAME: Final = len(b'{"asks":[]}')


class Usage(TypedDict, total=False):
    """The usage that an ask charges; at least one field."""

    requests: int
    connections: int
    mutations: int
    produce_bytes: float
    fetch_bytes: float
    request_time_ms: float
    producer_ids: Sequence[int | str]


class Ask(TypedDict, total=False):
    """One ask; ``id`` makes a retry safe, and a client with retries generates it if it is missing."""

    usage: Required[Usage]
    principal: str | None
    client_id: str | None
    ip: str | None
    broker: str | None
    listener: str | None
    mode: Literal["admit", "peek", "record", "refund"]
    enforcement: Literal["deny"]
    recheck: bool
    cluster_action: bool
    detail: bool
    id: str
    at_ms: int


def encode(ask: Ask) -> bytes:
    """Return one ask as JSON."""
    return json.dumps(ask, ensure_ascii=False, separators=(",", ":"), default=list).encode()


def batches(asks: Iterable[Ask]) -> Iterator[list[bytes]]:
    """Yield the encoded asks in order, in batches of the size that the service takes."""
    batch: list[bytes] = []
    ids = size = 0
    for ask in asks:
        encoded = encode(ask)
        own_ids = len(ask["usage"].get("producer_ids", ()))
        full = len(batch) == MAX_ASKS or ids + own_ids > MAX_IDS
        if batch and (full or _FRAME + size + len(encoded) > MAX_BODY):
            yield batch
            batch, ids, size = [], 0, 0
        batch.append(encoded)
        ids += own_ids
        size += len(encoded) + 1
    if batch:
        yield batch


def joined(batch: list[bytes]) -> bytes:
    """Return the body of a batch."""
    return b'{"asks":[' + b",".join(batch) + b"]}"
