"""The Kafka source at a real cluster: true sizes, with and without TLS and login; brokers die and hang."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator

import pytest
from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import (
    ACL,
    ACLOperation,
    ACLPermissionType,
    NewTopic,
    ResourcePattern,
    ResourceType,
)

from app.domain.errors import ObservationError
from app.domain.volumes import Observation, Volume
from tests.kafka import brokers, tool
from tests.kafka.brokers import PROTOCOLS, Broker, Cluster
from workers.volumes.kafka import KafkaSource

WITHIN_S = 60.0
SHORT_S = 8.0
"""The timeout of observations that run into it because of a broker."""
PATIENT = {"request_timeout_ms": "300000"}
"""Only the timeout of an observation ends a request then."""


@pytest.fixture(scope="module")
def own() -> Iterator[Cluster]:
    """A cluster whose brokers may be killed and held; it forgets one only after three short observations."""
    with brokers.running(properties={"broker.session.timeout.ms": round(3_000 * SHORT_S)}) as started:
        yield started


def source(cluster: Cluster, protocol: str = "PLAINTEXT", **properties: str) -> KafkaSource:
    given = {**cluster.properties_of(protocol), **properties}
    return KafkaSource(given.pop("bootstrap_servers"), given)


def as_the_machine_has_it(broker: Broker) -> Volume:
    disk = os.statvfs(broker.log_dir)
    total, available = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    return Volume(str(broker.number), str(broker.log_dir), total, available)


async def observed_in_time(polled: KafkaSource) -> Observation:
    """A short observation, which must end long before a request would time out."""
    async with asyncio.timeout(120):
        return await polled.observe(SHORT_S)


async def observed_at_rest(cluster: Cluster, polled: KafkaSource) -> Observation:
    """An observation during which no disk changed, compared with the machine's own sizes."""
    give_up = time.monotonic() + 60
    while True:
        before = [as_the_machine_has_it(broker) for broker in cluster.brokers.values()]
        seen = await polled.observe(WITHIN_S)
        after = [as_the_machine_has_it(broker) for broker in cluster.brokers.values()]
        if before == after:
            assert seen.volumes == tuple(after)
            return seen
        assert time.monotonic() < give_up, "the disks do not come to rest"


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_sizes_equal_those_of_the_disks(cluster, protocol):
    seen = await observed_at_rest(cluster, source(cluster, protocol))
    assert seen.answered == frozenset({"1", "2"})
    assert seen.silent == {}


async def test_sizes_follow_writes(cluster):
    """The sizes come without a row for each partition, of which a cluster may have many."""
    polled = source(cluster)
    before = await observed_at_rest(cluster, polled)
    admin = KafkaAdminClient(**cluster.properties)
    producer = KafkaProducer(**cluster.properties)
    try:
        admin.create_topics([NewTopic("written", replica_assignments={0: [2]})])
        producer.send("written", b"x" * 500_000).get(30)
        after = await observed_at_rest(cluster, polled)
        assert _available(after, "2") <= _available(before, "2") - 500_000
        assert _available(after, "1") > _available(before, "1") - 500_000
    finally:
        admin.delete_topics(["written"])
        producer.close()
        admin.close()


@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SASL_SSL"])
async def test_wrong_password_is_reported(cluster, protocol):
    with pytest.raises(ObservationError, match="refuses the login: Authentication failed: Invalid username"):
        await source(cluster, protocol, sasl_plain_password="wrong").observe(WITHIN_S)


async def test_scram_login_in_strimzis_form_works(cluster):
    setting = ("--alter", "--add-config", "SCRAM-SHA-512=[password=dave-secret]")
    entity = ("--entity-type", "users", "--entity-name", "dave")
    tool.run("kafka.admin.ConfigCommand", "--bootstrap-server", cluster.bootstrap, *setting, *entity)
    given = {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_jaas_config": f'{brokers.SCRAM} required username="dave" password="dave-secret";',
        "ssl_cafile": str(cluster.authority.ca),
    }
    seen = await KafkaSource(cluster.bootstrap_of("SASL_SSL"), given).observe(WITHIN_S)
    assert seen.answered == frozenset({"1", "2"})


