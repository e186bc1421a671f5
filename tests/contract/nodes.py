"""A state machine that compares several nodes on one store, each with known ids of its own, with the oracle.

Every call to the store is repeated in the oracle, which must agree. An answer that a node gives alone must
agree with the oracle at that moment. An id in use must not be forgotten, whichever node was asked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import msgspec
import redis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from app.admission import admission
from app.admission.gathering.queue import LateCallback
from app.admission.known_ids import memory as known_ids
from app.admission.known_ids.local import LocalAnswers
from app.admission.known_ids.memory import NEVER, KnownIds
from app.admission.metrics.metrics import Metrics
from app.admission.plan import Knowledge, PlannedAsk
from app.catalog.snapshot import Snapshot
from app.domain.ask import Ask, Mode
from app.domain.caller import ANYONE
from app.domain.decision import Decision
from app.domain.entity import Entity
from app.domain.ladder import AppliedQuota, MatchingRules, Quotas, applied_quotas
from app.domain.oracle import IdsBucket, Oracle, key_of
from app.domain.quota import Layers, Quota
from app.domain.usage import ids_of, spreads_of
from app.store.encoding import answers_of
from app.store.keys import RESETS_KEY, bucket_key
from app.store.port import Answer, IdsResult, Mark, Plan, StoreError
from app.store.redis import RedisStore
from app.store.script import SCRIPT
from tests.contract.machine import Difference

SECRET = bytes(range(32))
RULES = MatchingRules()
IDS = (*range(10), "x", "y", -1)
USERS = ("a", "b")
WINDOW_MS = 3_000
POLICIES = (Layers(1_000, 4_000), Layers(500, 2_000), Layers(3_000, 4_500))
STEP_MS = 200
"""Nodes read the marks and renew before more time than this passes."""
FALL_MS = 10_000
"""How far the store's clock is set back: longer than any layer lives."""

MUST_MEET = (
    "known alone",
    "known alone, rates asked",
    "known while lost",
    "known in part",
    "passed without the store",
    "renewal",
    "renewal dropped",
    "renewal before a loss is seen",
    "restored",
    "reset",
    "loss",
    "policy change",
    "set back",
    "learned late",
    "nothing learned",
    "refused",
)
AT_LEAST = 20


@dataclass
class LateReply:
    """An answer of the store that its node has not read yet, and how many events were before it.

    Attributes:
        expected: the decision of the oracle.
        generation: the generation of the node's known ids when it planned the ask.
    """

    planned: PlannedAsk
    answer: Answer
    expected: Decision
    events: int
    generation: int


@dataclass
class Node:
    """A node: its known ids, and the machine's record of it.

    Attributes:
        looked: how many events (losses, resets) had happened when the node last read the marks.
        noticed: the resets that the node has noticed.
    """

    local: LocalAnswers
    known: KnownIds
    looked: int = 0
    noticed: set[int] = field(default_factory=set)
    late: list[LateReply] = field(default_factory=list)


class Unhurried(LocalAnswers):
    """Renews only when the machine calls for it."""

    def _renew_soon(self) -> None:
        pass


