"""A move from one primary to a cluster while asks go on, by the steps of docs/scale.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import redis

from app.decision_log.batch import STREAM
from tests import clusters, stores
from tests.logged import WITHIN_S, Logged, in_force, settings, workers
from tests.report import say
from tests.service import Service, eventually, running
from tests.spark.java import quick_jobs

pytestmark = pytest.mark.timeout(900)

HOUR_MS: Final = 3_600_000
"""Longer than the test, for the windows of ids and for the samples of a rate."""
WINDOW_S: Final = (36_000, 39_600)
"""The divisor of a rate's sum: ten samples of an hour, and up to one unfinished sample."""

ID_LIMIT: Final = 20
TRICKLE: Final = 1e-4
"""Tokens a second: less than half a token during the test."""
QUOTAS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "user=*": {
        "producer_ids_rate": {"limit": ID_LIMIT, "window_ms": HOUR_MS},
        "request_rate": {"limit": 1, "sample_ms": HOUR_MS, "enforcement": "deny"},
        "controller_mutation_rate": {"limit": TRICKLE, "burst": 1_000},
    },
    "ip=*": {
        "request_rate": {
            "limit": TRICKLE,
            "algorithm": "token_bucket",
            "burst": 100_000,
            "enforcement": "deny",
        },
    },
}

FULL: Final = ("full-0", "full-1")
"""Users at the limit of ids before the move."""
OTHERS: Final = tuple(f"user-{number}" for number in range(10))
USERS: Final = (*FULL, *OTHERS)

REQUESTS: Final = 8_000
"""Requests of one ask; each user asks four times, and a fifth ask would exceed the limit."""
MUTATIONS: Final = 7

BEFORE: Final = range(8)
"""Ids of the others before the first backfill; the other names are for single ids that come later."""
AFTER_BACKFILL, ON_OLD, ON_NEW, ON_BOTH, NEVER_NEW = 100, 200, 300, 400, 500


@dataclass(slots=True)
class Asker:
    """Asks nodes on behalf of all users; ``asked`` counts, because each ask is a row of the log."""

    asked: int = 0

    def ask(self, node: Service, **ask: Any) -> dict[str, Any]:
        decision = node.ask(**ask)
        assert decision["source"] == "store", decision
        self.asked += 1
        return decision

    def use(self, node: Service, user: str, ids: Sequence[int]) -> None:
        """Use ids, requests (of the user's address, too) and mutations, all of it admitted."""
        usage = {"producer_ids": list(ids), "requests": REQUESTS, "mutations": MUTATIONS}
        decision = self.ask(node, principal=user, ip=address_of(user), usage=usage)
        assert (decision["decision"], decision["applied"]) == ("admit", 4)

    def pass_as_known(self, node: Service, user: str, ids: Sequence[int]) -> None:
        """Check that ids pass and are not charged."""
        held = held_by(node, user)
        decision = self.ask(node, principal=user, usage={"producer_ids": list(ids)}, detail=True)
        (verdict,) = decision["quotas"]
        assert (decision["decision"], verdict["observed"]) == ("admit", held.ids)
        assert held_by(node, user).ids == held.ids

    def be_refused(self, node: Service, user: str, quota: str, **usage: object) -> None:
        """Check that a quota refuses a usage."""
        decision = self.ask(node, principal=user, usage=usage)
        assert (decision["decision"], decision["charged"]) == ("throttle", False)
        assert decision["limited_by"]["quota"] == quota


@dataclass(frozen=True, slots=True)
class Held:
    """The content of the buckets of a user and of its address; ``rate`` is in requests a second."""

    ids: int
    rate: float
    mutations: float
    of_address: float


def held_by(node: Service, user: str) -> Held:
    of_user, of_address = looked_up(node, f"user={user}"), looked_up(node, f"ip={address_of(user)}")
    return Held(
        of_user["producer_ids_rate"]["charged_ids"],
        of_user["request_rate"]["observed"],
        of_user["controller_mutation_rate"]["observed"],
        of_address["request_rate"]["observed"],
    )


def looked_up(node: Service, bucket: str) -> dict[str, dict[str, Any]]:
    answer = node.http.get("/v1/buckets", params={"bucket": bucket})
    assert answer.is_success, answer.text
    return {each["quota"]: each for each in answer.json()["buckets"]}


def holds(node: Service, user: str, ids: int, asks: int) -> None:
    """Check that the buckets hold these ids and the usage of so many asks, each once."""
    held = held_by(node, user)
    shortest, longest = WINDOW_S
    assert held.ids == ids, user
    assert asks * REQUESTS / longest <= held.rate <= asks * REQUESTS / shortest, user
    used = (held.mutations, held.of_address)
    assert used == pytest.approx((asks * MUTATIONS, asks * REQUESTS), abs=0.5), user


def address_of(user: str) -> str:
    return f"10.0.0.{USERS.index(user)}"


def backfilled(log: Logged, folder: Path, quick: dict[str, str]) -> None:
    """Step 2: compute the present content of the buckets."""
    done = log.run("spark", "backfill", "--out", str(folder), environment=quick)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "without rates" not in done.stdout, done.stdout


