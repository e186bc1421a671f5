"""The port to a store of counters: the plans of one round trip, and the store's answers."""

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
"""The size in bytes of a hashed producer id, its spread, in a call to the store."""
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
    """This process is short of a resource; the store may work, so nothing is decided by policy.

    Attributes:
        was_sent: whether the command had been sent, so that it may have been carried out.
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
    """The charge of an ask to one quota that applies to it.

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
    """An ask in the form that the store needs.

    Attributes:
        mode: the ask's, or one of these. ``refresh`` refreshes the seen ids, as any refusal does, and writes
            nothing else. ``renew`` writes ids that the node knows, uncharged. ``undo`` takes charges back
            (``app.domain.undo``). ``peek_hold`` returns the units that each bucket would grant to a lease,
            and writes nothing. ``hold`` and ``settle``: see ``lease``.
        charges: in the order of the answer; may be empty when only a kept answer is wanted.
        retry: (principal, hash of the ask and its sender) under which an answer that charged is kept; None
            without an id or in a peek.
        context: the node's own bytes, given back with a kept answer; in mode ``renew`` the birth of the state
            that the node knows (``Mark``).
        at_ms: the caller's clock; None under the store's.
        keeps: keep the answer even if nothing was charged here, because other parts of the ask were charged.
        stamped: answer with the stamps of the charges, which undo needs.
        byte_delay_ms: the delay by the byte rates of other slots, which comes first (KIP-124).
        lease: in modes ``hold``, ``peek_hold`` and ``settle`` the name of the lease, and how long it lasts in
            milliseconds (0 when it is settled). ``hold`` takes the part of the usage that every bucket
            grants; in ``settle`` the usage is the spent part.
    """

    mode: Mode | Literal["refresh", "renew", "hold", "settle", "undo", "peek_hold"]
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
    """The answer of the store to one charge, as far as it is the same for every kind.

    The results of a kept answer, and of asks read from the log, have only these fields.

    Attributes:
        correction: 0; 1 if the clock was behind the bucket, whose newest time was used instead; 2 if it was
            behind by more than a window, and the bucket was moved back.
        observed, remaining: the bucket after the ask's effect, in the limit's unit; not a number if unknown.
        largest: with reason ``too_large``, the most that an empty bucket can hold; otherwise 0.
    """

    outcome: Outcome
    reason: Reason | None = None
    correction: int = 0
    throttle_ms: int = 0
    observed: float = math.nan
    remaining: float = math.nan
    largest: float = 0.0


class IdsResult(ChargeResult, frozen=True, gc=False):
    """The answer to a charge of producer ids.

    Attributes:
        remembered: how many ids the bucket remembers.
        fill: the fill of the newest filter, from 0 to 1.
        layers: how many layers are live.
        open_ms: how long the layer that now holds all ids of the ask stays open; 0 if no layer holds all of
            them, and for a peek.
        unseen: if the ask is throttled, how many of its ids are unseen.
    """

    remembered: float = 0.0
    fill: float = 0.0
    layers: int = 0
    open_ms: int = 0
    unseen: int = 0


class UnitsResult(ChargeResult, frozen=True, gc=False):
    """The answer to a charge of units.

    Attributes:
        lapsed: the units of unsettled leases that ended before the ask.
        forgiven: for a token bucket, how many units of its debt were forgiven.
    """

    lapsed: float = 0.0
    forgiven: float = 0.0


class LeaseResult(UnitsResult, frozen=True, gc=False):
    """The answer to a hold, to a peek at one, or to a settlement; it does not say what was forgiven.

    Attributes:
        held: the units that the bucket holds now, for all leases.
        granted: the units held for this lease if every quota admits; of a peek, what a hold would get.
    """

    held: float = 0.0
    granted: float = 0.0


class UndoResult(UnitsResult, frozen=True, gc=False):
    """The answer to the undo of a charge.

    Attributes:
        given_back: the units that were given back.
    """

    given_back: float = 0.0


class Undone(NamedTuple):
    """A charge that was taken back, because another slot of a cluster refused the ask.

    Attributes:
        order, at_ms: the place of the charge among all decisions of the store, and its time in the bucket.
        taken, given: the units that the charge took, and the units given back, which may be fewer.
        undo_order: the place of the undo; None if the undo got no answer.
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
        order, at_ms: the place of the hold among all decisions of the store, and the store's time.
        release_order, released_ms: the same of the release; None if it got no answer, so that the units stay
            held until the lease ends.
    """

    key: bytes
    units: float
    order: int | None
    at_ms: int
    release_order: int | None = None
    released_ms: int | None = None