class Nodes(RuleBasedStateMachine):
    """Several nodes on one store."""

    url: str
    script: str = SCRIPT
    module: ModuleType = known_ids
    met: Counter[str]
    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__()
        self.redis = redis.Redis.from_url(self.url)
        self.redis.flushall()
        self.now = self.settled_at = 1_000_000
        self.fell_ms = 0  # by how much the store's clock was set back in all
        self.events = 0
        self.lost = 0  # the number of the last loss among the events
        self.reset_at: dict[tuple[str, int], int] = {}
        self.lives_until: dict[tuple[str, Any], int] = {}
        self.reset_until: dict[tuple[str, Any], tuple[int, int]] = {}
        self.used_at: dict[tuple[str, Any], int] = {}
        self.gone: set[tuple[str, Any]] = set()
        self.meanwhile: Callable[[], Awaitable[None]] | None = None

    @initialize(many=st.integers(1, 3), lag=st.sampled_from((0, 0, 3)), limit=st.sampled_from((2, 4, 8)))
    def begin(self, many: int, lag: int, limit: int) -> None:
        self.met["steps"] -= 1
        self.lag = lag
        self.store = RedisStore(self.url, caller_clock=True, script=self.script)
        self.loop.run_until_complete(self.store.connect())
        self.oracle = Oracle(SECRET)
        ids = Quota(
            "producer_ids_rate", limit, "producer_ids", "deny", window_ms=WINDOW_MS, layers=POLICIES[0]
        )
        rate = Quota("request_rate", 5, "sampled_rate", "deny", samples=3, sample_ms=200)
        everybody = Entity.parse("user=*")
        self.quotas: dict[str, dict[Entity, Quota]] = {
            "producer_ids_rate": {everybody: ids},
            "request_rate": {everybody: rate},
        }
        self.nodes = [self._node() for _ in range(many)]
        self._publish()
        self.admission = admission.Admission(
            self.store,  # the admission sends nothing to it
            lambda: self.snapshot,
            rules=RULES,
            secret=lambda: SECRET,
            sequential=False,
            budget_s=1.0,
            metrics=Metrics(),
        )

    def _node(self) -> Node:
        known = self.module.KnownIds()
        local = Unhurried(
            self,  # type: ignore[arg-type]  # it sends what a gatherer would
            self._mark,
            quotas=self._quotas,
            secret=lambda: SECRET,
            away=lambda: False,
            metrics=Metrics(),
            known=known,
            now_s=lambda: (self.now + self.fell_ms) / 1000,
        )
        local._time = self.module.StoreTime()
        node = Node(local, known)
        self._poll(node)
        return node

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.loop.run_until_complete(self.store.close())
        self.redis.close()

    def _quotas(self) -> Quotas:
        return self.quotas

    def _publish(self) -> None:
        self.snapshot = Snapshot.of(self.quotas)

    async def _mark(self) -> Mark:
        """The marks, with the time of this test instead of the server's; each way takes `lag`."""
        self.now += self.lag
        mark = (await self.store.mark())._replace(now_ms=self.now)
        self.oracle.birth = mark.birth
        self.now += self.lag
        return mark

    @rule(
        data=st.data(),
        user=st.sampled_from(USERS),
        ids=st.lists(st.sampled_from(IDS), min_size=1, max_size=3),
        mode=st.sampled_from(("admit", "admit", "admit", "admit", "record", "peek")),
        requests=st.sampled_from((None, None, 1, 4)),
        how=st.sampled_from(("", "", "", "", "detail", "id")),
        late=st.sampled_from((False, False, False, True)),
    )
    def ask(
        self,
        data: Any,
        user: str,
        ids: list[Any],
        mode: Mode,
        requests: int | None,
        how: str,
        late: bool,
    ) -> None:
        usage = {} if requests is None else {"requests": requests}
        ask = Ask(usage, tuple(ids), user, mode=mode, detail=how == "detail")
        if how == "id":
            ask = replace(ask, id=f"{self.now}-{len(self.oracle.answers)}-{data.draw(st.integers(0, 9**9))}")
        self._ask(self._pick(data), ask, late=late)

    @rule(data=st.data(), user=st.sampled_from(USERS), each=st.sampled_from(IDS), times=st.integers(2, 5))
    def insist(self, data: Any, user: str, each: Any, times: int) -> None:
        """Ask for one id again and again, of any node."""
        for _ in range(times):
            self._ask(self._pick(data), Ask({}, (each,), user))

    @rule(data=st.data(), user=st.sampled_from(USERS), first=st.integers(0, 12), times=st.integers(2, 6))
    def march(self, data: Any, user: str, first: int, times: int) -> None:
        """Keep ids in use for several layers, at any node."""
        ids = (IDS[first:] + IDS)[:2]
        for _ in range(times):
            self._ask(self._pick(data), Ask({}, ids, user))
            self.advance(data.draw(st.sampled_from((300, 700, 1_200))))
            usage = data.draw(st.sampled_from(({}, {"requests": 1})))
            self._ask(self._pick(data), Ask(usage, ids[:1], user))

    @rule(data=st.data(), user=st.sampled_from(USERS), first=st.integers(0, 12))
    def exhaust(self, data: Any, user: str, first: int) -> None:
        """Ask for many ids one by one until the quota refuses, and for each again at once."""
        node = self._pick(data)
        for each in (IDS[first:] + IDS)[:10]:
            self._ask(node, Ask({}, (each,), user))
            self._ask(node, Ask({}, (each,), user))

    @rule(data=st.data(), user=st.sampled_from(USERS))
    def miss(self, data: Any, user: str) -> None:
        """The store is away for a moment; ids that pass meanwhile must be alive and known."""
        self._miss(self._pick(data), user)

    @rule(data=st.data(), user=st.sampled_from(USERS), each=st.sampled_from(IDS))
    def miss_what_was_reset(self, data: Any, user: str, each: Any) -> None:
        """The store is away just after a node has seen that a bucket was reset."""
        self._miss(self._seen_reset(data, user, each), user)

    def _miss(self, node: Node, user: str) -> None:
        for each in IDS[:-1]:
            ask = Ask({}, (each,), user)
            if node.local.passes(ask, self.admission._charges(ask)):
                self.met["passed without the store"] += 1
                self._check_alive(node, ask)

    @rule(data=st.data())
    def read(self, data: Any) -> None:
        """A node reads its late replies."""
        self._read(self._pick(data))

    @rule(data=st.data())
    def look(self, data: Any) -> None:
        self._poll(self._pick(data))

    @rule(data=st.data())
    def renew(self, data: Any) -> None:
        self._renew(self._pick(data))

    @rule(ms=st.sampled_from((0, 1, 50, 199, 500, 999, 1_000, 1_500, 2_999, 4_000, 6_001)))
    def advance(self, ms: int) -> None:
        """Let time pass; meanwhile nodes read the marks, and renew used ids."""
        first = max(0, min(ms, self.settled_at + STEP_MS - self.now))
        self.now += first
        if ms > first:
            self._settle()
        self.now += ms - first

    def _settle(self) -> None:
        self.settled_at = self.now
        for node in self.nodes:
            self._poll(node)
        for node in self.nodes:
            self._renew(node)

    @rule(data=st.data(), user=st.sampled_from(USERS), late=st.booleans())
    def reset(self, data: Any, user: str, late: bool) -> None:
        """One node resets a bucket; an ask that was decided before the reset may be answered after it."""
        node = self._pick(data)
        if late:
            self._ask(node, Ask({}, (data.draw(st.sampled_from(IDS)),), user), late=True)
        self._reset(node, user)

    @rule(data=st.data(), user=st.sampled_from(USERS), each=st.sampled_from(IDS))
    def learn_too_late(self, data: Any, user: str, each: Any) -> None:
        """A node resets a bucket before it reads the answer to an earlier ask."""
        node = self._pick(data)
        self._ask(node, Ask({}, (each,), user), late=True)
        self._reset(node, user)
        self._read(node)
        self._ask(node, Ask({}, (each,), user))

    @rule(data=st.data(), user=st.sampled_from(USERS), each=st.sampled_from(IDS))
    def renew_too_late(self, data: Any, user: str, each: Any) -> None:
        """Another node resets a bucket, which a node notices before it renews a use."""
        node, other = self._pick(data), self._pick(data)
        self._ask(node, Ask({}, (each,), user))
        self.advance(self._ids_quota(user).quota.layers.interval_ms)
        self._ask(node, Ask({}, (each,), user))
        self._reset(other, user)
        self._poll(node)
        self._renew(node)

    @rule(data=st.data(), user=st.sampled_from(USERS), each=st.sampled_from(IDS))
    def notice_a_reset_while_renewing(self, data: Any, user: str, each: Any) -> None:
        """A node notices that another one reset a bucket before it reads the answer to its renewal."""
        node, other = self._pick(data), self._pick(data)
        self._ask(node, Ask({}, (each,), user))
        self.advance(self._ids_quota(user).quota.layers.interval_ms)
        self._ask(node, Ask({}, (each,), user))

        async def meanwhile() -> None:
            await self._reset_now(other, user)
            await self._poll_now(node)

        self.meanwhile = meanwhile
        self._renew(node)
        self.meanwhile = None
        self._ask(node, Ask({}, (each,), user))

    @rule(data=st.data(), user=st.sampled_from(USERS), each=st.sampled_from(IDS))
    def lose_what_was_reset(self, data: Any, user: str, each: Any) -> None:
        """A bucket is reset, then the store loses its state, and a node sees each and renews."""
        node = self._seen_reset(data, user, each)
        self.lose(really=True)
        self._poll(node)
        self._renew(node)

    @rule(data=st.data(), user=st.sampled_from(USERS), each=st.sampled_from(IDS))
    def renew_before_a_loss_is_seen(self, data: Any, user: str, each: Any) -> None:
        """A node that has seen a reset renews before it sees a loss of state, unlike perhaps other nodes."""
        node, other = self._seen_reset(data, user, each), self._pick(data)
        self.lose(really=True)
        if other is not node:
            self._poll(other)
        self._renew(node)

    @rule(data=st.data(), user=st.sampled_from(USERS), each=st.sampled_from(IDS))
    def lose_what_dies(self, data: Any, user: str, each: Any) -> None:
        """The store loses its state just before a layer dies; a node sees the loss, and renews just after."""
        node = self._pick(data)
        self._ask(node, Ask({}, (each,), user))
        until = self.lives_until.get((user, each), 0)
        if until > self.now:
            self.advance(max(0, until - self.now - STEP_MS // 4))
            self._settle()
            self.lose(really=True)
            self._poll(node)
            self.advance(STEP_MS // 2)
            self._renew(node)

    def _seen_reset(self, data: Any, user: str, each: Any) -> Node:
        """A node that asked for an id, and then saw a reset of the bucket by some node."""
        node = self._pick(data)
        self._ask(node, Ask({}, (each,), user))
        self._reset(self._pick(data), user)
        self._poll(node)
        return node

    def _reset(self, node: Node, user: str) -> None:
        self.loop.run_until_complete(self._reset_now(node, user))

    async def _reset_now(self, node: Node, user: str) -> None:
        applied = self._ids_quota(user)
        key = bucket_key(applied)
        await self.store.forget([key], {key: 10**6})
        node.local.reset([key])
        self.oracle.reset(applied, int(self.redis.get(RESETS_KEY) or 0))
        self.events += 1
        node.noticed.add(self.events)
        self.met["reset"] += 1
        for of, each in list(self.lives_until):
            if of == user:
                self.reset_until[of, each] = (self.lives_until.pop((of, each)), self.events)
                self.gone.add((of, each))
        self.used_at = {place: at for place, at in self.used_at.items() if place[0] != user}

    @rule(really=st.sampled_from((True, False, False, False)))
    def lose(self, really: bool) -> None:
        """The store loses all its state."""
        if not really:
            return
        for place in list(self.used_at):
            if not any(self._is_certain(node, *place) for node in self.nodes):
                del self.used_at[place]  # its bucket may have been reset, and that can no longer be known
        self.redis.flushall()
        self.oracle.lose()
        self.events += 1
        self.lost = self.events
        self.met["loss"] += 1
        self.gone.clear()

    @rule(really=st.sampled_from((True, False, False, False)))
    def set_back(self, really: bool) -> None:
        """The store's clock is set back by more than a window, and every node looks."""
        if not really:
            return
        for node in self.nodes:
            self._read(node)
        self.now -= FALL_MS
        self.settled_at = self.now
        self.fell_ms += FALL_MS
        self.met["set back"] += 1
        self.lives_until.clear()
        self.reset_until.clear()
        self.used_at.clear()
        for node in self.nodes:
            self._poll(node)

    @rule(
        policy=st.sampled_from(POLICIES * 2 + (None,) * 6),
        window=st.sampled_from((WINDOW_MS, WINDOW_MS, 2_000)),
    )
    def change_policy(self, policy: Layers | None, window: int) -> None:
        """The window or the layers change on all nodes at once, and each node decides by the new policy."""
        if policy is None:
            return
        for entity, quota in self.quotas["producer_ids_rate"].items():
            changed = replace(quota, layers=policy, window_ms=window)
            self.met["policy change"] += changed != quota
            if changed != quota:
                self.quotas["producer_ids_rate"][entity] = changed
                self._publish()
                self.lives_until.clear()
                self.reset_until.clear()
                self.used_at.clear()
                for node in self.nodes:
                    for user in USERS:
                        self._ask(node, Ask({}, (0,), user))

    @rule(limit=st.sampled_from((0, 2, 4, 8)))
    def change_limit(self, limit: float) -> None:
        for entity, quota in self.quotas["producer_ids_rate"].items():
            self.quotas["producer_ids_rate"][entity] = replace(quota, limit=limit)
        self._publish()

    @invariant()
    def count_step(self) -> None:
        self.met["steps"] += 1

    # Actions of a node

    def _pick(self, data: Any) -> Node:
        place: int = data.draw(st.integers(0, len(self.nodes) - 1))
        return self.nodes[place]

    def _ask(self, node: Node, ask: Ask, *, late: bool = False) -> None:
        if node.late and not late:
            self._read(node)  # replies are read in order
        planned = self._at(node)._planned(ask, ANYONE)
        asked = planned.unknown or ask
        if planned.unknown is not None:
            self.met["known in part"] += 1
            left_out = tuple(each for each in ids_of(ask) if each not in ids_of(asked))
            self._check_known(node, replace(ask, producer_ids=left_out))
        if planned.known is not None:
            self._check_alone(node, ask, planned.known)
            self._decide_alone(node, planned)
            return
        assert planned.plan is not None
        answer = self._decide(planned.plan)
        found = self._found(asked)
        expected = self.oracle.decide(replace(asked, at_ms=self.now), self.quotas, RULES, self.now)
        self._check_remembered(asked, found)
        self._note_lives(asked)
        self.gone -= {(asked.principal or "", each) for each in ids_of(asked)}
        node.late.append(LateReply(planned, answer, expected, self.events, node.local.generation))
        if not late:
            self._read(node)

    def _read(self, node: Node) -> None:
        for reply in node.late:
            planned, answer = reply.planned, reply.answer
            self.met["learned late"] += answer.at_ms < self.now
            self.met["nothing learned"] += planned.generation != node.local.generation
            self._conclude(node, planned, answer)
            self._compare(planned, reply.expected)
            self.met["refused"] += reply.expected.decision != "admit"
            self._check_learned(node, reply)
            result = answer.results[0]
            assert isinstance(result, IdsResult)
            if result.open_ms and reply.events == node.looked == self.events:
                asked = planned.unknown or planned.ask
                self._note_use(asked, ids_of(asked), answer.at_ms)
        node.late.clear()

    def _conclude(self, node: Node, planned: PlannedAsk, answer: Answer | None) -> None:
        deciding = self._at(node)
        deciding._record(planned, *deciding._decide(planned, answer, None))

    def _at(self, node: Node) -> admission.Admission:
        """The admission, with the known ids of a node."""
        self.admission.local = node.local
        return self.admission

    def _poll(self, node: Node) -> None:
        self.loop.run_until_complete(self._poll_now(node))

    async def _poll_now(self, node: Node) -> None:
        self._read(node)
        await node.local._poll()
        node.looked = self.events
        node.noticed.update(range(self.lost + 1, self.events + 1))  # a loss hides earlier events

    def _is_certain(self, node: Node, user: str, each: Any) -> bool:
        """Whether a node knows an id, and that its bucket was not reset."""
        applied = self._ids_quota(user)
        return node.known.knows(bucket_key(applied), applied, (each,), self.now)

    def _renew(self, node: Node) -> None:
        self.renewing = node
        while node.known.due:
            if not self.loop.run_until_complete(node.local._sent(node.local._renewals())):
                return  # until it has read the marks

    async def decide(
        self, plans: Sequence[Plan], late: LateCallback
    ) -> tuple[list[Answer], StoreError | None]:
        """Send renewals of a node, like its gatherer."""
        del late
        timed = [msgspec.structs.replace(plan, at_ms=self.now) for plan in plans]
        answers = await answers_of(self.store, timed)
        for plan, answer in zip(timed, answers, strict=True):
            self._compare_renewal(plan, answer)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        return [msgspec.structs.replace(answer, at_ms=self.now) for answer in answers], None

    def _decide(self, plan: Plan) -> Answer:
        timed = msgspec.structs.replace(plan, at_ms=self.now)
        (answer,) = self.loop.run_until_complete(answers_of(self.store, [timed]))
        return msgspec.structs.replace(answer, at_ms=self.now)

    def _compare_renewal(self, plan: Plan, answer: Answer) -> None:
        (charge,) = plan.charges
        user = charge.bucket.removeprefix("user=")
        spreads = {s: each for each in IDS for s in spreads_of(Ask({}, (each,), user), SECRET)}
        sent = [charge.spreads[at : at + 32] for at in range(0, len(charge.spreads), 32)]
        if not spreads.keys() >= set(sent):
            raise Difference(f"ids of somebody else are written for {user}")
        ids = tuple(spreads[each] for each in sent)
        ask = Ask({}, ids, user, mode="record", at_ms=self.now)
        before = self._found(ask)
        expected = self.oracle.renew(ask, charge.applied, int(charge.usage), plan.context, self.now)
        self.met["renewal"] += 1
        self.met["renewal dropped"] += expected == "reject"
        self.met["renewal before a loss is seen"] += expected == "throttle"
        if answer.results[0].outcome != expected:
            raise Difference(f"renewal of {ids}: {answer}, oracle {expected}")
        if expected != "admit":
            return
        self.met["restored"] += len(ids) > len(before)
        for each in ids:
            if each not in before:
                self._check_restored(user, each)
        if back := self.gone & {(user, each) for each in ids}:
            raise Difference(f"written again after a reset: {back}")
        self._note_lives(ask)

    # Checks

    def _check_learned(self, node: Node, reply: LateReply) -> None:
        """Check that a node has learned a reply, or must first send a renewal."""
        result, charge = reply.answer.results[0], reply.planned.charges[0]
        assert isinstance(result, IdsResult)
        open_ms = result.open_ms
        ask = reply.planned.unknown or reply.planned.ask
        if not open_ms or reply.answer.at_ms + open_ms <= self.now + 2 * self.lag + 1:
            return
        if reply.generation != node.local.generation or ask.mode not in {"admit", "record"}:
            return
        key, applied = charge.key, charge.applied
        is_known = all(node.known.knows(key, applied, (each,), self.now) for each in ids_of(ask))
        if not is_known and not node.known.due:
            raise Difference(f"{ask}: nothing is learned, and never will be")

    def _ids_quota(self, user: str) -> AppliedQuota:
        return applied_quotas(Ask({}, (1,), user), self.quotas, RULES)[0]

    def _bucket(self, user: str) -> IdsBucket | None:
        bucket = self.oracle.buckets.get(key_of(self._ids_quota(user)))
        assert bucket is None or isinstance(bucket, IdsBucket)
        return bucket

    def _found(self, ask: Ask) -> dict[Any, int]:
        """The ids of an ask that the oracle has now, with the time when the layer of each dies."""
        user = ask.principal or ""
        bucket = self._bucket(user)
        found: dict[Any, int] = {}
        if bucket is None:
            return found
        layers = self._ids_quota(user).quota.layers
        at = max(self.now, bucket.newest_ms or 0)
        for each in ids_of(ask):
            (spread,) = spreads_of(Ask({}, (each,), user), SECRET)
            place = bucket.state.find(spread, at, layers)
            if place is not None:
                found[each] = bucket.state.layers[place.layer] + layers.ttl_ms
        return found

    def _note_lives(self, ask: Ask) -> None:
        for each, until in self._found(ask).items():
            self.lives_until[ask.principal or "", each] = until

    def _note_use(self, ask: Ask, ids: Sequence[Any], at_ms: int) -> None:
        for each in ids:
            place = ask.principal or "", each
            self.used_at[place] = max(at_ms, self.used_at.get(place, 0))

    def _check_alone(self, node: Node, ask: Ask, known: Knowledge) -> None:
        if ask.mode == "peek" or ask.detail or ask.id is not None:
            raise Difference(f"{ask} was answered alone")
        if not self.now <= known.at_ms <= self.now + 2 * self.lag + 1:
            raise Difference(f"a node takes {self.now} for {known.at_ms}")
        lives = [self.lives_until.get((ask.principal or "", each), NEVER) for each in ids_of(ask)]
        if not known.at_ms < known.until_ms <= min(lives):
            raise Difference(f"a node is certain of {ask} by {known}, and they live until {lives}")
        self.met["known alone"] += 1
        self._check_known(node, ask)

    def _check_known(self, node: Node, ask: Ask) -> None:
        """Check that ids are alive which a node answers alone, and note their use."""
        self._check_alive(node, ask)
        user = ask.principal or ""
        still = [each for each in ids_of(ask) if (user, each) in self.lives_until]
        self._note_use(ask, still, self.now)

    def _check_alive(self, node: Node, ask: Ask) -> None:
        """Check that the store had the ids that a node knows, and has them unless it lost its state."""
        found, user = self._found(ask), ask.principal or ""
        for each in ids_of(ask):
            until, event = self.lives_until.get((user, each)), self.events
            if until is None:
                until, event = self.reset_until.get((user, each), (0, 0))
                if event == 0 or event in node.noticed:
                    raise Difference(f"{ask}: {each} is known although its bucket was reset, or never was")
            if self.now >= until:
                raise Difference(f"{ask}: {each} is known after its layer died at {until}")
            if each not in found:
                self.met["known while lost"] += 1
                if not self.lost and node.looked >= self.events:
                    raise Difference(f"{ask}: {each} is known, but the store does not have it")

    def _check_restored(self, user: str, each: Any) -> None:
        """Check that a restored id is alive, and was not reset as far as the node could know."""
        until, event = self.lives_until.get((user, each)), 0
        if until is None:
            until, event = self.reset_until.get((user, each), (0, 0))
        if self.now >= until:
            raise Difference(f"{each} of {user} is written although it died at {until}, before {self.now}")
        if event in self.renewing.noticed:
            raise Difference(f"{each} of {user} is written although its bucket was reset")

    def _check_remembered(self, ask: Ask, found: dict[Any, int]) -> None:
        """Check that the store knows an id for a layer's life after its use, less an interval and a step."""
        layers = self._ids_quota(ask.principal or "").quota.layers
        everybody_knows = all(node.looked >= self.lost and not node.known.due for node in self.nodes)
        for each in ids_of(ask):
            used = self.used_at.get((ask.principal or "", each))
            if used is None or each in found or not everybody_knows:
                continue
            if self.now - used < layers.ttl_ms - layers.interval_ms - STEP_MS - 20 * self.lag:
                raise Difference(f"{ask}: {each} is forgotten {self.now - used} ms after its use")

    def _decide_alone(self, node: Node, planned: PlannedAsk) -> None:
        """Ask the store about the other quotas of an ask, if any; both parts make the decision."""
        if planned.plan is None:
            self._conclude(node, planned, None)
            self._compare(planned, Decision("admit", 0, True, 1, "local", None))
            return
        self.met["known alone, rates asked"] += 1
        self._conclude(node, planned, self._decide(planned.plan))
        others = replace(planned.ask, producer_ids=None, at_ms=self.now)
        expected = self.oracle.decide(others, self.quotas, RULES, self.now)
        self._compare(planned, replace(expected, applied=expected.applied + 1))

    def _compare(self, planned: PlannedAsk, expected: Decision) -> None:
        if planned.decision != expected:
            raise Difference(f"{planned.ask}\nnode:   {planned.decision}\noracle: {expected}")
