"""A cluster of stores: the primary of each slot, and calls to primaries that follow moved slots."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, cast

from redis.exceptions import (
    AskError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    RedisError,
    TryAgainError,
)

from app.domain.slots import SLOTS, slot_of
from app.node.store_url import REDIS_PORT, place_of, single_url
from app.node.url import read_hosts
from app.store.client import SPARES, Reserve, blocking_client_of
from app.store.connection import Command, Connection, Done
from app.store.encoding import encode_plans
from app.store.keys import order_key, probe_key, resets_key, retry_key
from app.store.library import MissingFunctionError
from app.store.port import (
    Answer,
    AnswersCallback,
    Fault,
    Memory,
    Plan,
    ShortageError,
    StoreError,
    as_shortage,
)
from app.store.redis import EXAMINE_WITHIN_S, RedisStore, failure
from app.store.script import SCRIPT

FOLLOW_WITHIN_S: Final = 0.2
"""How long a call may follow its slot to another primary, and be retried while the slot moves."""

THREADS: Final = 8
"""Threads that examine primaries. With this many silent primaries, the other examinations wait."""

AGAIN_S: Final = 0.003
"""The pause before the retry of a call whose keys are being moved."""

_OF_SLOT: Final = (MovedError, AskError, TryAgainError, ClusterDownError)
"""Errors that come before any part of a call has run; the connection stays usable."""


def _no_cluster() -> StoreError:
    return StoreError(
        "no_cluster", "the store is a single server, not a cluster: give its URL as redis://HOST:PORT"
    )


def _is_of_slot(reply: object) -> bool:
    return isinstance(reply, _OF_SLOT) and not isinstance(reply, MasterDownError)


class Address(NamedTuple):
    """The address of a node of the cluster."""

    host: str
    port: int


class PrimaryStore(RedisStore):
    """One primary of a cluster: a call sends one command for each slot, all at once.

    Args:
        cluster: the cluster that it belongs to.
        settings: as for ``RedisStore``.
    """

    CLUSTERED = True

    def __init__(self, cluster: ClusterStore, address: Address, url: str, **settings: Any) -> None:
        super().__init__(url, **settings)
        self.address = address
        self._cluster = cluster
        self._lost_at = asyncio.get_running_loop().time()  # calls wait for the first connection

    def ask(self, plans: Sequence[Plan], done: AnswersCallback) -> None:
        """Decide plans, each atomically; the plans of one slot are decided in order.

        Args:
            done: called with all answers, or with the error of the connection. A plan whose slot could not be
                reached has an error in its answer.
        """
        by_slot: dict[int, list[int]] = {}
        for place, plan in enumerate(plans):
            by_slot.setdefault(plan_slots(plan)[0], []).append(place)
        _SlotCalls(self, plans, by_slot, done).send()

    def command(self, plans: Sequence[Plan], slot: int) -> Command:
        """The command that decides plans of one slot."""
        return self._command(*encode_plans(plans, clustered=True), order_key(slot))

    @property
    def connection(self) -> Connection | None:
        """The connection for calls."""
        return self._calls

    def answers(self, reply: Any, plans: Sequence[Plan]) -> list[Answer] | Exception:
        """The answers to the plans, decoded from a reply; or the error that the reply reports."""
        return self._answers(reply, plans)

    def send(self, command: Command, done: Done) -> None:
        """Send one command; see ``RedisStore``."""
        self._send(command, done)

    def load(self, done: Done) -> None:
        """Load the library."""
        self._send(("FUNCTION", "LOAD", "REPLACE", self._library.code), done)

    @property
    def cluster(self) -> ClusterStore:
        """The cluster that it belongs to."""
        return self._cluster

    async def examine(self) -> tuple[Fault, ...]:
        """Examine the primary, and read the map of slots; from other nodes if the primary is away.

        Raises:
            StoreError: as for ``RedisStore``.
        """
        try:
            faults = await super().examine()
        except StoreError:
            await self._cluster.refresh()
            raise
        await self._cluster.refresh(self.address)
        return faults

    def _received(self, _calls: Connection | None, done: Done, reply: Any) -> None:
        # One command's error does not close the connection: other replies of the call are still to come.
        if isinstance(reply, Exception) and not (isinstance(reply, StoreError) or _is_of_slot(reply)):
            reply = failure(reply)
        done(reply)

    def slots(self) -> Any:
        """Return the reply of the primary to CLUSTER SLOTS; the call blocks its thread.

        Raises:
            RedisError, OSError: no reply, or an error as the reply.
        """
        return cast("Any", self._examiner).execute_command("CLUSTER SLOTS")

    def _faults(self) -> tuple[Fault, ...]:
        faults = super()._faults()
        if any(fault.name == "unchecked" for fault in faults):
            # Without INFO the script cannot see that a replica has taken over, and an undo could be wrong.
            faults = (*faults, Fault("missing_right", "without INFO, charges of refused asks are not undone"))
        try:
            asked: Any = self._examiner.config_get("cluster-require-full-coverage")
        except RedisError:
            return faults  # it does not allow CONFIG
        if asked.get("cluster-require-full-coverage") == "yes":
            return (
                *faults,
                Fault(
                    "cluster_full_coverage",
                    "cluster-require-full-coverage is on: when one shard is lost, all others refuse too; "
                    "set it to no",
                ),
            )
        return faults

    def _examined_keys(self) -> tuple[bytes, bytes]:
        slot = self._cluster.a_slot_of(self.address)
        return order_key(slot), probe_key(slot)

    def _counted_keys(self, bucket: bytes) -> tuple[bytes, bytes]:
        slot = slot_of(bucket)
        return order_key(slot), resets_key(slot)

    def _check_kind(self, server: Mapping[str, Any]) -> None:
        if not server.get("cluster_enabled"):
            raise _no_cluster()


class _SlotCalls:
    """The commands of one call, one for each slot, and their answers.

    The call fails if all its plans fail; otherwise a failed plan has the error in its answer.

    Args:
        by_slot: the indexes of the plans in each slot.
    """

    def __init__(
        self,
        primary: PrimaryStore,
        plans: Sequence[Plan],
        by_slot: Mapping[int, list[int]],
        done: AnswersCallback,
    ) -> None:
        self._primary = primary
        self._plans = plans
        self._by_slot = by_slot
        self._done = done
        self._answers: list[Answer | None] = [None] * len(plans)
        self._missing = len(plans)
        self._failures: list[StoreError] = []
        """One for each plan that failed at this primary."""
        self._connection = primary.connection
        self._until = asyncio.get_running_loop().time() + FOLLOW_WITHIN_S
        self._is_done = False

    def send(self) -> None:
        """Send all commands; none is sent if memory to encode one of them is lacking."""
        primary = self._primary
        commands = [
            (primary.command([self._plans[place] for place in places], slot), slot, places)
            for slot, places in self._by_slot.items()
        ]
        for command, slot, places in commands:
            primary.send(command, partial(self._received, primary, slot, places))

    def _send(self, at: PrimaryStore, slot: int, places: list[int], *, asking: bool = False) -> None:
        command = at.command([self._plans[place] for place in places], slot)
        if asking:
            at.send(("ASKING",), lambda _reply: None)
        at.send(command, partial(self._received, at, slot, places))

    def _received(self, at: PrimaryStore, slot: int, places: list[int], reply: Any) -> None:
        if self._is_done:
            return
        if isinstance(reply, MissingFunctionError):
            at.load(lambda loaded: self._loaded(at, slot, places, loaded))
        elif _is_of_slot(reply):
            self._follow(at, slot, places, reply)
        elif isinstance(answers := at.answers(reply, [self._plans[place] for place in places]), Exception):
            failed = _as_failure(answers)
            if at is self._primary:
                self._failures += [failed] * sum(self._answers[place] is None for place in places)
            self._fill(places, [Answer((), error=failed)] * len(places))
        else:
            self._fill(places[: len(answers)], answers)
            if len(answers) < len(places) and not self._is_done:
                self._send(at, slot, places[len(answers) :])

    def _loaded(self, at: PrimaryStore, slot: int, places: list[int], reply: Any) -> None:
        if isinstance(reply, Exception):
            self._received(at, slot, places, reply)
        else:
            self._send(at, slot, places)

    def _follow(self, at: PrimaryStore, slot: int, places: list[int], error: Exception) -> None:
        """Send a command again to the current primary of its slot; give up after ``FOLLOW_WITHIN_S``."""
        loop, cluster = asyncio.get_running_loop(), at.cluster
        to, asking = at, False
        if isinstance(error, MovedError | AskError):
            address = Address(error.host or at.address.host, error.port)
            if isinstance(error, MovedError):
                cluster.moved(slot, address)
            found = cluster.primaries.get(address) or cluster.begin(address)
            to, asking = found, isinstance(error, AskError)
        elif isinstance(error, ClusterDownError):
            cluster.refresh_soon()
        if loop.time() >= self._until:
            failed = failure(error)
            self._fill(places, [Answer((), error=failed)] * len(places))
        elif isinstance(error, TryAgainError) and len(places) > 1:
            for place in places:  # the keys of one ask are more likely all in one place
                self._send(at, slot, [place])
        elif isinstance(error, TryAgainError | ClusterDownError):
            loop.call_later(AGAIN_S, self._again, at, slot, places)
        else:
            self._send(to, slot, places, asking=asking)
            loop.call_at(self._until, self._give_up, places, failure(error))

    def _again(self, at: PrimaryStore, slot: int, places: list[int]) -> None:
        if not self._is_done:
            self._send(at, slot, places)

    def _give_up(self, places: list[int], error: StoreError) -> None:
        """Fail the plans that were sent on and are still unanswered; later replies are ignored."""
        if not self._is_done:
            self._fill(places, [Answer((), error=error)] * len(places))

    def _fill(self, places: Sequence[int], answers: Sequence[Answer]) -> None:
        for place, answer in zip(places, answers, strict=True):
            if self._answers[place] is None:
                self._answers[place] = answer
                self._missing -= 1
        if self._missing or self._is_done:
            return
        self._is_done = True
        if len(self._failures) < len(self._plans):
            self._done(cast("list[Answer]", self._answers))
            return
        failed = min(self._failures, key=_is_unsent)
        if self._connection is not None and self._connection is self._primary.connection:
            # After a failover the address may point to another store than this connection does.
            self._primary.give_up(failed)
        self._done(failed)


class ClusterStore:
    """The primaries of a cluster, and the slots that each has.

    Args:
        url: ``redis+cluster://HOST:PORT,HOST:PORT``; these nodes name the others.
        settings: as for ``RedisStore``.

    Attributes:
        primaries: by their addresses.
        began, ended: called with a primary that is new, or that has no slots any more.
    """

    def __init__(self, url: str, **settings: Any) -> None:
        self._url = url
        self._reserve = Reserve.of(url, THREADS)
        self._settings = {"script": SCRIPT, "reserve": self._reserve, **settings}
        self._seeds = [Address(*host) for host in read_hosts(place_of(url), REDIS_PORT)]
        self._nodes = list(self._seeds)
        self._owners: list[Address | None] = [None] * SLOTS
        self.primaries: dict[Address, PrimaryStore] = {}
        self.began: Callable[[PrimaryStore], None] = lambda _primary: None
        self.ended: Callable[[PrimaryStore], None] = lambda _primary: None
        self._refreshing: asyncio.Task[None] | None = None
        self.error: StoreError | None = StoreError("connection", "no node of the cluster was asked yet")
        """Why the map of slots is unknown; None once it is known."""

    @property
    def memory(self) -> Memory | None:
        """The memory of all primaries together, without those whose memory is unknown."""
        known = [primary.memory for primary in self.primaries.values() if primary.memory is not None]
        if not known:
            return None
        bounded = all(memory.most for memory in known)
        return Memory(
            sum(memory.used for memory in known), sum(memory.most for memory in known) if bounded else 0
        )

    def primary_of(self, slot: int) -> PrimaryStore | None:
        """The primary that has a slot; None if unknown."""
        owner = self._owners[slot]
        return None if owner is None else self.primaries.get(owner)

    def a_slot_of(self, address: Address) -> int:
        """The first slot of the primary at an address.

        Raises:
            StoreError: the primary has no slot.
        """
        try:
            return self._owners.index(address)
        except ValueError:
            raise StoreError("slot_moved", "the primary has no slots any more") from None

    def moved(self, slot: int, address: Address) -> None:
        """Note the new primary of a slot, and read the whole map soon."""
        self.begin(address)
        self._owners[slot] = address
        self.refresh_soon()

    def begin(self, address: Address) -> PrimaryStore:
        """The primary at an address, which may be new."""
        found = self.primaries.get(address)
        if found is None:
            url = single_url(self._url, *address)
            found = self.primaries[address] = PrimaryStore(self, address, url, **self._settings)
            self._reserve.sockets.keep(SPARES * (len(self.primaries) + 1))
            self.began(found)
        return found

    def refresh_soon(self) -> None:
        """Read the map, unless it is being read."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self.refresh(), name="read the slots")

    async def refresh(self, first: Address | None = None) -> None:
        """Read the map of slots from the first node that answers.

        Args:
            first: the node to ask first.
        """
        loop = asyncio.get_running_loop()
        nodes = random.sample(self._nodes, len(self._nodes))
        nodes = [*([first] if first else []), *nodes, *self._seeds]
        try:
            found = await loop.run_in_executor(self._reserve.threads, self._read, list(dict.fromkeys(nodes)))
        except StoreError as error:
            if not isinstance(error, ShortageError):
                self.error = error
            return
        owners, self._nodes = found
        self.error = None
        self._owners = owners
        having = set(owners) - {None}
        for address in having:
            self.begin(cast("Address", address))
        for address in set(self.primaries) - having:
            self.ended(self.primaries.pop(address))

    def _read(self, nodes: Sequence[Address]) -> tuple[list[Address | None], list[Address]]:
        """The owners of all slots, and all nodes, from the first node that answers; blocks its thread.

        Raises:
            StoreError: no node answers.
        """
        failed = StoreError("connection", "no node of the cluster can be reached")
        for node in nodes:
            try:
                read = list(_ranges(self._slots_as_seen_by(node), node))
            except (RedisError, OSError) as error:
                failed = failure(error)
                if "cluster support disabled" in str(error):
                    failed = _no_cluster()
                continue
            owners: list[Address | None] = [None] * SLOTS
            every: dict[Address, None] = {}
            for begin, end, addresses in read:
                owners[begin : end + 1] = [addresses[0]] * (end + 1 - begin)
                every |= dict.fromkeys(addresses)
            if every:
                return owners, list(every)
        raise failed

    def _slots_as_seen_by(self, node: Address) -> Any:
        """Return a node's reply to CLUSTER SLOTS, over an existing connection if possible."""
        if (primary := self.primaries.get(node)) is not None:
            return primary.slots()
        url = single_url(self._url, *node)
        with blocking_client_of(url, EXAMINE_WITHIN_S, self._reserve.sockets) as client:
            return cast("Any", client).execute_command("CLUSTER SLOTS")

    async def close(self) -> None:
        """Close everything except the primaries; their users close those."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait({self._refreshing})
        self._reserve.close()


def plan_slots(plan: Plan) -> Sequence[int]:
    """The slots of a plan: of its charges in order, and then of its kept answer, if it has one."""
    slots = [slot_of(charge.key) for charge in plan.charges]
    if plan.retry is not None:
        slots.append(slot_of(retry_key(*plan.retry, clustered=True)))
    return slots


def _as_failure(error: Exception) -> StoreError:
    if isinstance(error, StoreError):
        return error
    return as_shortage(error) or StoreError("unexpected", repr(error))


def _is_unsent(error: StoreError) -> bool:
    return isinstance(error, ShortageError) and not error.was_sent


def _ranges(reply: Any, asked: Address) -> Iterator[tuple[int, int, list[Address]]]:
    """The reply to ``CLUSTER SLOTS``: ranges of slots, each with its primary and then its replicas."""
    rows = (
        [(begin, end, [servers["primary"], *servers["replicas"]]) for (begin, end), servers in reply.items()]
        if isinstance(reply, dict)
        else [(row[0], row[1], row[2:]) for row in reply]
    )
    for begin, end, nodes in rows:
        yield int(begin), int(end), [_address(node[0], node[1], asked) for node in nodes]


def _address(host: Any, port: Any, asked: Address) -> Address:
    text = host.decode() if isinstance(host, bytes) else host
    return Address(text or asked.host, int(port))
