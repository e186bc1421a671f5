"""Gathering for a cluster: a gatherer and a circuit for each primary, and asks that need several of them.

A request goes unchanged to one primary's gatherer if that primary has all its buckets, each ask's in one
slot. Any other request is decided in phases (``app.admission.cluster.several_slots``). The parts of its asks
for one phase are sent at once, to each primary in the order of the asks. Asks of a batch that share a bucket
keep their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, Final, NamedTuple, cast

import structlog
from msgspec import structs

from app.admission.cluster.several_slots import (
    Phase,
    SlotPlan,
    SlotResult,
    Steps,
    decide,
    groups_in,
    is_refusal,
)
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
from app.store.port import NONE_KNOWN, Answer, AnswersCallback, Fault, LiveLayer, Plan, StoreError, Undone

log: Final = structlog.get_logger("quotagate.store")


class ConnectedPrimary(NamedTuple):
    """A primary, with its circuit and its gatherer."""

    store: PrimaryStore
    circuit: Circuit
    gatherer: Gatherer


class _PrimaryMetrics:
    """The metrics of one of several circuits; the store's state is computed over all of them."""

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


class AskInProgress:
    """One ask of a request while it is decided.

    Attributes:
        phases: the phase in which it charges or reads each key.
        wants: the next phase and the plans to send in it; None once it has an answer or an error.
        is_refused: whether its answer is a refusal; None before.
        last_phase: the phase of the plans sent last, undos excepted.
        undone: its charges that were taken back this time.
        earlier: its answer when it was decided before.
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
        self.last_phase = Phase.PEEK
        self.undone: tuple[Undone, ...] = ()
        self.earlier = earlier

    @property
    def is_single(self) -> bool:
        """Whether all its keys are in one slot."""
        return len(set(self.slots)) == 1

    def begin(self, phase: Phase | None) -> None:
        """Begin; an ask of one slot is sent in a given phase."""
        if phase is not None:
            self.wants = phase, [SlotPlan(self.slots[0], self.plan)]
            return
        self.steps = decide(self.plan, _groups_of(self.plan, self.slots), sequential=self.sequential)
        self._step(None)

    def receive(self, results: list[SlotResult]) -> None:
        """Continue with the results of the plans in ``wants``."""
        if self.steps is not None:
            self._step(results)
            return
        (result,) = results
        self.wants = None
        if isinstance(result, Answer):
            self._ended(result)
        elif isinstance(result, Exception):
            self._failed(result)

    def _step(self, results: list[SlotResult] | None) -> None:
        assert self.steps is not None
        try:
            self.wants = next(self.steps) if results is None else self.steps.send(results)
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

    def again(self) -> AskInProgress:
        """The same ask, to be decided once more; the present answer becomes part of the next one."""
        return AskInProgress(
            self.place, self.plan, self.slots, sequential=self.sequential, earlier=self.answer
        )

    def _failed(self, error: Exception) -> None:
        self.error, self.is_refused = error, True


class ClusterGatherer(Gathering):
    """Decides the asks of all requests by the primaries of a cluster.

    It replaces the ``Gatherer`` and the ``Circuit`` of a single primary.

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
        self._primaries: dict[Address, ConnectedPrimary] = {}
        self._deciding: set[asyncio.Task[None]] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._is_closed = False
        cluster.began, cluster.ended = self._begin, self._end

    # The circuits

    @property
    def error(self) -> StoreError | None:
        """Why no primary can be asked; None while any can."""
        error = None
        for primary in self._primaries.values():
            error = primary.circuit.error
            if error is None:
                return None
        return error or self._cluster.error or StoreError("connection", "no primary is known")

    @property
    def primaries(self) -> Mapping[Address, ConnectedPrimary]:
        """The primaries that are known, by their addresses."""
        return self._primaries

    async def start(self) -> None:
        """Find the primaries, and examine each."""
        await self._cluster.refresh()
        while self._starting:
            await asyncio.wait(self._starting)
        self._combine_findings()
        if not self._primaries:
            log.warning("the cluster is not available", why=str(self._cluster.error))
            self._watch_soon()

    def _watch_soon(self) -> None:
        """Search for the primaries, until there are some."""
        self._start(self._watch(), "find the primaries")

    async def _watch(self) -> None:
        while not self._primaries and not self._is_closed:
            await asyncio.sleep(PAUSES_S[-1])
            await self._cluster.refresh()

    async def stop(self) -> None:
        """Stop examining the primaries."""
        for task in list(self._starting):
            task.cancel()
        if self._starting:
            await asyncio.wait(self._starting)
        for primary in self._primaries.values():
            await primary.circuit.stop()
            await primary.store.close()

    def _begin(self, store: PrimaryStore) -> None:
        metrics = cast("Metrics", _PrimaryMetrics(self._metrics, self._combine_findings))
        circuit = Circuit(store, metrics)
        self._primaries[store.address] = ConnectedPrimary(
            store, circuit, Gatherer(circuit, **self._gathering)
        )
        self._start(circuit.start(), "examine a primary")

    def _end(self, store: PrimaryStore) -> None:
        primary = self._primaries.pop(store.address)
        self._start(self._leave(primary), "leave a primary")
        self._combine_findings()

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start a task that ``stop`` cancels."""
        task = asyncio.create_task(work, name=name)
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _leave(self, primary: ConnectedPrimary) -> None:
        primary.store.give_up(StoreError("connection", "the primary has no slots any more"))
        await primary.gatherer.close()
        await primary.circuit.stop()
        await primary.store.close()

    def _combine_findings(self) -> None:
        """Combine the findings of the examinations."""
        found = {fault.name: fault for each in self._primaries.values() for fault in each.circuit.faults}
        away = [each.circuit.error for each in self._primaries.values() if each.circuit.error is not None]
        if away and self.error is None:
            lost = Fault(
                "primary_away", f"{len(away)} of {len(self._primaries)} primaries are away: {away[0]}"
            )
            found["primary_away"] = lost
        self.faults = tuple(found.values())
        self._metrics.set_store_state(away=self.error is not None, faults=list(found))

    # The methods of ``StoreCalls``, for one slot

    def ask(self, plans: Sequence[Plan], done: AnswersCallback) -> None:
        """Decide plans of one slot in one call."""
        primary = self._of_slot(plan_slots(plans[0])[0])
        if primary is None:
            error = self.error or StoreError("cluster_down", "no primary has this slot")
            asyncio.get_running_loop().call_soon(done, error)
        else:
            primary.circuit.ask(plans, done)

    def silent_since(self) -> float | None:
        """Return None: each primary's gatherer asks its own circuit."""
        return None

    def give_up(self, error: StoreError) -> None:
        """Fail all calls under way."""
        for primary in self._primaries.values():
            primary.circuit.give_up(error)

    async def forget(self, keys: Sequence[bytes], known_ms: Mapping[bytes, int] = NONE_KNOWN) -> int | None:
        """Remove these buckets, which are in one slot; see ``StoreCalls``.

        Raises:
            StoreError: the call failed, or the primary is away.
        """
        return await self._circuit_of(keys[0]).forget(keys, known_ms) if keys else None

    async def live_layers(self, key: bytes, now_ms: int, ttl_ms: int) -> list[LiveLayer]:
        """Read the live layers of a bucket; see ``StoreCalls``.

        Raises:
            StoreError: the call failed, or the primary is away.
        """
        return await self._circuit_of(key).live_layers(key, now_ms, ttl_ms)

    # Gathering

    @property
    def waiting(self) -> int:
        """How many asks are waiting for a call."""
        return sum(primary.gatherer.waiting for primary in self._primaries.values())

    async def close(self) -> None:
        """Wait until nothing is being decided any more, for a bounded time."""
        if self._deciding:
            await asyncio.wait(self._deciding, timeout=CLOSE_WITHIN_S)
        for task in list(self._deciding):
            task.cancel()
        self._is_closed = True
        for primary in self._primaries.values():
            await primary.gatherer.close()
        await self._cluster.close()

    def submit(self, group: Group, within_s: float | None = None) -> None:
        """Decide the asks of a request; see ``Gathering``."""
        slots = [plan_slots(plan) for plan in group.plans]
        primary = self._of_all(slots)
        if primary is not None:
            primary.gatherer.submit(group, within_s)
            return
        for each in self._reached_by(slots):
            each.gatherer.check(group, within_s)  # from here on it is not shed, as parts of it may be charged
        task = asyncio.create_task(self._decide(group, slots, within_s), name="decide in several slots")
        self._deciding.add(task)
        task.add_done_callback(self._deciding.discard)

    def _of_slot(self, slot: int) -> ConnectedPrimary | None:
        store = self._cluster.primary_of(slot)
        return None if store is None else self._primaries.get(store.address)

    def _circuit_of(self, key: bytes) -> Circuit:
        primary = self._of_slot(slot_of(key))
        if primary is None:
            raise self.error or StoreError("cluster_down", "no primary has this slot")
        return primary.circuit

    def _reached_by(self, slots: Sequence[Sequence[int]]) -> list[ConnectedPrimary]:
        """The primaries that have these slots."""
        found = {slot: self._of_slot(slot) for slot in {slot for ask_slots in slots for slot in ask_slots}}
        return list({each.store.address: each for each in found.values() if each is not None}.values())

    def _of_all(self, slots: Sequence[Sequence[int]]) -> ConnectedPrimary | None:
        """The primary that has all slots, if each ask is in one slot; else None."""
        first = self._of_slot(slots[0][0])
        for each in slots:
            if any(slot != each[0] for slot in each[1:]) or self._of_slot(each[0]) is not first:
                return None
        return first

    async def _decide(self, group: Group, slots: Sequence[Sequence[int]], within_s: float | None) -> None:
        running = [
            AskInProgress(place, plan, ask_slots, sequential=self._sequential)
            for place, (plan, ask_slots) in enumerate(zip(group.plans, slots, strict=True))
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

    async def _run(self, asks: Sequence[AskInProgress], group: Group, within_s: float | None) -> None:
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
                    [plan for _, _, plans in now for plan in plans],
                    group,
                    within_s if is_first else None,
                    is_first=is_first,
                    asks=[each for each, _, _ in now],
                )
            )
            is_first = False
            for each, _, plans in now:
                each.receive([next(came) for _ in plans])

    async def _send(
        self,
        plans: Sequence[SlotPlan],
        group: Group,
        within_s: float | None,
        *,
        is_first: bool,
        asks: Sequence[AskInProgress],
    ) -> list[SlotResult]:
        """Send parts to their primaries, and wait for all results."""
        loop = asyncio.get_running_loop()
        came: list[SlotResult] = [StoreError("cluster_down", "no primary has this slot") for _ in plans]
        by_primary: dict[Address, tuple[ConnectedPrimary, list[int]]] = {}
        for place, part in enumerate(plans):
            if primary := self._of_slot(part.slot):
                by_primary.setdefault(primary.store.address, (primary, []))[1].append(place)
        waiting: list[asyncio.Future[None]] = []
        for primary, places in by_primary.values():
            finished: asyncio.Future[None] = loop.create_future()

            def done(
                decided_group: Group,
                failure: Exception | None,
                places: list[int] = places,
                finished: asyncio.Future[None] = finished,
            ) -> None:
                for at, place in enumerate(places):
                    if at < len(decided_group.answers):
                        came[place] = decided_group.answers[at]
                    else:
                        came[place] = _as_came(failure)
                if not finished.done():
                    finished.set_result(None)

            def late(_: Group, at: int, answer: Answer, places: list[int] = places) -> None:
                self._undo_late(plans[places[at]], answer, asks, group)

            subgroup = Group.of(
                [plans[place].plan for place in places],
                done,
                late,
                group.caller,
                group.on_behalf_of,
                group.since if is_first else monotonic(),
            )
            if len(asks) > 1 or any(each.last_phase != Phase.PEEK or each.is_single for each in asks):
                subgroup.is_accounting = (
                    True  # it is neither dropped nor shed: parts of the request may be charged
                )
            if primary.circuit.error is not None:
                done(subgroup, primary.circuit.error)
            else:
                primary.gatherer.submit(subgroup, within_s, is_checked=True)
            waiting.append(finished)
        for each in waiting:
            await each
        return came

    def _undo_late(self, part: SlotPlan, answer: Answer, asks: Sequence[AskInProgress], group: Group) -> None:
        """Undo a late call's charges if their ask was refused meanwhile; release its hold for a lease."""
        if is_refusal(part.plan, answer):
            return
        plan = None
        if part.plan.mode == "hold":  # a lease is not granted without the answers of all slots
            plan = release_plan(part.plan)
        elif answer.stamps:
            of = [each for each in asks if part.plan.charges[0].key in each.phases]
            if of and all(each.is_refused for each in of):
                plan = undo_plan(zip(part.plan.charges, answer.stamps, strict=True), part.plan.at_ms)
        if plan is not None and (primary := self._of_slot(part.slot)):
            primary.gatherer.submit(
                Group.of([plan], lambda _group, _error: None, None, group.caller, group.on_behalf_of)
            )