class Answer(Struct, frozen=True):
    """The answer of the store to one plan.

    Attributes:
        kept: the context of the ask that the answer was kept for.
        error: why this ask has no answer though the store works: a bucket cannot be read.
        at_ms: the store's time at the call; 0 under the caller's clock.
        order: its place among all decisions of the store; None if decisions are not logged, or if the call
            could only peek.
        id_outcomes: the outcomes of its ids, one byte each: SEEN, CHARGED or REFRESHED of
            ``app.decision_log.batch``.
        admits: every quota admits, according to the store.
        packed: the answer in the store's bytes; empty if this node assembled it.
        stamps: the stamps of its charges, if the plan asked for them.
        orders: for each result its own place, if the buckets of the ask are in several slots of a cluster;
            else empty: all have ``order``.
        failure: why the results with reason ``store_failure`` are not the store's.
        is_charged: False if nothing stayed charged although no quota refused the ask.
        undone: charges that were made and taken back.
        released: units that were held for a lease and freed at once.
        refreshes: the seen ids are still to be refreshed.
        earlier: the answer of the previous try, if this ask was decided more than once. ``undone`` is of all
            tries; all other fields are of this try.
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
    """The memory that a store uses, and the most that it may use, in bytes; 0 means no limit."""

    used: int
    most: int

    @property
    def is_full(self) -> bool:
        """Whether it takes nothing new; the rest of the memory is for existing keys, the log and leases."""
        return self.most > 0 and self.used * 8 > self.most * 7


class Mark(NamedTuple):
    """Values by which a node detects that the store lost its state, or that a bucket was reset.

    Attributes:
        now_ms: the store's time.
        birth: changes when the state is lost, or may miss the newest writes after a failover or a start of
            the server; empty if it is not known.
        resets: the number of the last reset of any bucket that nodes may remember; 0 without one.
    """

    now_ms: int
    birth: bytes
    resets: int


class LiveLayer(Struct, frozen=True):
    """A live layer of a bucket of producer ids.

    Attributes:
        number: counts the layers of the bucket, from 1; a layer keeps it.
        began_ms: its start time.
        ids: how many ids have it as their newest layer.
    """

    number: int
    began_ms: int
    ids: int


class Fault(NamedTuple):
    """A misconfiguration of a store that still decides: one word for the metric, and a sentence."""

    name: str
    detail: str


AnswersCallback = Callable[[list[Answer] | Exception], None]
"""Called with the answers of a call, or with the error in their place: mostly a ``StoreError``."""


class StoreCalls(Protocol):
    """The calls to the counters that all nodes share, and how long a call has had no reply.

    The store itself offers them, and so does the circuit in front of it (``app.admission.gathering``).
    """

    def ask(self, plans: Sequence[Plan], done: AnswersCallback) -> None:
        """Decide plans in order, each atomically, in one round trip on the open connection.

        Args:
            done: called once, and never before this returns, with the answers of the first plans (at least
                one) or with an error. A call that has written much decides no further ask, so that it does
                not block the store for long: send the rest again. A failed call may still be counted.
        """

    def silent_since(self) -> float | None:
        """When the store's silence began, by the loop's clock; None if it is not silent.

        It is silent while a reply is due or the connection is lost, but not if bytes wait to be read.
        """

    def give_up(self, error: StoreError) -> None:
        """Fail all calls that wait for a reply or for a connection, and close the connection."""

    async def forget(self, keys: Sequence[bytes], known_ms: Mapping[bytes, int] = NONE_KNOWN) -> int | None:
        """Remove the buckets of these keys in one step; if that fails, either all or none are removed.

        Args:
            known_ms: for buckets that nodes remember, how long their knowledge is valid.

        Returns:
            the place of the removal in the order of the decision log; None if nothing is logged.

        Raises:
            StoreError: no answer, or an error as the answer; a late call may still remove them.
        """

    async def live_layers(self, key: bytes, now_ms: int, ttl_ms: int) -> list[LiveLayer]:
        """Read the live layers of a bucket of producer ids, oldest first; for operators, not for decisions.

        Args:
            ttl_ms: how long a layer lives.

        Raises:
            StoreError: no answer, or an error as the answer.
        """


class Store(StoreCalls, Protocol):
    """A store of counters: the calls, and its connection.

    While this process lacks a resource for a connection, calls fail with ``ShortageError``.

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
            ShortageError: this process is short of something, so the store could not be examined.
            StoreError: the store does not decide or take writes.
        """

    async def close(self) -> None:
        """Close the connections."""
