"""The Kafka source and answers that are wrong, old, half or missing: unknown, and never zero or full."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Mapping

import pytest
from kafka.protocol.admin import DescribeClusterRequest, DescribeClusterResponse, DescribeLogDirsRequest
from kafka.protocol.metadata import MetadataRequest

from app.domain.errors import ObservationError
from app.domain.volumes import Volume
from tests.kafka import odd_broker
from tests.kafka.odd_broker import OddBroker, directory, telling
from workers.volumes.kafka import KafkaSource

WITHIN_S = 60.0
SHORT_S = 5.0
"""The timeout of observations that run into it because of a broker."""
Brokers = Mapping[int, OddBroker]


@pytest.fixture
async def brokers() -> AsyncIterator[Brokers]:
    async with odd_broker.running() as started:
        yield started


def source(brokers: Brokers, **properties: str) -> KafkaSource:
    return KafkaSource(",".join(broker.address for broker in brokers.values()), properties)


async def test_complete_answers_give_all_volumes(brokers):
    seen = await source(brokers).observe(WITHIN_S)
    assert seen.volumes == (Volume("1", "/d", 1000, 400), Volume("2", "/d", 1000, 400))
    assert seen.answered == frozenset({"1", "2"})
    assert seen.silent == {}


@pytest.mark.parametrize(
    ("described", "known"),
    [
        (directory("/d", -1, -1, error_code=56), (None, None)),
        (directory("/d", 1000, 0, error_code=56), (None, None)),
        (directory("/d", -1, -1), (None, None)),
        (directory("/d", 1000, -1), (1000, None)),
        (directory("/d", -1, 400), (None, 400)),
        (directory("/d", 1000, 0), (1000, 0)),
        (directory("/d", 2**63 - 1, 2**63 - 1), (2**63 - 1, 2**63 - 1)),
    ],
)
async def test_missing_sizes_of_a_directory_are_unknown(brokers, described, known):
    brokers[2].answers[DescribeLogDirsRequest] = lambda _: telling(directory("/other", 1, 1), described)
    seen = await source(brokers).observe(WITHIN_S)
    assert seen.volumes[1:] == (Volume("2", "/other", 1, 1), Volume("2", "/d", *known))
    assert seen.answered == frozenset({"1", "2"})


@pytest.mark.parametrize("newest", [0, 1, 3])
async def test_broker_too_old_for_sizes_is_silent_among_newer_ones(brokers, newest):
    brokers[2].newest[DescribeLogDirsRequest] = newest
    seen = await source(brokers).observe(WITHIN_S)
    assert [volume.broker for volume in seen.volumes] == ["1"]
    assert seen.answered == frozenset({"1"})
    assert seen.silent == {"2": "is too old to report the sizes of its disks: that needs Kafka 3.3"}


async def test_cluster_without_describe_cluster_is_described_by_metadata(brokers):
    for broker in brokers.values():
        del broker.newest[DescribeClusterRequest]
        broker.newest[MetadataRequest] = 5
        broker.newest[DescribeLogDirsRequest] = 1
    seen = await source(brokers).observe(WITHIN_S)
    assert (seen.volumes, seen.answered, set(seen.silent)) == ((), frozenset(), {"1", "2"})


async def test_each_broker_is_asked_with_its_own_request_versions(brokers):
    """Each connection finds out the versions for itself."""
    brokers[1].newest[DescribeLogDirsRequest] = 1
    seen = await KafkaSource(brokers[1].address, {}).observe(WITHIN_S)
    assert [volume.broker for volume in seen.volumes] == ["2"]
    assert set(seen.silent) == {"1"}


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (31, "answers CLUSTER_AUTHORIZATION_FAILED (31): the login needs Describe on the cluster"),
        (-1, "answers UNKNOWN (-1)"),
        (9999, "answers UNKNOWN (9999)"),
    ],
)
async def test_error_makes_a_broker_silent_and_not_empty(brokers, code, why):
    brokers[2].answers[DescribeLogDirsRequest] = lambda _: telling(error_code=code)
    seen = await source(brokers).observe(WITHIN_S)
    assert seen.silent == {"2": why}
    assert seen.answered == frozenset({"1"})


async def test_broker_without_directories_is_silent(brokers):
    brokers[2].answers[DescribeLogDirsRequest] = lambda _: telling()
    seen = await source(brokers).observe(WITHIN_S)
    assert seen.silent == {"2": "names no log directory"}


@pytest.mark.parametrize(
    "answer", [b"", b"\x00\x00\x01\x00half", b"\xff\xff\xff\xff", b"HTTP/1.1 400\r\n\r\n"]
)
async def test_truncated_response_makes_a_broker_silent(brokers, answer):
    brokers[2].answers[DescribeLogDirsRequest] = lambda _: answer
    seen = await source(brokers).observe(WITHIN_S)
    assert [volume.broker for volume in seen.volumes] == ["1"]
    assert set(seen.silent) == {"2"}
    assert seen.silent["2"]


async def test_unreadable_response_ends_in_time(brokers):
    """kafka-python stumbles over it in a task that nobody waits for."""
    brokers[2].answers[DescribeLogDirsRequest] = lambda _: b"\x00\x00\x00\x06" + b"\x00\x00\x00\x02ab"
    seen = await source(brokers).observe(SHORT_S)
    assert [volume.broker for volume in seen.volumes] == ["1"]
    assert set(seen.silent) == {"2"}


async def test_broker_that_never_answers_costs_only_its_time(brokers):
    asked = asyncio.Event()

    async def never(_request):
        asked.set()
        await asyncio.Event().wait()

    brokers[2].answers[DescribeLogDirsRequest] = never
    async with asyncio.timeout(120):  # the request itself would take longer
        seen = await source(brokers, request_timeout_ms="300000").observe(SHORT_S)
    assert asked.is_set()
    assert [volume.broker for volume in seen.volumes] == ["1"]
    assert "no answer within" in seen.silent["2"]


async def test_request_timeout_shortens_the_time(brokers):
    async def never(_request):
        await asyncio.Event().wait()

    brokers[2].answers[DescribeLogDirsRequest] = never
    seen = await source(brokers, request_timeout_ms="500").observe(60.0)
    assert seen.silent == {"2": "no answer within 0.5 s"}


async def test_hung_bootstrap_server_does_not_matter_if_another_answers(brokers):
    async def never(_request):
        await asyncio.Event().wait()

    brokers[1].answers[DescribeClusterRequest] = never
    seen = await source(brokers).observe(30.0)
    assert seen.answered == frozenset({"1", "2"})


async def test_call_that_hangs_forever_is_made_once(brokers, monkeypatch):
    """Like name resolution that never returns: nothing can end that thread."""
    go_on = threading.Event()
    connect = socket.create_connection

    def hanging(address, timeout):
        if address[1] == brokers[2].port:
            go_on.wait(60)
        return connect(address, timeout)

    monkeypatch.setattr("app.kafka.call.socket.create_connection", hanging)
    polled = KafkaSource(brokers[1].address, {})
    try:
        first = await polled.observe(1.0)
        later = [await polled.observe(1.0) for _ in range(3)]
        assert [thread.name for thread in threading.enumerate()].count("kafka broker 2") == 1
    finally:
        go_on.set()
    assert all("no answer within" in seen.silent["2"] for seen in (first, *later))
    assert all(seen.answered == frozenset({"1"}) for seen in later)


async def test_library_error_concerns_one_broker_only(brokers, monkeypatch):
    connect = socket.create_connection

    def stumbling(address, timeout):
        if address[1] == brokers[2].port:
            raise RuntimeError("odd")
        return connect(address, timeout)

    monkeypatch.setattr("app.kafka.call.socket.create_connection", stumbling)
    seen = await source(brokers).observe(WITHIN_S)
    assert seen.silent == {"2": "RuntimeError: odd"}
    assert [volume.broker for volume in seen.volumes] == ["1"]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"error_code": 31}, "CLUSTER_AUTHORIZATION_FAILED"),
        ({"brokers": []}, "lists no active broker"),
    ],
)
async def test_observation_fails_if_the_cluster_is_not_described(brokers, answer, why):
    for broker in brokers.values():
        whole: dict[str, object] = {
            "throttle_time_ms": 0,
            "error_code": 0,
            "error_message": None,
            "endpoint_type": 1,
            "cluster_id": "odd",
            "controller_id": 1,
            "brokers": [],
            "authorized_operations": [],
        }
        broker.answers[DescribeClusterRequest] = lambda _, said=whole | answer: DescribeClusterResponse(
            **said
        )
    with pytest.raises(ObservationError, match=why):
        await source(brokers).observe(WITHIN_S)


async def test_observation_without_bootstrap_servers_fails_and_names_each():
    with pytest.raises(ObservationError, match=r"127\.0\.0\.1:1: no connection: .*; 127\.0\.0\.1:2: no con"):
        await KafkaSource("127.0.0.1:1,127.0.0.1:2", {}).observe(WITHIN_S)


async def test_observation_after_a_failed_one_starts_fresh(brokers):
    polled = source(brokers)
    brokers[2].answers[DescribeLogDirsRequest] = lambda _: b""
    assert set((await polled.observe(WITHIN_S)).silent) == {"2"}
    brokers[2].answers[DescribeLogDirsRequest] = lambda _: telling(directory("/d", 7, 5))
    assert (await polled.observe(WITHIN_S)).volumes[1] == Volume("2", "/d", 7, 5)
