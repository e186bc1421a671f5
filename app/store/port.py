"""The port to a store of counters: what one round trip asks, and what the store answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, Protocol

from msgspec import Struct

from app.domain.ask import Mode
from app.domain.decision import Outcome, Reason
from app.domain.ladder import AppliedQuota
from app.domain.quota import Enforcement, Quota
from app.domain.undo import Stamp
from app.node.shortage import Resource, shortage_of
from app.store.compiled_quota import CompiledQuota

SPREAD_BYTES: Final = 32
"""What the store takes for a producer id."""
LAYER: Final = 4
"""One live layer, in the byte that also holds the clock correction: so kept answers keep their length."""
NONE_KNOWN: Final[Mapping[bytes, int]] = MappingProxyType({})


class StoreError(Exception):
    """The store did not answer, or answered with an error; ``reason`` is one word for the metric.

    StoreError
    ├── ShortageError                             this node is short of something
    └── app.store.library.MissingFunctionError    the script has to be loaded first
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


class ShortageError(StoreError):
    """This process is short of a resource, which says nothing about the store: nothing is decided by policy.

    Attributes:
        was_sent: whether the command had been sent, and may have been carried out; else it was not.
    """

    def __init__(self, resource: Resource, detail: str = "", *, was_sent: bool = False) -> None:
        super().__init__("shortage", f"this node is short of {resource}: {detail}")
        self.resource = resource
        self.was_sent = was_sent


def as_shortage(error: Exception) -> ShortageError | None:
    """Return an error as a shortage of this process, if it is one."""
    if isinstance(error, StoreError):
        return error if isinstance(error, ShortageError) else None
    resource = shortage_of(error)
    return None if resource is None else ShortageError(resource, repr(error))


class Charge(Struct, gc=False):
    """What an ask spends of one quota that applies to it.

    Attributes:
        compiled: the quota, as it applies to this ask.
        owner, bucket: the names of the bucket's owner and of the bucket.
        key: the bucket's key in the store (``app.store.keys``).
        usage: in units of the limit; for producer ids their number, or, to renew them, the number of the last
            reset that the node knew of.
        spreads: for producer ids, 32 bytes each, joined; in mode undo, the stamp of the charge; otherwise
            empty.
    """

    compiled: CompiledQuota
    owner: str
    bucket: str
    key: bytes
    usage: float
    spreads: bytes = b""

    @property
    def quota(self) -> Quota:
        """The quota."""
        return self.compiled.quota

    @property
    def entity(self) -> str:
        """The entity that the quota is set on."""
        return self.compiled.entity

    @property
    def enforcement(self) -> Enforcement:
        """How the quota is enforced for this ask."""
        return self.compiled.enforcement

    @property
    def applied(self) -> AppliedQuota:
        """The quota that applies, in the words of the domain."""
        return AppliedQuota(self.compiled.quota, self.compiled.entity, self.bucket, self.owner)


class Plan(Struct, gc=False):
    """What the store needs to know of an ask.

    Attributes:
        mode: the ask's; or ``refresh``, which refreshes the ids that are seen, as any refusal does, and
            writes nothing else; or ``renew``, which writes ids that the node knows, and charges nothing; or
            ``undo``, which takes back what charges took (``app.domain.undo``); or ``look``, which says what
            each bucket would grant of a lease, and writes nothing.
        charges: in the order of the answer; may be empty when only a kept answer is looked for.
        retry: (principal, hash of the ask and of who sent it) under which an answer that charged is kept;
            None without an id or in a peek.
        context: the node's own bytes, given back with a kept answer; in mode ``renew`` the birth of the state
            that the node knows (``Mark``).
        at_ms: the caller's clock; None under the store's.
        keeps: keep the answer even if nothing was charged, since other parts of the ask were.
        stamped: answer with the stamps of what was charged, by which it can be undone.
        byte_delay_ms: the delay that byte rates of other slots gave, to be waited out first (KIP-124).
        lease: in modes ``hold``, ``look`` and ``settle`` the name of the lease, and how long it lasts in
            milliseconds (0 when it is settled). Hold takes as much of the usage as every bucket grants,
            settle says what was spent of that.
    """

    mode: Mode | Literal["refresh", "renew", "hold", "settle", "undo", "look"]
    charges: tuple[Charge, ...]
    retry: tuple[str | None, bytes] | None = None
    context: bytes = b""
    at_ms: int | None = None
    keeps: bool = False
    stamped: bool = False
    byte_delay_ms: int = 0
    lease: tuple[bytes, int] | None = None

    @property
    def ids(self) -> int:
        """How many producer ids it has; many ids make a call long. Only the first charge may count ids."""
        return len(self.charges[0].spreads) // SPREAD_BYTES if self.charges else 0


