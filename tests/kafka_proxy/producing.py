"""Idempotent producers of three clients under one interface, which counts their records and throttles."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import confluent_kafka
from kafka import KafkaProducer
from kafka.errors import KafkaError

from tests.kafka_proxy import java_client
from tests.kafka_proxy.driven import DrivenClient
from tests.service import eventually

CLIENTS: Final = ("java", "kafka-python", "librdkafka")
PATIENT_MS: Final = 240_000
"""Longer than any window of the tests, so that no client gives a record up."""


class Producers(ABC):
    """Producers by name, all in one process. A producer is made when it first sends."""

    @abstractmethod
    def send(self, name: str, topic: str, count: int = 1) -> None:
        """Send records, and do not wait."""

    @abstractmethod
    def sent(self, name: str) -> int:
        """How many of its records the broker acknowledged."""

    @abstractmethod
    def errors(self) -> list[str]:
        """The errors that reached the application."""

    @abstractmethod
    def throttled_ms(self, name: str) -> float:
        """The longest throttle time that the client itself reports."""

    def until_sent(self, name: str, count: int, within_s: float = 120.0) -> None:
        eventually(lambda: bool(self.errors()) or self.sent(name) >= count, within_s=within_s)
        assert self.errors() == []


class JavaProducers(Producers):
    def __init__(self, client: DrivenClient) -> None:
        self._client = client
        self._errors: list[str] = []
        self._throttled: dict[str, float] = {}

    def send(self, name: str, topic: str, count: int = 1) -> None:
        self._client.say(f"send {name} {topic} 100 {count}")

    def sent(self, name: str) -> int:
        self._listen()
        return self._client.seen[f"sent {name}"]

    def errors(self) -> list[str]:
        self._listen()
        return self._errors

    def throttled_ms(self, name: str) -> float:
        self._client.say(f"metric {name} produce-throttle-time-max")
        self._listen()
        return self._throttled.get(name, 0.0)

    def _listen(self) -> None:
        for line in self._client.said():
            words = line.split()
            if words[0] == "error":
                self._errors.append(line)
            elif words[0] == "metric":
                self._throttled[words[1]] = float(words[2])


class PythonProducers(Producers):
    def __init__(self, properties: dict[str, Any]) -> None:
        self._properties = properties
        self._producers: dict[str, Any] = {}
        self._futures: dict[str, list[Any]] = {}

    def send(self, name: str, topic: str, count: int = 1) -> None:
        if name not in self._producers:
            self._producers[name] = KafkaProducer(
                **self._properties, client_id=name, delivery_timeout_ms=PATIENT_MS
            )
        self._futures.setdefault(name, []).extend(
            self._producers[name].send(topic, b"x" * 100) for _ in range(count)
        )

    def sent(self, name: str) -> int:
        return sum(future.succeeded() for future in self._futures.get(name, ()))

    def errors(self) -> list[str]:
        return [str(each.exception) for all_ in self._futures.values() for each in all_ if each.failed()]

    def throttled_ms(self, name: str) -> float:
        groups = self._producers[name].metrics().values()
        found = [value for group in groups for key, value in group.items() if key == "throttle-time-max"]
        return max((value for value in found if value > 0), default=0.0)

    def close(self) -> None:
        for producer in self._producers.values():
            producer.close(timeout=1)


class LibrdkafkaProducers(Producers):
    def __init__(self, properties: dict[str, Any]) -> None:
        self._properties = properties
        self._producers: dict[str, confluent_kafka.Producer] = {}
        self._sent: dict[str, int] = {}
        self._throttled: dict[str, float] = {}
        self._errors: list[str] = []

    def send(self, name: str, topic: str, count: int = 1) -> None:
        if name not in self._producers:

            def throttled(event: Any) -> None:
                self._throttled[name] = max(self._throttled.get(name, 0.0), event.throttle_time * 1000)

            self._producers[name] = confluent_kafka.Producer(
                {
                    **self._properties,
                    "enable.idempotence": True,
                    "client.id": name,
                    "message.timeout.ms": PATIENT_MS,
                    "throttle_cb": throttled,
                }
            )

        def delivered(error: Any, _message: Any) -> None:
            if error is None:
                self._sent[name] = self._sent.get(name, 0) + 1
            else:
                self._errors.append(str(error))

        for _ in range(count):
            self._producers[name].produce(topic, b"x" * 100, on_delivery=delivered)

    def sent(self, name: str) -> int:
        self._poll()
        return self._sent.get(name, 0)

    def errors(self) -> list[str]:
        self._poll()
        return self._errors

    def throttled_ms(self, name: str) -> float:
        self._poll()
        return self._throttled.get(name, 0.0)

    def close(self) -> None:
        for producer in self._producers.values():
            producer.purge()
            producer.flush(1)
        self._producers.clear()

    def _poll(self) -> None:
        for producer in self._producers.values():
            producer.poll(0)


@contextmanager
def running(
    client: str, folder: Path, bootstrap: str, login: tuple[str, str] | None = None
) -> Iterator[Producers]:
    """Producers of one of the `CLIENTS`, perhaps with a user and a password for SASL/PLAIN."""
    user, password = login or ("", "")
    if client == "java":
        plain = "org.apache.kafka.common.security.plain.PlainLoginModule"
        secured = {
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_mechanism": "PLAIN",
            "sasl_jaas_config": f'{plain} required username="{user}" password="{password}";',
        }
        properties = {"delivery_timeout_ms": PATIENT_MS, **(secured if login else {})}
        with java_client.running(folder / "java", bootstrap, **properties) as java:
            yield JavaProducers(java)
        return
    made: PythonProducers | LibrdkafkaProducers
    if client == "kafka-python":
        secured = {
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_mechanism": "PLAIN",
            "sasl_plain_username": user,
            "sasl_plain_password": password,
        }
        made = PythonProducers({"bootstrap_servers": bootstrap, **(secured if login else {})})
    else:
        secured = {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": user,
            "sasl.password": password,
        }
        made = LibrdkafkaProducers({"bootstrap.servers": bootstrap, **(secured if login else {})})
    try:
        yield made
    finally:
        made.close()


class Worker:
    """A client that sends one record after the other, each in a request of its own.

    Attributes:
        sent: how many records the broker has acknowledged.
        error: the error that ended it, if any.
        ended: set to let it send no more.
    """

    def __init__(self, client_id: str, bootstrap: str, topic: str, partition: int | None = None) -> None:
        self._producer = KafkaProducer(bootstrap_servers=bootstrap, client_id=client_id, acks=1)
        self._where = (topic, partition)
        self.ended = threading.Event()
        self.sent = 0
        self.error: KafkaError | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Wait before the next record; this one does not."""

    def _work(self) -> None:
        topic, partition = self._where
        try:
            while not self.ended.is_set():
                self.pause()
                self._producer.send(topic, b"x", partition=partition).get(120)
                self.sent += 1
        except KafkaError as error:
            self.error = error

    def close(self) -> None:
        """Send no more, and end the producer."""
        self.ended.set()
        self._thread.join()
        self._producer.close(timeout=1)
