"""The source `kafka`: every active broker is asked for its disks, each on its own and all at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from kafka import errors
from kafka.protocol.admin import DescribeClusterRequest, DescribeLogDirsRequest
from kafka.protocol.metadata import MetadataRequest

from app.domain.volumes import Observation, ObservationFailed, Volume
from app.run import kafka_call, kafka_client
from app.run.kafka_call import TooOld, Unanswered
from workers.volumes.threads import Threads

T = TypeVar("T")

SPARE: Final = 0.05
"""The part of its time that an observation leaves over, as a busy machine is late."""

SIZES_SINCE: Final = 4
"""The first version of DescribeLogDirs that tells sizes (KIP-827, Kafka 3.3)."""

CLUSTER_AUTHORIZATION_FAILED: Final = 31


class Broker(NamedTuple):
    """An active broker, and where it is for clients."""

    id: str
    server: str


class KafkaSource:
    """Observes the volumes of a Kafka cluster.

    Each broker gets a new connection each time. Keeping them would save some 20 ms of an observation; made
    anew, nothing is left over from a broker that hung, moved or was replaced, and renewed certificates are
    taken up.

    Raises:
        ValueError: a property or the bootstrap cannot be used; the text begins with the variable's name.
    """

    def __init__(self, bootstrap: str, properties: Mapping[str, str]) -> None:
        kafka_client.quiet()
        self._bootstrap = kafka_client.servers(bootstrap)
        self._configuration = kafka_client.configuration(properties)
        longest_ms = self._configuration.get("request_timeout_ms", kafka_client.DEFAULT_TIMEOUT_MS)
        assert isinstance(longest_ms, int)
        self._longest_s = longest_ms / 1000
        self._threads = Threads()

    async def observe(self, within_s: float) -> Observation:
        """One observation, no later than that, whatever the brokers do.

        Raises:
            ObservationFailed: none of the brokers to begin with described the cluster.
        """
        ends = time.monotonic() + within_s * (1 - SPARE)
        self._threads.clear()
        # A broker that hangs while the cluster is described shall not take the time of the rest.
        brokers = await self._describe(within_s / 2)
        left_s = max(0.0, ends - time.monotonic())
        told = await asyncio.gather(*(self._look(broker, left_s) for broker in brokers))
        volumes: list[Volume] = []
        silent = {}
        for broker, answer in zip(brokers, told, strict=True):
            if isinstance(answer, str):
                silent[broker.id] = answer
            else:
                volumes += answer
        return Observation(tuple(volumes), frozenset(b.id for b in brokers) - silent.keys(), silent)

    async def _describe(self, within_s: float) -> list[Broker]:
        """The active brokers, by the first of those to begin with that says it."""
        questions = partial(_describing, self._configuration)
        asked = {
            asyncio.create_task(self._ask(f"bootstrap {server}", server, questions, within_s)): server
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
                    except Unanswered as why:
                        refused[asked[answer]] = str(why)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        raise ObservationFailed("; ".join(f"{server}: {refused[server]}" for server in self._bootstrap))

    async def _look(self, broker: Broker, within_s: float) -> Sequence[Volume] | str:
        """A broker's volumes, or why it did not tell them."""
        telling = partial(_telling, self._configuration, broker)
        try:
            return await self._ask(f"broker {broker.id}", broker.server, telling, within_s)
        except Unanswered as why:
            return str(why)

    async def _ask(self, place: str, server: str, call: Callable[[str, float], T], within_s: float) -> T:
        """A blocking call in a thread; left to itself when its time is over."""
        within_s = min(within_s, self._longest_s)
        try:
            return await self._threads.call(place, partial(call, server, within_s), within_s)
        except TimeoutError:
            raise Unanswered(kafka_call.late(within_s)) from None


def _describing(configuration: Mapping[str, Any], server: str, within_s: float) -> list[Broker]:
    """The active brokers of a cluster; those before 2.8 say it another way."""
    questions = [DescribeClusterRequest(), MetadataRequest(topics=[], allow_auto_topic_creation=False)]
    try:
        answer = kafka_call.ask(server, configuration, questions, within_s)
    except TooOld:
        raise Unanswered("is too old to describe its cluster") from None
    if code := getattr(answer, "error_code", 0):
        raise Unanswered(_refusal(code))
    brokers = [
        Broker(
            str(getattr(found, "broker_id", getattr(found, "node_id", ""))),
            kafka_client.address(found.host, found.port),
        )
        for found in answer.brokers
    ]
    if not brokers:
        raise Unanswered("names no active broker")
    return brokers


def _telling(configuration: Mapping[str, Any], broker: Broker, server: str, within_s: float) -> list[Volume]:
    """The volumes of one broker."""
    # No topics are asked for: the sizes come all the same, and not a line for each partition.
    question = DescribeLogDirsRequest(topics=[], min_version=SIZES_SINCE)
    try:
        answer = kafka_call.ask(server, configuration, [question], within_s)
    except TooOld:
        raise Unanswered("is too old to tell the sizes of its disks, as Kafka 3.3 and later do") from None
    if answer.error_code:
        raise Unanswered(_refusal(answer.error_code))
    if not answer.results:
        raise Unanswered("names no log directory")
    return [
        Volume(broker.id, found.log_dir, *_sizes(found.error_code, found.total_bytes, found.usable_bytes))
        for found in answer.results
    ]


def _sizes(error_code: int, total_bytes: int, usable_bytes: int) -> tuple[int | None, int | None]:
    """A directory that is offline has no sizes: -1, which is neither 0 nor full."""
    if error_code:
        return None, None
    return (total_bytes if total_bytes >= 0 else None), (usable_bytes if usable_bytes >= 0 else None)


def _refusal(code: int) -> str:
    error = errors.for_code(code)
    name = getattr(error, "message", None) or error.__name__
    hint = ": the login needs Describe on the cluster" if code == CLUSTER_AUTHORIZATION_FAILED else ""
    return f"answers {name} ({code}){hint}"