class ChargeResult(Struct, frozen=True, gc=False):
    """What the store answers to one charge.

    Attributes:
        clock: 0; 1 if the clock was behind the bucket, whose newest time was used instead; 2 if it was behind
            by more than a window, and the bucket was moved back; plus 4 for each live layer of producer ids.
        observed, remaining: the bucket after the ask's effect, in the limit's unit; not a number if unknown.
        given: what depends on the mode; see the properties.
        remembered: for producer ids how many the bucket remembers; see ``lapsed``.
        fill: for producer ids the fill of the newest filter, from 0 to 1; see ``forgiven`` and ``held``.
    """

    outcome: Outcome
    reason: Reason | None = None
    clock: int = 0
    throttle_ms: int = 0
    observed: float = math.nan
    remaining: float = math.nan
    given: float = 0.0
    remembered: float = 0.0
    fill: float = 0.0

    @property
    def correction(self) -> int:
        """0; 1 or 2 as ``clock`` says."""
        return self.clock % LAYER

    @property
    def layers(self) -> int:
        """How many layers of producer ids are live; otherwise 0."""
        return self.clock // LAYER

    @property
    def largest(self) -> float | None:
        """With reason ``too_large``, the most that an empty bucket can hold."""
        return self.given if self.reason == "too_large" else None

    @property
    def open_ms(self) -> int:
        """For producer ids, for how long the layer stays open that now holds all ids of the ask.

        0 if it does not hold all of them; always 0 for a peek.
        """
        return 0 if self.reason == "too_large" else int(max(self.given, 0.0))

    @property
    def forgiven(self) -> float:
        """For a token bucket, how many units of its debt were forgiven."""
        return self.fill

    @property
    def unseen(self) -> int:
        """For producer ids that are throttled, how many are new."""
        return int(max(-self.given, 0))

    @property
    def held(self) -> float:
        """In modes hold, look and settle, the units that the bucket holds now."""
        return self.fill

    @property
    def lapsed(self) -> float:
        """For a quota of units, those of leases that ended before the ask and that nobody had settled."""
        return self.remembered

    @property
    def granted(self) -> float:
        """In mode hold, the units held now, if every quota admits; in mode look, those that would be."""
        return 0.0 if self.reason == "too_large" else max(self.given, 0.0)


class Undone(NamedTuple):
    """A charge that was taken back, because another slot of a cluster refused the ask.

    Attributes:
        order, at_ms: of the charge: its place among all decisions of the store, and the time in the bucket.
        taken, given: the units that it took, and that were given back; less if that was no longer possible.
        undo_order: the place of the undo; None if nothing came of it.
    """

    key: bytes
    order: int | None
    at_ms: int
    taken: float
    given: float = 0.0
    undo_order: int | None = None


class Released(NamedTuple):
    """Units that one slot of a cluster held and freed at once, as another one granted less or nothing.

    Attributes:
        order, at_ms: of the hold: its place among all decisions of the store, and the store's time.
        release_order, released_ms: of the release; None if nothing came of it, and it ends with the lease.
    """

    key: bytes
    units: float
    order: int | None
    at_ms: int
    release_order: int | None = None
    released_ms: int | None = None