def segments(running: Sequence[AskInProgress]) -> Iterator[list[AskInProgress]]:
    """Begin asks; start a new segment where one would be charged before an earlier ask to the same bucket.

    A lease also starts one if its peek would come before an earlier ask's charge or settlement of a bucket.
    """
    segment: list[AskInProgress] = []
    last: dict[bytes, Phase] = {}
    for each in running:
        keys = _keys_of(each.plan)
        earliest = max((last.get(key, Phase.PEEK) for key in keys), default=Phase.PEEK)
        if each.is_single:
            each.phases = dict.fromkeys(keys, earliest)
        else:
            each.phases = _phases_of(each.plan, each.slots)
            is_lease = each.plan.mode == "hold"
            if any(
                (Phase.PEEK if is_lease else each.phases[key]) < last.get(key, Phase.PEEK) for key in keys
            ):
                yield segment
                segment, last = [], {}
                earliest = Phase.PEEK
        each.begin(earliest if each.is_single else None)
        last |= each.phases
        segment.append(each)
    if segment:
        yield segment


def _to_repeat(asks: Sequence[AskInProgress]) -> list[AskInProgress]:
    """The refused asks that might get another answer if all asks were decided strictly in order.

    Either a peek refused them before an earlier ask charged the same bucket, or another ask's charge to the
    bucket was undone meanwhile.
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
            # an ask of one slot is peeked at and charged in one step, in the order of the batch
            was_peeked = each.last_phase == Phase.PEEK and not each.is_single
            is_overtaken = was_peeked and not charged.isdisjoint(each.phases)
            if is_overtaken or any(undone.get(key, set()) - {each.place} for key in each.phases):
                again.append(each)
    return again


def _ends_all(each: AskInProgress, running: Sequence[AskInProgress]) -> bool:
    """Whether an ask without an answer leaves the rest of its request undecided."""
    return each.error is not None and (len(running) == 1 or isinstance(each.error, AdmissionError))


def _as_came(failure: Exception | None) -> SlotResult:
    if isinstance(failure, StoreError | AdmissionError):
        return failure
    return StoreError("unexpected", repr(failure))


def _keys_of(plan: Plan) -> list[bytes]:
    keys = [charge.key for charge in plan.charges]
    if plan.retry is not None:
        keys.append(retry_key(*plan.retry, clustered=True))
    return keys


def _phases_of(plan: Plan, slots: Sequence[int]) -> dict[bytes, Phase]:
    """The latest phase in which an ask of several slots charges each of its keys."""
    keys = _keys_of(plan)
    if plan.mode == "peek":
        return dict.fromkeys(keys, Phase.PEEK)
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
