"""Producers without acknowledgements, transactions, and requests that no quota would ever admit."""

from __future__ import annotations

from contextlib import ExitStack

from kafka import KafkaProducer, TopicPartition
from kafka.consumer import KafkaConsumer

from tests.kafka_proxy import java_client, producing
from tests.service import eventually


def end_offset(consumer: KafkaConsumer, topic: str) -> int:
    partition = TopicPartition(topic, 0)
    return int(consumer.end_offsets([partition])[partition])


def test_records_without_acknowledgement_are_held(cluster, plain, quotagate, topic):
    with ExitStack() as stack:
        producer = KafkaProducer(bootstrap_servers=plain.bootstrap, acks=0, enable_idempotence=False)
        stack.callback(producer.close, timeout=1)
        consumer = KafkaConsumer(**cluster.properties)
        stack.callback(consumer.close)
        producer.send(topic, b"first").get(60)
        eventually(lambda: end_offset(consumer, topic) == 1)

        assert quotagate.http.post("/v1/volumes:drill", json={"factor": 0, "for_ms": 600_000}).is_success
        stack.callback(quotagate.http.delete, "/v1/volumes:drill")
        eventually(lambda: quotagate.ask(principal="x", usage={"produce_bytes": 1})["decision"] == "throttle")
        producer.send(topic, b"held").get(60)  # this proves only that it left the client
        # The proxy asks again each second, for 15 s; as soon as it may, the record goes through.
        assert end_offset(consumer, topic) == 1
        assert quotagate.http.delete("/v1/volumes:drill").is_success
        eventually(lambda: end_offset(consumer, topic) == 2)


def test_transaction_is_held_and_commits(plain, quotagate, topic, tmp_path):
    quotagate.put("user=ANONYMOUS", producer_ids_rate={"limit": 1, "window_ms": 10_000})
    properties = {"delivery_timeout_ms": producing.PATIENT_MS, "isolation_level": "read_committed"}
    with java_client.running(tmp_path / "java", plain.bootstrap, **properties) as java:
        java.say(f"send other {topic} 100 1")
        assert java.until("sent other")
        java.say(f"transaction held {topic} 100 3")
        assert java.until("committed held")
        java.say("metric held produce-throttle-time-max")
        assert float(java.until("metric held").split()[2]) > 0
        java.say(f"fetch {topic} 4")
        assert java.until("fetched").startswith("fetched 4")
        assert java.seen["error held"] == 0


def test_what_is_never_admitted_is_a_policy_violation(plain, quotagate, topic, tmp_path):
    quotagate.put("user=ANONYMOUS", producer_byte_rate=0)
    with java_client.running(tmp_path / "java", plain.bootstrap) as java:
        java.say(f"send one {topic} 100 1")
        assert "PolicyViolationException" in java.heard()
