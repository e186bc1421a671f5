"""Gathering for a cluster: a gatherer and a circuit for each primary, and asks that need several of them.

A request whose buckets are all with one primary, each ask's in one slot, goes to that primary's gatherer as
it is. Any other is decided in phases (``app.admission.cluster.several_slots``). The parts of its asks for one
phase are sent at once, to each primary in the order of the asks. Asks of a batch that share a bucket keep
their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, Final, NamedTuple, cast

import structlog
from msgspec import structs

from app.admission.cluster.several_slots import Came, Phase, SlotPlan, Steps, decide, groups_in, is_refusal
from app.admission.errors import AdmissionError
from app.admission.gathering.circuit import PAUSES_S, Circuit
from app.admission.gathering.gatherer import CLOSE_WITHIN_S, Gatherer, Gathering, finish_group
from app.admission.gathering.queue import Group
from app.admission.metrics.metrics import Metrics
from app.domain.slots import SlotGroups, slot_of, slot_of_tag
from app.node.shortage import Resource
from app.store.cluster import Address, ClusterStore, PrimaryStore, plan_slots
from app.store.encoding import release_plan, undo_plan
from app.store.keys import retry_key, short
from app.store.port import NONE_KNOWN, Answer, Fault, Plan, StoreError, Undone
from app.store.port import Came as CallCame

log: Final = structlog.get_logger("quotagate.store")


class Reached(NamedTuple):
    """A primary, with what is in front of it."""

    store: PrimaryStore
    circuit: Circuit
    gatherer: Gatherer


class _PrimaryMetrics:
    """The metrics of one circuit of several; the state of the store is that of all of them."""

    def __init__(self, metrics: Metrics, changed: Callable[[], None]) -> None:
        self._metrics = metrics
        self._changed = changed

    def observe_call(self, asks: int, seconds: float) -> None:
        self._metrics.observe_call(asks, seconds)

    def count_failure(self, reason: str) -> None:
        self._metrics.count_failure(reason)

    def count_shortage(self, resource: Resource, error: Exception) -> None:
        self._metrics.count_shortage(resource, error)

    def set_store_state(self, *, away: bool, faults: Sequence[str]) -> None:  # noqa: ARG002
        self._changed()


class Running:
    """One ask of a request while it is decided.

    Attributes:
        phases: by key that it touches, in which phase it charges or reads that.
        wants: what it wants to send next, and in which phase; None once it has an answer or an error.
        is_refused: whether its answer is a refusal; None before.
        last_phase: that of what was sent last, except for undos.
        undone: its charges that were taken back this time.
        earlier: what was answered when it was decided before.
    """

    def __init__(
        self,
        place: int,
        plan: Plan,
        slots: Sequence[int],
        *,
        sequential: bool = False,
        earlier: Answer | None = None,
    ) -> None:
        self.place = place
        self.sequential = sequential
        self.plan = plan
        self.slots = slots
        self.phases: dict[bytes, Phase] = {}
        self.steps: Steps | None = None
        self.wants: tuple[Phase, list[SlotPlan]] | None = None
        self.answer: Answer | None = None
        self.error: Exception | None = None
        self.is_refused: bool | None = None
        self.last_phase = Phase.LOOK
        self.undone: tuple[Undone, ...] = ()
        self.earlier = earlier

    @property
    def is_single(self) -> bool:
        """Whether all of it is in one slot."""
        return len(set(self.slots)) == 1

    def begin(self, phase: Phase | None) -> None:
        """Begin; an ask of one slot is sent in a given phase."""
        if phase is not None:
            self.wants = phase, [SlotPlan(self.slots[0], self.plan)]
            return
        self.steps = decide(self.plan, _groups_of(self.plan, self.slots), sequential=self.sequential)
        self._step(None)

    def came(self, came: list[Came]) -> None:
        """Go on with what came of what it wanted."""
        if self.steps is not None:
            self._step(came)
            return
        (its,) = came
        self.wants = None
        if isinstance(its, Answer):
            self._ended(its)
        elif isinstance(its, Exception):
            self._failed(its)

    def _step(self, came: list[Came] | None) -> None:
        assert self.steps is not None
        try:
            self.wants = next(self.steps) if came is None else self.steps.send(came)
        except StopIteration as ended:
            self.wants = None
            self._ended(ended.value)
        except AdmissionError as error:
            self.wants = None
            self._failed(error)

    def _ended(self, answer: Answer) -> None:
        self.answer, self.undone = answer, answer.undone
        self.is_refused = is_refusal(self.plan, answer)
        if (earlier := self.earlier) is None:
            return
        if answer.error is not None:
            self.answer = earlier  # it was decided, though not in the order of the batch
        else:
            undone = (*earlier.undone, *answer.undone)
            if answer.earlier is not None:
                earlier = structs.replace(answer.earlier, earlier=earlier)
            self.answer = structs.replace(answer, undone=undone, earlier=earlier)

    def again(self) -> Running:
        """The same ask, to be decided once more; what it wrote this time stays part of its answer."""
        return Running(self.place, self.plan, self.slots, sequential=self.sequential, earlier=self.answer)

    def _failed(self, error: Exception) -> None:
        self.error, self.is_refused = error, True


class ClusterGatherer(Gathering):
    """Decides the asks of all requests by the primaries of a cluster.

    It is what ``Gatherer`` and ``Circuit`` are for a single primary.

    Args:
        budget_s, queue_s, queued: as for ``Gatherer``.
        sequential: add delays up as KIP-124 does.

    Attributes:
        faults: the misconfigurations that the last examinations found.
    """

    def __init__(
        self,
        cluster: ClusterStore,
        metrics: Metrics,
        *,
        budget_s: float,
        queue_s: float,
        queued: Callable[[Sequence[float]], None],
        sequential: bool = False,
    ) -> None:
        self._sequential = sequential
        self.faults: tuple[Fault, ...] = ()
        self._cluster = cluster
        self._metrics = metrics
        self._gathering: dict[str, Any] = {"budget_s": budget_s, "queue_s": queue_s, "queued": queued}
        self._queue_s = queue_s
        self._reached: dict[Address, Reached] = {}
        self._deciding: set[asyncio.Task[None]] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._is_closed = False
        cluster.began, cluster.ended = self._begin, self._end

    # The circuits

    @property
    def error(self) -> StoreError | None:
        """Why no primary can be asked; None while any can."""
        error = None
        for reached in self._reached.values():
            error = reached.circuit.error
            if error is None:
                return None
        return error or self._cluster.error or StoreError("connection", "no primary is known")

    async def start(self) -> None:
        """Find the primaries, and examine each."""
        await self._cluster.refresh()
        while self._starting:
            await asyncio.wait(self._starting)
        self._look_again()
        if not self._reached:
            log.warning("the cluster is not available", why=str(self._cluster.error))
            self._watch_soon()

    def _watch_soon(self) -> None:
        """Look for the primaries again, until there are some."""
        self._start(self._watch(), "find the primaries")

    async def _watch(self) -> None:
        while not self._reached and not self._is_closed:
            await asyncio.sleep(PAUSES_S[-1])
            await self._cluster.refresh()

    async def stop(self) -> None:
        """Stop examining the primaries."""
        for task in list(self._starting):
            task.cancel()
        if self._starting:
            await asyncio.wait(self._starting)
        for reached in self._reached.values():
            await reached.circuit.stop()
            await reached.store.close()

    def _begin(self, store: PrimaryStore) -> None:
        metrics = cast("Metrics", _PrimaryMetrics(self._metrics, self._look_again))
        circuit = Circuit(store, metrics)
        self._reached[store.address] = Reached(store, circuit, Gatherer(circuit, **self._gathering))
        self._start(circuit.start(), "examine a primary")

    def _end(self, store: PrimaryStore) -> None:
        reached = self._reached.pop(store.address)
        self._start(self._leave(reached), "leave a primary")
        self._look_again()

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start a task that ``stop`` cancels."""
        task = asyncio.create_task(work, name=name)
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _leave(self, reached: Reached) -> None:
        reached.store.give_up(StoreError("connection", "the primary has no slots any more"))
        await reached.gatherer.close()
        await reached.circuit.stop()
        await reached.store.close()

    def _look_again(self) -> None:
        """Put together what the examinations found."""
        found = {fault.name: fault for each in self._reached.values() for fault in each.circuit.faults}
        away = [each.circuit.error for each in self._reached.values() if each.circuit.error is not None]
        if away and self.error is None:
            lost = Fault("primary_away", f"{len(away)} of {len(self._reached)} primaries are away: {away[0]}")
            found["primary_away"] = lost
        self.faults = tuple(found.values())
        self._metrics.set_store_state(away=self.error is not None, faults=list(found))

    # What ``StoreCalls`` has, for one slot

    def ask(self, plans: Sequence[Plan], done: CallCame) -> None:
        """Decide plans of one slot in one call."""
        reached = self._of_slot(plan_slots(plans[0])[0])
        if reached is None:
            error = self.error or StoreError("cluster_down", "no primary has this slot")
            asyncio.get_running_loop().call_soon(done, error)
        else:
            reached.circuit.ask(plans, done)

    def silent_since(self) -> float | None:
        """Of no use here: each primary is asked."""
        return None

    def give_up(self, error: StoreError) -> None:
        """Fail all calls under way."""
        for reached in self._reached.values():
            reached.circuit.give_up(error)

    async def forget(self, keys: Sequence[bytes], known_ms: Mapping[bytes, int] = NONE_KNOWN) -> int | None:
        """Remove these buckets, which are in one slot; see ``StoreCalls``.

        Raises:
            StoreError: the call failed, or the primary is away.
        """
        if not keys:
            return None
        reached = self._of_slot(slot_of(keys[0]))
        if reached is None:
            raise self.error or StoreError("cluster_down", "no primary has this slot")
        return await reached.circuit.forget(keys, known_ms)

    # Gathering

    @property
    def waiting(self) -> int:
        """How many asks are waiting for a call."""
        return sum(reached.gatherer.waiting for reached in self._reached.values())

    async def close(self) -> None:
        """Wait until nothing is being decided any more, for a bounded time."""
        if self._deciding:
            await asyncio.wait(self._deciding, timeout=CLOSE_WITHIN_S)
        for task in list(self._deciding):
            task.cancel()
        self._is_closed = True
        for reached in self._reached.values():
            await reached.gatherer.close()
        await self._cluster.close()

    def submit(self, group: Group, within_s: float | None = None) -> None:
        """Decide the asks of a request; see ``Gathering``."""
        slots = [plan_slots(plan) for plan in group.plans]
        reached = self._of_all(slots)
        if reached is not None:
            reached.gatherer.submit(group, within_s)
            return
        for each in self._reached_by(slots):
            each.gatherer.check(group, within_s)  # from here on it is not shed, as parts of it may be charged
        task = asyncio.create_task(self._decide(group, slots, within_s), name="decide in several slots")
        self._deciding.add(task)
        task.add_done_callback(self._deciding.discard)

    def _of_slot(self, slot: int) -> Reached | None:
        store = self._cluster.primary_of(slot)
        return None if store is None else self._reached.get(store.address)

    def _reached_by(self, slots: Sequence[Sequence[int]]) -> list[Reached]:
        """The primaries that have these slots."""
        found = {slot: self._of_slot(slot) for slot in {slot for its in slots for slot in its}}
        return list({each.store.address: each for each in found.values() if each is not None}.values())

    def _of_all(self, slots: Sequence[Sequence[int]]) -> Reached | None:
        """The one primary that has everything, each ask in one slot; None if no primary has."""
        first = self._of_slot(slots[0][0])
        for each in slots:
            if any(slot != each[0] for slot in each[1:]) or self._of_slot(each[0]) is not first:
                return None
        return first

    async def _decide(self, group: Group, slots: Sequence[Sequence[int]], within_s: float | None) -> None:
        running = [
            Running(place, plan, its, sequential=self._sequential)
            for place, (plan, its) in enumerate(zip(group.plans, slots, strict=True))
        ]
        error: Exception | None = None
        try:
            for segment in segments(running):
                await self._run(segment, group, within_s)
                if error := next((each.error for each in segment if _ends_all(each, running)), None):
                    break
                while again := _to_repeat(segment):
                    anew = [each.again() for each in again]
                    for part in segments(anew):
                        await self._run(part, group, within_s)
                    for each in anew:
                        if each.answer is not None:
                            running[each.place] = each
                    segment = anew  # noqa: PLW2901  only these may have to be decided once more
        except Exception as unexpected:
            log.exception("an ask of several slots could not be decided")
            error = StoreError("unexpected", repr(unexpected))
        for each in running:
            if each.answer is not None:
                group.answers.append(each.answer)
            elif isinstance(each.error, StoreError) and len(running) > 1:
                group.answers.append(Answer((), error=each.error))  # the others may have another primary
            else:
                error = error or each.error or StoreError("unexpected")
                break
        if group.is_done:
            return
        finish_group(group, error if len(group.answers) < len(group.plans) else None)

    async def _run(self, asks: Sequence[Running], group: Group, within_s: float | None) -> None:
        """Decide asks, phase by phase; undos go with the next phase."""
        is_first = True
        while waiting := [(each, *each.wants) for each in asks if each.wants is not None]:
            first = min(phase for _, phase, _ in waiting)
            now = [wanted for wanted in waiting if wanted[1] in {first, Phase.UNDO}]
            for each, phase, _ in now:
                if phase != Phase.UNDO:
                    each.last_phase = phase
            came = iter(
                await self._send(
                    [plan for _, _, its in now for plan in its],
                    group,
                    within_s if is_first else None,
                    is_first=is_first,
                    asks=[each for each, _, _ in now],
                )
            )
            is_first = False
            for each, _, its in now:
                each.came([next(came) for _ in its])

    async def _send(
        self,
        plans: Sequence[SlotPlan],
        group: Group,
        within_s: float | None,
        *,
        is_first: bool,
        asks: Sequence[Running],
    ) -> list[Came]:
        """Send parts to their primaries, and wait for what comes of all of them."""
        loop = asyncio.get_running_loop()
        came: list[Came] = [StoreError("cluster_down", "no primary has this slot") for _ in plans]
        by_primary: dict[Address, tuple[Reached, list[int]]] = {}
        for place, part in enumerate(plans):
            if reached := self._of_slot(part.slot):
                by_primary.setdefault(reached.store.address, (reached, []))[1].append(place)
        waiting: list[asyncio.Future[None]] = []
        for reached, places in by_primary.values():
            finished: asyncio.Future[None] = loop.create_future()

            def done(
                its: Group,
                failure: Exception | None,
                places: list[int] = places,
                finished: asyncio.Future[None] = finished,
            ) -> None:
                for at, place in enumerate(places):
                    if at < len(its.answers):
                        came[place] = its.answers[at]
                    else:
                        came[place] = _as_came(failure)
                if not finished.done():
                    finished.set_result(None)

            def late(_: Group, at: int, answer: Answer, places: list[int] = places) -> None:
                self._undo_late(plans[places[at]], answer, asks, group)

            its = Group.of(
                [plans[place].plan for place in places],
                done,
                late,
                group.caller,
                group.on_behalf_of,
                group.since if is_first else monotonic(),
            )
            if len(asks) > 1 or any(each.last_phase != Phase.LOOK or each.is_single for each in asks):
                its.is_accounting = (
                    True  # it is neither dropped nor shed: parts of the request may be charged
                )
            if reached.circuit.error is not None:
                done(its, reached.circuit.error)
            else:
                reached.gatherer.submit(its, within_s, is_checked=True)
            waiting.append(finished)
        for each in waiting:
            await each
        return came

    def _undo_late(self, part: SlotPlan, answer: Answer, asks: Sequence[Running], group: Group) -> None:
        """Take back what a late call charged for an ask that was refused meanwhile, or held for any lease."""
        if is_refusal(part.plan, answer):
            return
        plan = None
        if part.plan.mode == "hold":  # a lease is not granted without the answers of all slots
            plan = release_plan(part.plan)
        elif answer.stamps:
            of = [each for each in asks if part.plan.charges[0].key in each.phases]
            if of and all(each.is_refused for each in of):
                plan = undo_plan(zip(part.plan.charges, answer.stamps, strict=True), part.plan.at_ms)
        if plan is not None and (reached := self._of_slot(part.slot)):
            reached.gatherer.submit(
                Group.of([plan], lambda _group, _error: None, None, group.caller, group.on_behalf_of)
            )


