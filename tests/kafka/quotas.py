"""Quotas of a real cluster: setting them, measuring them by a broker's throttling, and Kafka's own rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kafka import KafkaAdminClient
from kafka.protocol.admin import AlterClientQuotasRequest, DescribeClientQuotasRequest
from kafka.protocol.producer import ProduceRequest
from kafka.record import MemoryRecordsBuilder

from app.kafka import call

DEFAULT: Final = "*"
"""The default user or client-id."""
Level = tuple[str | None, str | None]
"""The user and the client-id that a quota names, if it names them."""
WITHIN_S: Final = 60.0
EMPTY_WINDOW_MS: Final = 10_000
"""The window by which Kafka divides the first record of a bucket."""


def kafkas_level(levels: Mapping[Level, float], user: str | None, client: str | None) -> Level | None:
    """The level whose quota Kafka applies to a user's client: the first of eight that has one."""
    for level in (
        (user, client),
        (user, DEFAULT),
        (user, None),
        (DEFAULT, client),
        (DEFAULT, DEFAULT),
        (DEFAULT, None),
        (None, client),
        (None, DEFAULT),
    ):
        formed = (level[0] is None or user is not None) and (level[1] is None or client is not None)
        if formed and level != (None, None) and level in levels:
            return level
    return None


def kafkas_bucket(level: Level, user: str | None, client: str | None) -> str:
    """The clients that share the limit of a level."""
    match level:
        case (None, _):
            return f"client-id={client}"
        case (_, None):
            return f"user={user}"
    return f"user={user},client-id={client}"


def alter(admin: KafkaAdminClient, quotas: Mapping[Level, Mapping[str, float | None]]) -> None:
    """Set or remove quotas, and wait until the brokers report it."""
    entries = [
        (
            [
                (type_, None if name == DEFAULT else name)
                for type_, name in (("user", level[0]), ("client-id", level[1]))
                if name is not None
            ],
            [(key, 0.0 if value is None else value, value is None) for key, value in values.items()],
        )
        for level, values in quotas.items()
    ]
    answer = asked(admin, AlterClientQuotasRequest(entries=entries, validate_only=False))
    assert not [entry for entry in answer.entries if entry.error_code], answer


def described(admin: KafkaAdminClient) -> dict[frozenset[tuple[str, str | None]], dict[str, float]]:
    """Every client quota that a broker reports."""
    answer = asked(admin, DescribeClientQuotasRequest(components=[], strict=False))
    return {
        frozenset((part.entity_type, part.entity_name) for part in entry.entity): {
            value.key: value.value for value in entry.values
        }
        for entry in answer.entries
    }


def asked(admin: KafkaAdminClient, question: Any) -> Any:
    """The answer of a broker."""
    return admin._manager.run(admin._manager.send, question)


def produced_limit(configuration: Mapping[str, Any], server: str, topic: str, size: int) -> float | None:
    """The byte rate that a broker enforces for a user's client, from its throttle time for so many bytes.

    The client's bucket must be empty, and the limit so low that the bytes are too many for it.
    """
    records = MemoryRecordsBuilder(magic=2, compression_type=0, batch_size=2 * size)
    records.append(timestamp=None, key=None, value=bytes(size))
    records.close()
    question = ProduceRequest(
        transactional_id=None,
        acks=1,
        timeout_ms=10_000,
        topic_data=[(topic, [(0, records.buffer())])],
        max_version=9,
    )
    answer = call.ask(server, configuration, [question], WITHIN_S)
    [[partition]] = [topic.partition_responses for topic in answer.responses]
    assert partition.error_code == 0, answer
    throttle_ms: int = answer.throttle_time_ms
    # delay = (rate - limit) / limit * window, and rate = bytes / window
    return size * 1000 / (throttle_ms + EMPTY_WINDOW_MS) if throttle_ms else None
