"""Gathers concurrent asks into shared store calls, and answers without the store when it is silent.

There is one store call at a time. An ask that finds none in progress is sent at once. Asks that arrive during
a call wait in the queue (``queue.py``) and share the next call, which leaves when the reply comes: no timer,
no added latency. A call carries at most 100 asks and 200 producer ids, so that no caller holds the store for
long. It carries at most 32 parts of requests: reading and answering a request of one ask takes this node
three times as long as the store takes to decide it, and a new ask waits for both.

Only the silence of the store counts as its failure. The time that asks spend in this node's queue never
does, however long it is. A timer for each call asks the kernel whether the store is silent. When the silence
exceeds the patience for it (``patience.py``: 50 ms, or 400 ms on a busy node), all waiting and arriving asks
are answered without the store, until the reply arrives or the call fails (after 500 ms).

While this process lacks a resource for a call (``ShortageError``), asks stay in the queue, and are shed
when they have waited too long.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Final

import structlog

from app.admission.errors import AdmissionError, CallerGoneError, OverloadedError
from app.admission.gathering.patience import Moment, Patience
from app.admission.gathering.queue import QUANTUM, Group, Queue
from app.domain.caller import ANYONE, Caller
from app.store.port import Answer, Plan, ShortageError, StoreCalls, StoreError

log = structlog.get_logger("quotagate.store")

MAX_ASKS: Final = 100
MAX_IDS: Final = 200
MAX_PARTS: Final = 32
"""The bounds of one call; an ask with more ids has a call of its own."""

CLOSE_WITHIN_S: Final = 1.0

CHECK_AGAIN_S: Final = 0.005
"""How long to wait before checking again, when a reply is waiting to be read or the call was not sent yet."""

OVERDUE_S: Final = 0.05
"""A check that is later than this was delayed by a pause of the machine, which delayed the store too."""

AFTER_DELAY_S: Final = 0.02
"""How long the store may take to reply after such a pause."""

TRY_AGAIN_S: Final = 0.05
"""The pause before the next call after a shortage of this process."""

QUEUE_S: Final = 2.0
"""How long an ask may wait in this node by default."""


Part = tuple[Group, int, int]
"""A group, and the start and end of its plans that are in one call."""


class Gathering(ABC):
    """Decides plans by the store: ``Gatherer``, or for a cluster ``app.admission.cluster.gatherer``."""

    async def decide(
        self,
        plans: Sequence[Plan],
        late: Callable[[int, Answer], None] | None = None,
        *,
        caller: Caller = ANYONE,
        on_behalf_of: str = "",
        within_s: float | None = None,
    ) -> tuple[list[Answer], StoreError | None]:
        """Return the answers in order up to a failure, and that failure or None.

        Args:
            late: called with the plan's index and the answer for each answer that arrives after the failure;
                its charges remain.
            on_behalf_of: the principal that the caller asks for; of several the first.
            within_s: how long the asks may wait in the queue, if less than ``queue_s``.

        Raises:
            OverloadedError: the asks of this principal have waited too long; nothing was sent.
            CallerGoneError: the caller left before anything was sent.
        """
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[Exception | None] = loop.create_future()

        def done(_: Group, failure: Exception | None) -> None:
            if not finished.done():
                finished.set_result(failure)

        def received_late(_: Group, place: int, answer: Answer) -> None:
            if late is not None:
                late(place, answer)

        group = Group.of(plans, done, received_late, caller, on_behalf_of, caller.came_at or monotonic())
        self.submit(group, within_s)
        try:
            failure = await finished
        finally:
            group.is_done = True  # also after a cancellation
        if failure is None or isinstance(failure, StoreError):
            return group.answers, failure
        raise failure

    @abstractmethod
    def submit(self, group: Group, within_s: float | None = None) -> None:
        """Decide the plans of a group; its callback may be called before this returns.

        Args:
            within_s: how long it may wait in the queue, if less than ``queue_s``.

        Raises:
            OverloadedError: the asks of this principal have waited too long; nothing is sent.
        """


class Gatherer(Gathering):
    """Sends the plans of all requests to the store, one call at a time.

    Args:
        budget_s: how long the store may be silent on a quiet node.
        timeout_s: the silence after which the call has failed.
        queue_s: how long an ask may wait in the queue. While the oldest ask of a principal has waited longer,
            no more asks for that principal are accepted.
        queued: called with the seconds in the queue of each ask that is sent.
    """

    def __init__(
        self,
        store: StoreCalls,
        *,
        budget_s: float,
        timeout_s: float = 0.5,
        queue_s: float = QUEUE_S,
        queued: Callable[[Sequence[float]], None] = lambda _seconds: None,
    ) -> None:
        self._store = store
        self._patience = Patience(budget_s)
        self._timeout_s = max(timeout_s, 2 * budget_s)
        self._queue_s = queue_s
        self._queued = queued
        self._arrived: list[Group] = []
        """Groups that came since the last call, in order of arrival. While all of them fit into the next
        call, and no earlier group waits, they need no turns."""
        self._oldest = math.inf
        """When the oldest group in ``_arrived`` came."""
        self._queue = Queue()
        """Groups served by fair turns; while there are any, those in ``_arrived`` join them at each call."""
        self._is_calling = False
        """Whether a call is in progress, or leaves in this iteration of the event loop."""
        self._ended: asyncio.Future[None] | None = None
        """Done when nothing waits any more; only while this closes."""
        self._is_closed = False
        self._in_call: list[Part] = []
        self._timer: asyncio.TimerHandle | None = None
        self._stretch = 1.0
        """Patience for the current call as a multiple of the usual: 1,000 ids are the work of five calls."""
        self._was_delayed = False
        """Whether a check in the current call came too late to judge the store."""
        self.is_late = False
        """Whether the store has been silent for too long during the current call."""

    @property
    def waiting(self) -> int:
        """How many asks are waiting for a call."""
        return self._queue.asks + sum(len(group.plans) - group.sent for group in self._arrived)

    def check(self, group: Group, within_s: float | None = None) -> None:
        """Check that a group could be submitted now.

        Raises:
            OverloadedError: the asks of this principal have waited too long.
        """
        if not self.is_late:
            within_s = self._queue_s if within_s is None else min(within_s, self._queue_s)
            self._check_age(group, monotonic() - within_s)

    def submit(self, group: Group, within_s: float | None = None, *, is_checked: bool = False) -> None:
        """Send a group when its turn comes; see ``Gathering``.

        Args:
            is_checked: whether the group was checked before, and so is not shed now.
        """
        group.within_s = within_s = self._queue_s if within_s is None else min(within_s, self._queue_s)
        if self.is_late:
            self._answer_without_store(group)
        else:
            latest = monotonic() - within_s
            if not is_checked and (group.since < latest or self._oldest < latest or self._queue.asks):
                self._check_age(group, latest)
            self._add(group)
        if not self._is_calling and (self._arrived or self._queue.asks):
            self._is_calling = True
            loop = asyncio.get_running_loop()
            loop.call_soon(self._send, loop)

    def _add(self, group: Group) -> None:
        self._arrived.append(group)
        self._oldest = min(self._oldest, group.since)

    def _line_up(self) -> Queue:
        """Let everything that waits take turns."""
        groups, self._arrived, self._oldest = self._arrived, [], math.inf
        for group in groups:
            self._queue.add(group)
        return self._queue

    def _check_age(self, group: Group, latest: float) -> None:
        """Shed a group if it, or a waiting ask of its principal, came before ``latest``."""
        since = group.since
        if since >= latest:
            since = self._line_up().next_since(group.caller, group.on_behalf_of, since)
        if since < latest:
            raise OverloadedError("age")

    async def close(self) -> None:
        """Wait until nothing waits any more, for at most ``CLOSE_WITHIN_S``."""
        if self._is_calling:
            self._ended = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._ended}, timeout=CLOSE_WITHIN_S)
        self._is_closed = True
        self._stop_checking()
        self._patience.close()

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send the next call, if anything waits."""
        now = monotonic()  # the loop's clock shows when its iteration began
        parts = [] if self._is_closed else self._next_call(now)
        if not parts:
            self._is_calling = False
            if self._ended is not None and not self._ended.done():
                self._ended.set_result(None)
            return
        self._in_call = parts
        began = self._patience.begin(now)
        self._was_delayed = False
        self._check_in(self._patience.budget_s * self._stretch, began, loop)
        plans = [plan for group, start, end in parts for plan in group.plans[start:end]]
        self._store.ask(plans, partial(self._received, loop, parts, len(plans)))

    def _next_call(self, now: float) -> list[Part]:
        """Take the parts of the next call, by turns if they do not all fit into it."""
        groups, asks, ids = self._arrived, 0, 0
        for group in groups:
            asks += len(group.plans)
            ids += group.ids
        if len(groups) > MAX_PARTS or asks > MAX_ASKS or ids > MAX_IDS or self._queue.asks:
            self._line_up()
            return self._next_by_turns(now)
        self._arrived, self._oldest, self._stretch = [], math.inf, 1.0
        parts: list[Part] = []
        waits: list[float] = []
        for group in groups:
            asks, waited_s = len(group.plans), now - group.since
            may_drop = group.is_done or waited_s > group.within_s or group.caller.is_gone()
            if may_drop and self._is_dropped(group, now):
                continue
            waits += [waited_s] * asks
            parts.append((group, 0, asks))
            group.sent = asks
        self._queued(waits)
        return parts

    def _next_by_turns(self, now: float) -> list[Part]:
        """Take the parts of the next call by turns, up to the bounds of a call."""
        parts: list[Part] = []
        waits: list[float] = []
        asks, ids = MAX_ASKS, MAX_IDS
        while self._queue and asks > 0 and len(parts) < MAX_PARTS:
            group = self._queue.first()
            if self._is_dropped(group, now):
                self._queue.drop()
                continue
            taken, ids_taken = _fit(group, min(asks, QUANTUM), ids, alone=not parts)
            if taken == 0:
                break
            if group.sent == 0:
                waits += [now - group.since] * len(group.plans)
            asks, ids = asks - taken, ids - ids_taken
            parts.append((group, group.sent, group.sent + taken))
            group.sent += taken
            self._queue.charge(taken, ids_taken)
        self._queued(waits)
        self._stretch = max(1.0, (MAX_IDS - ids) / MAX_IDS)
        return parts

    def _is_dropped(self, group: Group, now: float) -> bool:
        """Return whether a group need not be sent; refuse it if its caller left or it waited too long."""
        if group.is_accounting:
            return False
        if group.is_done:
            return True
        if group.sent:
            return False
        if group.caller.is_gone():
            refusal: AdmissionError = CallerGoneError()
        elif now - group.since > group.within_s:
            refusal = OverloadedError("age")
        else:
            return False
        asyncio.get_running_loop().call_soon(finish_group, group, refusal)  # not now: the queue is in use
        return True

    def _received(
        self,
        loop: asyncio.AbstractEventLoop,
        parts: list[Part],
        plans: int,
        answers: list[Answer] | Exception,
    ) -> None:
        """Give each group its answers, after the next call has been sent."""
        self._stop_checking()
        self._in_call, self.is_late = [], False
        if isinstance(answers, ShortageError):
            self._wait_for_resources(parts, answers, loop)
            return
        if isinstance(answers, Exception):
            for group, _, _ in parts:
                finish_group(group, answers)
            self._send(loop)
            return
        if len(answers) < plans:
            self._put_back(parts, len(answers))
        self._send(loop)
        at = 0
        for group, start, end in parts:
            give_answers(group, start, answers[at : at + end - start])
            at += end - start

    def _wait_for_resources(
        self, parts: list[Part], short: ShortageError, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Try again soon; shed asks that have waited too long, and asks that were sent but got no answer."""
        if short.was_sent:
            for group, _, _ in parts:
                finish_group(group, OverloadedError("shortage"))
        else:
            self._put_back(parts, 0)
        now = monotonic()
        for group in self._line_up().drain():
            if not self._is_dropped(group, now):
                self._queue.add(group)
        loop.call_later(TRY_AGAIN_S, self._send, loop)

    def _put_back(self, parts: Sequence[Part], decided: int) -> None:
        """Requeue the plans that the store did not decide: it stops when a call has written 256 KiB."""
        left: dict[Group, int] = {}
        for group, start, end in parts:
            if decided < end - start:
                left.setdefault(group, start + max(decided, 0))
            decided -= end - start
        for group, place in reversed(left.items()):
            if group.is_done:
                group.sent = place
                for account in group.unsent_accounts():
                    self._add(account)
            else:
                self._queue.put_back(group, place)

    # The silence of the store

    def _check_in(self, seconds: float, began: Moment, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + seconds
        self._timer = loop.call_at(due, self._check_silence, began, due, loop)

    def _stop_checking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_silence(self, began: Moment, due: float, loop: asyncio.AbstractEventLoop) -> None:
        """Check the silence of the store, and fall back or give the call up if it is too long."""
        now = loop.time()
        since = self._store.silent_since()
        if since is None:
            self._check_in(CHECK_AGAIN_S, began, loop)
            return
        if now - due > OVERDUE_S and not self._was_delayed:
            self._was_delayed = True  # once in a call, so that a busy loop still notices a hung store
            self._check_in(AFTER_DELAY_S, began, loop)
            return
        silent_s = now - since
        patience_s = self._patience.lasts_s(began, self._patience.now(monotonic())) * self._stretch
        if silent_s >= max(self._timeout_s, patience_s):
            self._store.give_up(StoreError("timeout", "it does not reply"))
        elif silent_s >= patience_s:
            log.warning(
                "the store is silent; quotas follow on_store_failure until it replies",
                silent_ms=round(silent_s * 1000),
                patience_ms=round(patience_s * 1000),
            )
            self._answer_all_without_store()
            self._check_in(self._timeout_s - silent_s, began, loop)
        else:
            self._check_in(min(patience_s - silent_s, self._patience.budget_s), began, loop)

    def _answer_all_without_store(self) -> None:
        """Answer all waiting asks without the store; their records and refunds are still sent."""
        self.is_late = True
        for group, _, _ in self._in_call:
            finish_group(group, StoreError("budget"))
        for group in self._line_up().drain():
            self._answer_without_store(group)

    def _answer_without_store(self, group: Group) -> None:
        finish_group(group, StoreError("budget"))
        for account in group.unsent_accounts() if group.is_accounting else ():
            self._add(account)


def give_answers(group: Group, start: int, answers: list[Answer]) -> None:
    """Give a request the answers to its plans from ``start`` on; finish it if it has them all."""
    if group.is_done:  # it was answered without the store
        for place, answer in enumerate(answers, start):
            if group.late is not None:
                _tell(group.late, group, place, answer)
        return
    group.answers = answers = group.answers + answers if group.answers else answers
    if len(answers) == len(group.plans):
        finish_group(group, None)


def finish_group(group: Group, error: Exception | None) -> None:
    """Finish a request with the answers so far, unless it is finished."""
    if group.is_done:
        return
    group.is_done = True
    _tell(group.done, group, error)


def _tell(callback: Callable[..., None], *said: object) -> None:
    """Call back; an error there is logged, and the other requests of the call get their answers."""
    try:
        callback(*said)
    except Exception:
        log.exception("an answer could not be given")


def _fit(group: Group, asks: int, ids: int, *, alone: bool) -> tuple[int, int]:
    """Return how many of a group's next plans fit into a call, and their ids; a plan alone always fits."""
    taken = ids_taken = 0
    for plan in group.plans[group.sent : group.sent + asks]:
        if ids_taken + plan.ids > ids and not (alone and taken == 0):
            break
        taken += 1
        ids_taken += plan.ids
    return taken, ids_taken