def segments(running: Sequence[Running]) -> Iterator[list[Running]]:
    """Begin asks; cut where one would be charged before an earlier one that shares a bucket with it.

    A lease is cut off too, if its look would come before what earlier leases give back.
    """
    segment: list[Running] = []
    last: dict[bytes, Phase] = {}
    for each in running:
        keys = _keys_of(each.plan)
        earliest = max((last.get(key, Phase.LOOK) for key in keys), default=Phase.LOOK)
        if each.is_single:
            each.phases = dict.fromkeys(keys, earliest)
        else:
            each.phases = _phases_of(each.plan, each.slots)
            is_lease = each.plan.mode == "hold"
            if any(
                (Phase.LOOK if is_lease else each.phases[key]) < last.get(key, Phase.LOOK) for key in keys
            ):
                yield segment
                segment, last = [], {}
                earliest = Phase.LOOK
        each.begin(earliest if each.is_single else None)
        last |= each.phases
        segment.append(each)
    if segment:
        yield segment


def _to_repeat(asks: Sequence[Running]) -> list[Running]:
    """The refused asks that an order of the asks would perhaps have answered otherwise.

    They were refused by a look, which came before the charge of an earlier ask to the same bucket; or by a
    bucket from which the charge of another ask was taken back meanwhile.
    """
    undone: dict[bytes, set[int]] = {}
    charged: set[bytes] = set()
    again = []
    for each in asks:
        for charge in each.undone:
            undone.setdefault(charge.key, set()).add(each.place)
    for each in asks:
        if each.is_refused is False and each.plan.mode != "peek":
            charged |= each.phases.keys()
        elif each.is_refused and each.answer is not None:
            # an ask of one slot is charged as it is looked at, in the order of the batch
            was_looked_at = each.last_phase == Phase.LOOK and not each.is_single
            is_overtaken = was_looked_at and not charged.isdisjoint(each.phases)
            if is_overtaken or any(undone.get(key, set()) - {each.place} for key in each.phases):
                again.append(each)
    return again