class Answer(Struct, frozen=True):
    """What the store answers to one plan.

    Attributes:
        kept: the context of the ask that the answer was kept for.
        error: why this ask has no answer though the store works: a bucket cannot be read.
        at_ms: the store's time at the call; 0 under the caller's clock.
        order: its place among all decisions of the store; None if decisions are not logged, or if the call
            could only peek.
        id_outcomes: what became of its ids, a byte each: SEEN, CHARGED or REFRESHED of
            ``app.decision_log.batch``.
        admits: every quota admits, by the word of the store.
        packed: the answer as it came; empty if it was put together.
        stamps: of its charges, if the plan wanted them.
        orders: for each result its own place, if the buckets of the ask are in several slots of a cluster;
            else empty: all have ``order``.
        failure: why some of these results, with reason ``store_failure``, are not the store's.
        is_charged: False if nothing stayed charged although no quota refused the ask.
        undone: charges that were made and taken back.
        released: of a lease, what was held and freed at once.
        refreshes: the seen ids are still to be refreshed.
        earlier: the answer of the previous try of this ask, if the order of a batch made it be decided once
            more. ``undone`` is of all tries, all else of this one.
    """

    results: tuple[ChargeResult, ...]
    kept: bytes | None = None
    error: StoreError | None = None
    at_ms: int = 0
    order: int | None = None
    id_outcomes: bytes = b""
    admits: bool = False
    packed: bytes = b""
    stamps: tuple[Stamp, ...] = ()
    orders: tuple[int | None, ...] = ()
    failure: StoreError | None = None
    is_charged: bool = True
    undone: tuple[Undone, ...] = ()
    released: tuple[Released, ...] = ()
    refreshes: bool = False
    earlier: Answer | None = None

    @property
    def tries(self) -> tuple[Answer, ...]:
        """The answers of all tries of the ask, newest first: each may have written something."""
        return (self,) if self.earlier is None else (self, *self.earlier.tries)


class Memory(NamedTuple):
    """The memory that a store uses, and the most that it may use, in bytes; 0 if that has no bound."""

    used: int
    most: int

    @property
    def is_full(self) -> bool:
        """Whether it takes nothing new; the rest of the memory is for existing keys, the log and leases."""
        return self.most > 0 and self.used * 8 > self.most * 7


class Mark(NamedTuple):
    """By what a node notices that the store lost its state, or that a bucket was reset.

    Attributes:
        now_ms: the store's time.
        birth: changes when the state is lost, or may miss the newest writes after a failover or a start of
            the server; empty if it is not known.
        resets: the number of the last reset of any bucket that nodes may remember; 0 without one.
    """

    now_ms: int
    birth: bytes
    resets: int


class Fault(NamedTuple):
    """A misconfiguration of a store that decides nevertheless: one word for the metric, and a sentence."""

    name: str
    detail: str


Came = Callable[[list[Answer] | Exception], None]
"""Called with the answers of a call, or with the error in their place: mostly a ``StoreError``."""


class StoreCalls(Protocol):
    """The calls to the counters that all nodes share, and how long a call has had no reply.

    The store itself offers them, and so does the circuit in front of it (``app.admission.gathering``).
    """

    def ask(self, plans: Sequence[Plan], done: Came) -> None:
        """Decide plans in order, each atomically, in one round trip on the open connection.

        Args:
            done: called once and never before this returns, with the answers of the first plans, at least of
                one, or with the error in their place. A call that has written much decides no further ask, so
                that it does not block the store for long: ask the rest again. A call that failed may still be
                counted.
        """

    def silent_since(self) -> float | None:
        """When its silence began by the loop's clock: a reply is due or the connection is lost; else None.

        It is not silent while there is something to read, however late the loop reads it.
        """

    def give_up(self, error: StoreError) -> None:
        """Fail all calls that wait for a reply or for a connection, and close the connection."""

    async def forget(self, keys: Sequence[bytes], known_ms: Mapping[bytes, int] = NONE_KNOWN) -> int | None:
        """Remove the buckets of these keys in one step; if that fails, either all or none are removed.

        Args:
            known_ms: for buckets that nodes remember, how long their knowledge is valid.

        Returns:
            its place in the order of the decision log; None if nothing is logged.

        Raises:
            StoreError: no answer, or an error for one; a late call may still remove them.
        """


class Store(StoreCalls, Protocol):
    """A store of counters: the calls, and its connection.

    While this process is short of what a connection needs, calls fail with ``ShortageError``.

    Attributes:
        lost: called when the connection for calls is lost; the next examination makes a new one, for which
            calls wait.
    """

    lost: Callable[[StoreError], None]

    async def examine(self) -> tuple[Fault, ...]:
        """Check that the store decides and takes writes, and connect for calls if necessary.

        Returns:
            the misconfigurations that were found, although the store works.

        Raises:
            ShortageError: this process is short of something, so it could not be examined.
            StoreError: it does not decide or take writes.
        """

    async def close(self) -> None:
        """Close the connections."""
