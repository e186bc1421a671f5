"""The principal of a client: learnt from SASL once the broker accepted it, never merged, never guessed."""

from __future__ import annotations

import confluent_kafka
import pytest
from kafka import KafkaConsumer, KafkaProducer
from kafka.errors import KafkaError, KafkaTimeoutError

from tests.kafka import tool
from tests.kafka.brokers import PASSWORDS
from tests.kafka_proxy.proxy import Proxy
from tests.service import Service, eventually

WINDOW_MS = 10_000
IMPATIENT = {"request_timeout_ms": 5_000, "bootstrap_timeout_ms": 5_000}


def properties(proxy: Proxy, user: str, password: str, mechanism: str = "PLAIN") -> dict[str, str]:
    return {
        "bootstrap_servers": proxy.bootstrap,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": mechanism,
        "sasl_plain_username": user,
        "sasl_plain_password": password,
    }


@pytest.fixture(scope="session")
def scram_user(cluster):
    """A user of SCRAM alone."""
    user, password = "dave", "dave-secret"
    tool.run(
        "kafka.admin.ConfigCommand",
        *("--bootstrap-server", cluster.bootstrap, "--alter"),
        *("--add-config", f"SCRAM-SHA-512=[password={password}]"),
        *("--entity-type", "users", "--entity-name", user),
    )
    return user, password


def observed(quotagate: Service, user: str) -> int:
    """The producer ids charged to a user."""
    asked = {"bucket": f"user={user}", "quota": "producer_ids_rate"}
    found = quotagate.http.get("/v1/buckets", params=asked).json()["buckets"]
    return int(found[0]["charged_ids"] or 0) if found else 0


def test_principals_of_plain_and_scram_are_apart(sasl, quotagate, topic, scram_user):
    quotagate.put("user=*", producer_ids_rate={"limit": 1, "window_ms": WINDOW_MS})
    who = (("alice", PASSWORDS["alice"], "PLAIN"), (*scram_user, "SCRAM-SHA-512"))
    producers = [KafkaProducer(**properties(sasl, *each)) for each in who]
    late = KafkaProducer(**properties(sasl, *who[0]))
    try:
        # One id is within each user's limit; the second one of alice's is not.
        for producer in producers:
            producer.send(topic, b"x").get(60)
        waiting = late.send(topic, b"x")
        eventually(lambda: observed(quotagate, "dave") == 1 and observed(quotagate, "alice") == 1)
        assert observed(quotagate, "ANONYMOUS") == 0
        waiting.get(120)
    finally:
        for producer in (*producers, late):
            producer.close(timeout=1)


def test_wrong_password_gives_no_name(sasl, quotagate, topic):
    quotagate.put("user=*", request_rate={"limit": 1000})
    with pytest.raises(KafkaError):
        KafkaConsumer(**properties(sasl, "carol", "wrong"), **IMPATIENT).topics()
    found = quotagate.http.get("/v1/buckets", params={"bucket": "user=carol", "quota": "request_rate"})
    assert all(not bucket["observed"] for bucket in found.json()["buckets"])


def test_mechanism_whose_name_cannot_be_learnt_is_refused(sasl):
    errors = []
    client = confluent_kafka.Producer(
        {
            "bootstrap.servers": sasl.bootstrap,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanisms": "OAUTHBEARER",
            "enable.sasl.oauthbearer.unsecure.jwt": True,
            "sasl.oauthbearer.config": "principal=alice",
            "error_cb": lambda error: errors.append(str(error)),
        }
    )

    def refused():
        client.poll(0.1)
        return any("mechanism" in error.lower() for error in errors)

    eventually(refused)


def test_broker_does_not_have_to_offer_it(plain, sasl):
    """Clients of a proxy without SASL are anonymous; clients of a proxy with SASL have to authenticate."""
    with pytest.raises((KafkaError, KafkaTimeoutError)):
        KafkaConsumer(bootstrap_servers=sasl.bootstrap, **IMPATIENT).topics()