def _ends_all(each: Running, running: Sequence[Running]) -> bool:
    """Whether an ask without an answer leaves the rest of its request undecided."""
    return each.error is not None and (len(running) == 1 or isinstance(each.error, AdmissionError))


def _as_came(failure: Exception | None) -> Came:
    if isinstance(failure, StoreError | AdmissionError):
        return failure
    return StoreError("unexpected", repr(failure))


def _keys_of(plan: Plan) -> list[bytes]:
    keys = [charge.key for charge in plan.charges]
    if plan.retry is not None:
        keys.append(retry_key(*plan.retry, clustered=True))
    return keys


def _phases_of(plan: Plan, slots: Sequence[int]) -> dict[bytes, Phase]:
    """In which phase an ask of several slots charges each of its keys, at the latest."""
    keys = _keys_of(plan)
    if plan.mode == "peek":
        return dict.fromkeys(keys, Phase.LOOK)
    groups = _groups_of(plan, slots)
    return {
        key: Phase.HOME if slot == groups.home.slot else Phase.CHARGE
        for key, slot in zip(keys, slots, strict=True)
    }


def _groups_of(plan: Plan, slots: Sequence[int]) -> SlotGroups:
    kept = slots[-1] if plan.retry is not None else None
    own = slots[: len(plan.charges)]
    principal = next(
        (
            slot_of_tag(short(charge.owner).encode())
            for charge in plan.charges
            if charge.owner.startswith("user=")
        ),
        None,
    )
    return groups_in(own, principal, kept)
