"""Nodes of this process on a cluster, their quotas, and traffic whose admissions are counted by bucket."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from app.admission.admission import Admission
from app.admission.buckets import Buckets
from app.admission.metrics.metrics import Metrics
from app.catalog.snapshot import Snapshot
from app.domain.ask import Ask
from app.domain.bucket import BucketName
from app.domain.decision import Decision
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import Quota
from app.store.cluster import ClusterStore
from tests.charging import decisions_of
from tests.clusters import Cluster

RULES: Final = MatchingRules()
SECRET: Final = bytes(range(32))
USER_LIMIT, IP_LIMIT, IDS_LIMIT = 40, 120, 30
CALLERS: Final = 50
WITHOUT_REFILL: Final = 1e-9
FALSELY_SEEN: Final = 2
"""How many ids of a test may be false-seen; the probability is at most 1e-4 for each."""

QUOTAS: Final[dict[str, dict[Entity, Quota]]] = {
    "request_rate": {
        Entity.of(user=ANY): Quota("request_rate", WITHOUT_REFILL, "token_bucket", "deny", burst=USER_LIMIT)
    },
    "connection_creation_rate": {
        Entity.of(ip=ANY): Quota(
            "connection_creation_rate", WITHOUT_REFILL, "token_bucket", "deny", burst=IP_LIMIT
        )
    },
    "producer_ids_rate": {Entity.of(user=ANY): Quota("producer_ids_rate", IDS_LIMIT, "producer_ids", "deny")},
    "consumer_byte_rate": {
        Entity.of(user=ANY): Quota(
            "consumer_byte_rate", WITHOUT_REFILL, "token_bucket", "deny", burst=10, max_debt=1e6, shadow=True
        )
    },
}

_names = itertools.count()


def fresh(prefix: str) -> str:
    """A name that no other test uses."""
    return f"{prefix}{next(_names)}"


def address() -> str:
    """An address that no other test uses."""
    number = next(_names)
    return f"10.{number // 65536 % 256}.{number // 256 % 256}.{number % 256}"


def ask_of(user: str | None, ip: str | None, **more: Any) -> Ask:
    """An ask for one request and one connection."""
    usage = {"requests": 1, "connections": 1}
    return Ask(**{"usage": usage, "principal": user, "ip": ip, **more})


@asynccontextmanager
async def nodes(
    cluster: Cluster, count: int = 1, quotas: Any = None, *, caller_clock: bool = False, **more: Any
) -> AsyncIterator[list[Admission]]:
    """Nodes that share the cluster, with long timeouts, because a busy machine is no outage."""
    snapshot = Snapshot.of(QUOTAS if quotas is None else quotas)
    async with AsyncExitStack() as stack:
        opened = []
        for _ in range(count):
            store = ClusterStore(cluster.url, logged=True, timeout_s=60.0, caller_clock=caller_clock)
            admission = Admission(
                store,
                lambda: snapshot,
                rules=RULES,
                secret=lambda: SECRET,
                sequential=False,
                **{"budget_s": 30.0, "queue_s": 60.0, "metrics": Metrics(), **more},
            )
            await admission.open()
            stack.push_async_callback(admission.close)
            opened.append(admission)
        yield opened


async def status(admission: Admission, bucket: str, quota: str) -> Any:
    """The present state of a bucket."""
    buckets = Buckets(admission.circuit, lambda: Snapshot.of(QUOTAS), RULES)
    (found,) = await buckets.status(BucketName.parse(bucket, RULES), quota, None)
    return found


async def spent(admission: Admission, bucket: str, quota: str) -> int:
    """The units that were taken from a bucket that never refills."""
    taken: int = round((await status(admission, bucket, quota)).observed)
    return taken


class Lapses(Metrics):
    """Adds up the units of lapsed leases."""

    units = 0.0

    def count_lapsed(self, units: float) -> None:
        self.units += units


class Traffic:
    """Asks over users, addresses and ids, at random: some in batches, some without a user or an address.

    Attributes:
        charged: by bucket, the asks that were charged to it according to their answers.
        shadowed: by bucket, the asks that were charged to a quota in shadow mode.
        unsure: by bucket, the asks that may have been charged to it, because its slot was lost.
        by_policy: the asks with a quota that a policy decided.
        policy_s: the times of the first and the last answer by policy, by the monotonic clock.
    """

    def __init__(self, users: int, ips: int) -> None:
        self.users = [fresh("u") for _ in range(users)]
        self.ips = [address() for _ in range(ips)]
        self.charged: Counter[str] = Counter()
        self.shadowed: Counter[str] = Counter()
        self.unsure: Counter[str] = Counter()
        self.by_policy = 0
        self.policy_s: tuple[float, float] | None = None
        self.asks = 0
        self.refused = 0
        self._ids: defaultdict[str, set[int]] = defaultdict(set)
        self._is_stopping = False

    @property
    def admitted(self) -> int:
        """The asks that were charged to their user."""
        return sum(self.charged[f"user={user}"] for user in self.users)

    async def send(self, nodes: Sequence[Admission], asks: int, callers: int = CALLERS) -> None:
        """Send this many requests, of one ask or of four."""
        work = iter(range(asks))
        await asyncio.gather(*(self._call(nodes, work, number) for number in range(callers)))

    @asynccontextmanager
    async def flowing(self, nodes: Sequence[Admission], callers: int = CALLERS) -> AsyncIterator[None]:
        """Send asks until the end of the block."""
        self._is_stopping = False
        work = itertools.count()
        async with asyncio.TaskGroup() as group:
            for number in range(callers):
                group.create_task(self._call(nodes, work, number))
            try:
                yield
            finally:
                self._is_stopping = True

    async def _call(self, nodes: Sequence[Admission], work: Any, number: int) -> None:
        chance = random.Random(number)
        for _ in work:
            if self._is_stopping:
                return
            asks = [self._ask(chance) for _ in range(chance.choice((1, 1, 1, 4)))]
            for ask, decision in zip(asks, await decisions_of(chance.choice(nodes), asks), strict=True):
                self.count(ask, decision)

    def _ask(self, chance: random.Random) -> Ask:
        user = chance.choice(self.users) if chance.random() < 0.9 else None
        ip = chance.choice(self.ips) if user is None or chance.random() < 0.8 else None
        ids = (chance.randrange(60),) if user is not None and chance.random() < 0.3 else None
        usage = {"requests": 1, "connections": 1, "fetch_bytes": 1}
        return ask_of(user, ip, usage=usage, producer_ids=ids, detail=True)

    def count(self, ask: Ask, decision: Decision) -> None:
        """Count the verdicts of a decision."""
        self.asks += 1
        self.refused += decision.decision != "admit"
        if decision.source != "store":
            self.by_policy += 1
            now_s = time.monotonic()
            self.policy_s = (self.policy_s or (now_s, now_s))[0], now_s
        for verdict in decision.quotas or ():
            if verdict.quota == "producer_ids_rate":
                if decision.decision == "admit" and verdict.observed is not None:
                    self._ids[verdict.bucket] |= {int(each) for each in ask.producer_ids or ()}
            elif verdict.observed is None:
                self.unsure[verdict.bucket] += not verdict.shadow
            elif decision.decision == "admit" and verdict.shadow:
                self.shadowed[verdict.bucket] += 1
            elif decision.decision == "admit":
                self.charged[verdict.bucket] += 1

    async def check(self, node: Admission, *, lost: Sequence[str] = ()) -> int:
        """Check that no bucket is beyond its limit, and that each has the charges counted for it.

        Args:
            lost: buckets whose primary was killed; they may lack charges that were not replicated.

        Returns:
            the units that only ``unsure`` asks explain.
        """
        orphans = 0
        for names, quota, limit in (
            ([f"user={user}" for user in self.users], "request_rate", USER_LIMIT),
            ([f"ip={ip}" for ip in self.ips], "connection_creation_rate", IP_LIMIT),
        ):
            for name in names:
                used, charged = await spent(node, name, quota), self.charged[name]
                assert used <= limit, f"{name} is beyond its limit"
                if name not in lost:
                    assert charged <= used <= charged + self.unsure[name], name
                    orphans += used - charged
        for user in self.users:
            if (name := f"user={user}") not in lost:
                if not self.unsure[name]:
                    assert await spent(node, name, "consumer_byte_rate") == self.shadowed[name], name
                ids = (await status(node, name, "producer_ids_rate")).charged_ids
                assert ids <= IDS_LIMIT
                if not self.unsure[name]:
                    assert 0 <= len(self._ids[name]) - ids <= FALSELY_SEEN, name
        return orphans