async def test_certificate_of_an_unknown_ca_is_refused(cluster):
    given = cluster.properties_of("SSL")
    del given["ssl_cafile"]
    with pytest.raises(ObservationError, match="certificate verify failed"):
        await KafkaSource(given.pop("bootstrap_servers"), given).observe(WITHIN_S)


async def test_plain_text_to_a_tls_listener_fails_in_time(cluster):
    with pytest.raises(ObservationError):
        await observed_in_time(KafkaSource(cluster.bootstrap_of("SSL"), PATIENT))


async def test_login_without_permission_is_reported_with_the_permission():
    """A broker that refuses answers with no log directory at all, only the error."""
    guarded = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",  # the brokers' name among themselves here
    }
    with brokers.running(1, properties=guarded) as one:
        polled = source(one, "SASL_PLAINTEXT")
        seen = await polled.observe(WITHIN_S)
        assert (seen.volumes, seen.answered) == ((), frozenset())
        lacks = "answers CLUSTER_AUTHORIZATION_FAILED (31): the login needs Describe on the cluster"
        assert seen.silent == {"1": lacks}

        cluster = ResourcePattern(ResourceType.CLUSTER, "kafka-cluster")
        admin = KafkaAdminClient(**one.properties)
        admin.create_acls([ACL("User:alice", "*", ACLOperation.DESCRIBE, ACLPermissionType.ALLOW, cluster)])
        admin.close()
        give_up = time.monotonic() + 60
        while seen.silent:  # until the broker has heard of it
            assert time.monotonic() < give_up, seen
            seen = await polled.observe(WITHIN_S)
        assert seen.volumes == (as_the_machine_has_it(one.brokers[1]),)


async def test_hung_broker_is_silent_and_the_observation_ends_in_time(own):
    """The kernel takes its connections all the same, so nothing is refused."""
    polled = [source(own, protocol, **PATIENT) for protocol in ("PLAINTEXT", "SASL_SSL")]
    own.brokers[2].hold()
    try:
        for _ in range(2):
            for seen in await asyncio.gather(*map(observed_in_time, polled)):
                assert seen.volumes == (as_the_machine_has_it(own.brokers[1]),)
                assert seen.answered == frozenset({"1"})
                waited = re.fullmatch(r"no answer within (\S+) s", seen.silent["2"])
                assert waited is not None, seen.silent
                assert float(waited[1]) < SHORT_S
    finally:
        own.brokers[2].go_on()
    for each in polled:
        assert (await _until_all_answer(each)).silent == {}


async def test_killed_broker_is_silent_until_the_cluster_forgets_it(own):
    polled = source(own, **PATIENT)
    own.brokers[2].kill()
    seen = await observed_in_time(polled)
    assert seen.volumes == (as_the_machine_has_it(own.brokers[1]),)
    assert seen.silent == {"2": "no connection: Connection refused"}
    async with asyncio.timeout(120):
        while seen.silent:
            seen = await polled.observe(SHORT_S)
    assert seen.answered == frozenset({"1"})
    own.brokers[2].start()
    assert (await _until_all_answer(polled)).silent == {}


async def test_all_brokers_hung_fail_the_observation_in_time(own):
    for broker in own.brokers.values():
        broker.hold()
    try:
        late = re.escape(f"no answer within {SHORT_S / 2:.1f} s")
        with pytest.raises(ObservationError, match=f"{late}; .* {late}"):
            await observed_in_time(source(own, **PATIENT))
    finally:
        for broker in own.brokers.values():
            broker.go_on()
    await _until_all_answer(source(own))


async def _until_all_answer(polled: KafkaSource) -> Observation:
    give_up = time.monotonic() + 60
    while True:
        try:
            seen = await polled.observe(WITHIN_S)
        except ObservationError:
            seen = Observation((), frozenset(), {})
        if seen.answered == frozenset({"1", "2"}):
            return seen
        assert time.monotonic() < give_up, f"{seen}"


def _available(seen: Observation, broker: str) -> int:
    (found,) = [volume.available_bytes for volume in seen.volumes if volume.broker == broker]
    assert found is not None
    return found