def loaded(log: Logged, cluster: str, folder: Path) -> dict[str, Any]:
    """Step 3: load it into the cluster."""
    to_cluster = {"QUOTAGATE_REDIS_URL": cluster}
    done = log.run("backfill", "load", str(folder), "-o", "json", environment=to_cluster)
    assert done.returncode == 0, done.stdout + done.stderr
    counts: dict[str, Any] = json.loads(done.stdout)
    assert (counts["no_room"], counts["over"], counts["skipped"]) == (0, 0, {})
    return counts


def until_all_is_written(log: Logged, asks: int) -> None:
    eventually(lambda: len(log.decisions()) >= asks, within_s=WITHIN_S)
    assert len(log.decisions()) == asks, "no row is there twice"


def test_nodes_move_from_one_primary_to_a_cluster(tmp_path: Path) -> None:
    """All usage before and during the move is known on the cluster, and counts once.

    Only an id that was new in both stores counts twice, as the document says. An audit counts the
    content of a bucket in the other store as lost.
    """
    quick = quick_jobs()
    how: dict[str, Any] = {
        "database_url": f"sqlite:///{tmp_path / 'catalog.db'}",
        "environment": settings(tmp_path / "log"),
    }
    asker = Asker()
    with ExitStack() as stack, ExitStack() as old_store:
        old_url = old_store.enter_context(stores.running("valkey"))
        one, other = (stack.enter_context(running(store_url=old_url, **how)) for _ in range(2))
        old = Logged((one, other), tmp_path / "log")
        old_writer = stack.enter_context(ExitStack())
        old_writer.enter_context(workers(old))
        for entity, by_key in QUOTAS.items():
            one.put(entity, **by_key)
        wanted = {(entity, key) for entity, by_key in QUOTAS.items() for key in by_key}
        eventually(lambda: wanted <= in_force(other))
        for place, user in enumerate(USERS):
            asker.use(old.nodes[place % 2], user, range(ID_LIMIT) if user in FULL else BEFORE)

        # 1. the cluster, and a writer of its log
        cluster = stack.enter_context(clusters.running(replicas=False)).url
        stack.enter_context(workers(old, {"QUOTAGATE_REDIS_URL": cluster}))
        # 2. and 3. while nodes use the old primary
        old.until_written(asker.asked)
        backfilled(old, tmp_path / "assertions", quick)
        for user in USERS:
            asker.use(other, user, [0] if user in FULL else [AFTER_BACKFILL])
        counts = loaded(old, cluster, tmp_path / "assertions")
        ids = len(FULL) * ID_LIMIT + len(OTHERS) * len(BEFORE)
        assert (counts["added"], counts["there"]) == (2 * ids + 3 * len(USERS), 0)

        # 4. nodes are restarted, one after the other
        assert one.stop() == 0
        one = stack.enter_context(running(store_url=cluster, **how))
        assert one.http.get("/health/ready").json()["store"] == "ok"
        for user in FULL:
            holds(one, user, ID_LIMIT, asks=1)
            asker.pass_as_known(one, user, range(ID_LIMIT))
            asker.be_refused(one, user, "producer_ids_rate", producer_ids=[NEVER_NEW])
        for user in OTHERS:
            holds(one, user, len(BEFORE), asks=1)
            asker.pass_as_known(one, user, BEFORE)
            rest = ID_LIMIT - len(BEFORE)
            too_many = list(range(NEVER_NEW, NEVER_NEW + rest + 1))
            asker.be_refused(one, user, "producer_ids_rate", producer_ids=too_many)
            asker.be_refused(one, user, "request_rate", requests=4 * REQUESTS)
        for user in USERS:
            asker.use(other, user, [0] if user in FULL else [ON_OLD, ON_BOTH])
            asker.use(one, user, [0] if user in FULL else [ON_NEW, ON_BOTH])

        assert other.stop() == 0
        other = stack.enter_context(running(store_url=cluster, **how))

        # 5. the old writer reads the rest of the old store
        with redis.Redis.from_url(old_url) as store:
            eventually(lambda: not store.xlen(STREAM), within_s=WITHIN_S)
        new = Logged((one, other), tmp_path / "log")
        until_all_is_written(new, asker.asked)

        # 6. once more
        backfilled(new, tmp_path / "again", quick)
        counts = loaded(new, cluster, tmp_path / "again")
        say(f"the last load of a move: {counts['added']} added, {counts['there']} already there")

        # 7. the old writer and the old store are stopped
        old_writer.close()
        old_store.close()
        twice = 1  # an id that was new in both stores
        at_the_end = len(BEFORE) + len((AFTER_BACKFILL, ON_OLD, ON_NEW, ON_BOTH)) + twice
        for place, user in enumerate(USERS):
            node = new.nodes[place % 2]
            if user in FULL:
                holds(node, user, ID_LIMIT, asks=4)
                asker.pass_as_known(node, user, range(ID_LIMIT))
                asker.be_refused(node, user, "producer_ids_rate", producer_ids=[NEVER_NEW])
            else:
                holds(node, user, at_the_end, asks=4)
                asker.pass_as_known(node, user, [*BEFORE, AFTER_BACKFILL, ON_OLD, ON_NEW, ON_BOTH])
            asker.be_refused(node, user, "request_rate", requests=REQUESTS)
        again = loaded(new, cluster, tmp_path / "again")
        assert (again["added"], again["there"]) == (0, counts["added"] + counts["there"])

        until_all_is_written(new, asker.asked)
        audit = ("spark", "audit", "--allow-lost", "--out", str(tmp_path / "report"))
        done = new.run(*audit, environment=quick)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "All bounds held" in done.stdout
