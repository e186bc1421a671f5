"""The source `kafka`: asks all active brokers for their disk usage, in parallel and independently."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from kafka import errors
from kafka.protocol.admin import DescribeClusterRequest, DescribeLogDirsRequest
from kafka.protocol.metadata import MetadataRequest

from app.domain.errors import ObservationError
from app.domain.volumes import Observation, Volume
from app.kafka import configuration
from app.kafka.call import ask, late
from app.kafka.configuration import address
from app.kafka.errors import BrokerSilentError, BrokerTooOldError
from workers.volumes.threads import Threads

T = TypeVar("T")

SPARE: Final = 0.05
"""The fraction of its time that an observation leaves unused, as a busy machine is late."""

SIZES_VERSION: Final = 4
"""The first version of DescribeLogDirs with sizes (KIP-827, Kafka 3.3)."""

CLUSTER_AUTHORIZATION_FAILED: Final = 31


class BrokerAddress(NamedTuple):
    """An active broker's id, and its `host:port` for clients."""

    id: str
    server: str


class KafkaSource:
    """Observes the volumes of a Kafka cluster.

    Each observation opens new connections. Keeping them would save about 20 ms, but new ones have no state of
    a broker that hung, moved or was replaced, and they use the newest certificates.

    Raises:
        ValueError: a property or the bootstrap is invalid; the text begins with the variable's name.
    """

    def __init__(self, bootstrap: str, properties: Mapping[str, str]) -> None:
        configuration.silence_library()
        self._bootstrap = configuration.servers(bootstrap)
        self._configuration = configuration.configuration(properties)
        longest_ms = self._configuration.get("request_timeout_ms", configuration.DEFAULT_TIMEOUT_MS)
        assert isinstance(longest_ms, int)
        self._longest_s = longest_ms / 1000
        self._threads = Threads()

    async def observe(self, within_s: float) -> Observation:
        """Return one observation within the time, whatever the brokers do.

        Raises:
            ObservationError: no bootstrap server described the cluster.
        """
        ends = time.monotonic() + within_s * (1 - SPARE)
        self._threads.clear()
        # A bootstrap server that hangs must leave time for the rest.
        brokers = await self._describe(within_s / 2)
        left_s = max(0.0, ends - time.monotonic())
        answers = await asyncio.gather(*(self._volumes_of(broker, left_s) for broker in brokers))
        volumes: list[Volume] = []
        silent = {}
        for broker, answer in zip(brokers, answers, strict=True):
            if isinstance(answer, str):
                silent[broker.id] = answer
            else:
                volumes += answer
        return Observation(tuple(volumes), frozenset(b.id for b in brokers) - silent.keys(), silent)

    async def _describe(self, within_s: float) -> list[BrokerAddress]:
        """The active brokers, from the bootstrap server that answers first."""
        call = partial(_describe_cluster, self._configuration)
        asked = {
            asyncio.create_task(self._ask(f"bootstrap {server}", server, call, within_s)): server
            for server in self._bootstrap
        }
        refused = {}
        try:
            waiting = set(asked)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for answer in done:
                    try:
                        return answer.result()
                    except BrokerSilentError as why:
                        refused[asked[answer]] = str(why)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        raise ObservationError("; ".join(f"{server}: {refused[server]}" for server in self._bootstrap))

    async def _volumes_of(self, broker: BrokerAddress, within_s: float) -> Sequence[Volume] | str:
        """A broker's volumes, or why they are unknown."""
        call = partial(_describe_volumes, self._configuration, broker)
        try:
            return await self._ask(f"broker {broker.id}", broker.server, call, within_s)
        except BrokerSilentError as why:
            return str(why)

    async def _ask(self, key: str, server: str, call: Callable[[str, float], T], within_s: float) -> T:
        """Run a blocking call in a thread, and abandon it when its time is over."""
        within_s = min(within_s, self._longest_s)
        try:
            return await self._threads.call(key, partial(call, server, within_s), within_s)
        except TimeoutError:
            raise BrokerSilentError(late(within_s)) from None


def _describe_cluster(configuration: Mapping[str, Any], server: str, within_s: float) -> list[BrokerAddress]:
    """The active brokers of a cluster; Kafka before 2.8 needs another request."""
    requests = [DescribeClusterRequest(), MetadataRequest(topics=[], allow_auto_topic_creation=False)]
    try:
        answer = ask(server, configuration, requests, within_s)
    except BrokerTooOldError:
        raise BrokerSilentError("is too old to describe its cluster") from None
    if code := getattr(answer, "error_code", 0):
        raise BrokerSilentError(_refusal(code))
    brokers = [
        BrokerAddress(
            str(getattr(found, "broker_id", getattr(found, "node_id", ""))),
            address(found.host, found.port),
        )
        for found in answer.brokers
    ]
    if not brokers:
        raise BrokerSilentError("lists no active broker")
    return brokers


def _describe_volumes(
    configuration: Mapping[str, Any], broker: BrokerAddress, server: str, within_s: float
) -> list[Volume]:
    """The volumes of one broker."""
    # Without topics: the sizes come all the same, without a row for each partition.
    request = DescribeLogDirsRequest(topics=[], min_version=SIZES_VERSION)
    try:
        answer = ask(server, configuration, [request], within_s)
    except BrokerTooOldError:
        raise BrokerSilentError("is too old to report the sizes of its disks: that needs Kafka 3.3") from None
    if answer.error_code:
        raise BrokerSilentError(_refusal(answer.error_code))
    if not answer.results:
        raise BrokerSilentError("names no log directory")
    return [
        Volume(broker.id, found.log_dir, *_sizes(found.error_code, found.total_bytes, found.usable_bytes))
        for found in answer.results
    ]


def _sizes(error_code: int, total_bytes: int, usable_bytes: int) -> tuple[int | None, int | None]:
    """The sizes of a directory; None if it is offline, or if the broker answers -1 (unknown)."""
    if error_code:
        return None, None
    return (total_bytes if total_bytes >= 0 else None), (usable_bytes if usable_bytes >= 0 else None)


def _refusal(code: int) -> str:
    error = errors.for_code(code)
    name = getattr(error, "message", None) or error.__name__
    hint = ": the login needs Describe on the cluster" if code == CLUSTER_AUTHORIZATION_FAILED else ""
    return f"answers {name} ({code}){hint}"
