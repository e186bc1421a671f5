"""The short way of plain asks: what equal asks have in common is made once, and admissions make no objects.

An ask is plain if it only asks: mode admit, without id, recheck or cluster action. Most asks are, and most of
them are admitted by every quota. Such an ask leaves as bytes that are kept, and its answer is read
only as far as that it admits, and for the metrics. Everything else about a plain ask goes the readable way:
``app.admission.plan``, which has the rules, and whose bytes these are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import force_setattr

from app.admission.forms import Forms, new_tuple
from app.admission.generations import Generations
from app.admission.hold import PRODUCE
from app.admission.plan import (
    LocalVerdict,
    Match,
    Matches,
    combined,
    decision_of,
    ids_match,
    local_verdict,
    may_answer_alone,
    named,
    plan_of,
)
from app.domain.ask import Ask
from app.domain.decision import Decision, Verdict
from app.domain.quota import MAX_CONNECTION_CREATION_RATE, Quota
from app.domain.usage import enforcement_of, spreads_of, usage_field
from app.store.encoding import COUNT, MOST_MATCHES, NUMBER, Values, pieces_of
from app.store.port import PackedPlan, Plan

OWN_BYTES: Final = 1_000
SHARED_BYTES: Final = 500
ID_BYTES: Final = 80
"""Estimated size of a plain ask, of each of its quotas and of each of its ids, without names."""

SHARED_MOST_BYTES: Final = 4 * 1024 * 1024
"""The memory for what plain asks with the same quotas share."""

_ADMITS: Final = Verdict("", "", "", 0.0, "deny", shadow=False, outcome="admit", throttle_ms=0)
ADMITTED: Final[Sequence[Decision]] = [
    combined("admit", (_ADMITS,) * quotas, detail=False, sequential=False)
    for quotas in range(MOST_MATCHES + 1)
]
"""The decision that is made when every quota admits, by their number; each is one object for all asks."""
ADMITTED_ALONE: Final = decision_of(Ask(), None, None, sequential=False, alone=_ADMITS)[0]
"""The decision of a node that knows all ids of an ask which nothing else limits."""


class Place(NamedTuple):
    """A quota that applies, and under which labels its bucket is shown in the metrics."""

    quota: Quota
    labels: tuple[str, str]


class Logged(Struct, gc=False):
    """What the decision log made of a plain ask, or of what asks with the same quotas have in common.

    Attributes:
        packed, length: its part of a batch.
        held: bytes of memory that it takes while it waits, by estimate.
        room: what a row takes of a page.
        page: the number of the page that has it.
        place: where it is there.
    """

    packed: bytes
    length: int
    held: int
    room: int = 0
    page: int = 0
    place: int = 0


class ArgumentForm(NamedTuple):
    """How the arguments of asks with the same quotas are packed.

    Attributes:
        before_time, after_time: the bytes around the caller's time.
        timeless: these, with what is between them in an ask without a time.
        ids: the bytes around what differs of the ids; None without a quota of ids.
        amounts: the other quotas: the field of usage, how much of it is a unit, and the bytes that follow.
    """

    before_time: bytes
    after_time: bytes
    timeless: bytes
    ids: tuple[bytes, bytes, bytes] | None
    amounts: tuple[tuple[str, float, bytes], ...]


class SharedBytes(Struct, frozen=True, gc=False):
    """What plain asks with the same quotas have in common.

    Attributes:
        form: of their arguments; None without quotas.
        others: likewise without the quota of ids; None if that is the only one, or there are no ids.
        of_units: for each quota, whether it counts units, not ids.
        logged: kept for the decision log, once it took an admission by these quotas.
    """

    form: ArgumentForm | None
    others: ArgumentForm | None
    of_units: tuple[bool, ...]
    decision: Decision
    logged: Logged | None = None


class PlainQuotas(Struct, frozen=True, gc=False):
    """The quotas of a plain ask, as far as an admission needs them.

    Attributes:
        edition: that of the quotas of which these are some (``Matches``); others may be in force by now.
        of_units: for each quota that the store decides, whether it counts units, not ids.
        places: these quotas.
        decision: the one if all of them admit.
        shared: what asks with the same quotas have in common.
        alone: the quota of the ask's ids, if this node decides that alone.
        learns: the match of the ask's ids, if this node learns of them from the store's answer.
        logged: kept for the decision log, once it took an admission of this ask.
    """

    edition: object
    of_units: tuple[bool, ...]
    places: tuple[Place, ...]
    decision: Decision
    shared: SharedBytes
    alone: Place | None = None
    learns: Match | None = None
    logged: Logged | None = None


class OtherQuotas(NamedTuple):
    """What is left of a plain ask at a node that knows all of its ids.

    Attributes:
        verdict: on the ids, which this node gives alone.
        plan, quotas: the other quotas; without any there is nothing to send.
        answered: without other quotas, the ask as it is planned at any time; its time means nothing.
    """

    verdict: Verdict
    plan: PackedPlan | None
    quotas: PlainQuotas
    answered: PlannedAsk | None


class AnsweredIds(Struct):
    """A plain ask with ids that a node may know; what it then needs is made when it is wanted.

    Attributes:
        match: the quota of the ids.
    """

    match: Match
    make: Callable[[], OtherQuotas]
    made: OtherQuotas | None = None

    def others(self) -> OtherQuotas:
        """Return what is left when the node knows the ids."""
        if self.made is None:
            self.made = self.make()
        return self.made


class PlannedAsk(Struct, frozen=True, gc=False):
    """An ask on its way to a decision.

    Attributes:
        matches: the quotas that apply, scaled by the throttle factor in force.
        is_held: whether a factor of 0 holds the ask.
        plan: what to ask the store; None if the store is not needed.
        plain: its quotas, if it goes the short way.
        alone: the verdict on its ids, if this node gives it alone; the plan then lacks their quota.
        travels: the ask without the ids that this node knows, if it knows some; the plan is that of this one.
        edition: that of the node's knowledge (``LocalAnswers.edition``) when it was planned.
    """

    ask: Ask
    matches: tuple[Match, ...]
    is_held: bool
    plan: Plan | PackedPlan | None
    plain: PlainQuotas | None = None
    alone: LocalVerdict | None = None
    travels: Ask | None = None
    edition: int = 0


class PlainAsk(Struct, frozen=True, gc=False):
    """A plain ask, ready to be sent.

    Attributes:
        is_simple: whether ``planned`` is right at any time: neither the throttle factor nor the ids that a
            node knows make a difference.
        answered: the ask at a node that knows its ids; None if a node must not answer for them.
    """

    planned: PlannedAsk
    quotas: PlainQuotas
    is_simple: bool
    answered: AnsweredIds | None = None

    @property
    def size(self) -> int:
        """How many bytes of memory it takes, by estimate."""
        packed = self.planned.plan
        size = OWN_BYTES + SHARED_BYTES * len(self.quotas.places)
        if isinstance(packed, PackedPlan):
            size += len(packed.argument) + 4 * sum([len(key) for key in packed.keys]) + ID_BYTES * packed.ids
        return size if self.answered is None else 2 * size


def keep(of: PlainQuotas | SharedBytes, logged: Logged) -> Logged:
    """Keep what the decision log made of an ask or of its quotas; it is the same whenever it is made."""
    force_setattr(of, "logged", logged)
    return logged


def is_plain(ask: Ask) -> bool:
    """Return whether an ask is plain."""
    return ask.mode == "admit" and ask.id is None and not (ask.recheck or ask.cluster_action)


def remaining_of(values: Values, quotas: int) -> Values:
    """Return what remains of each quota, by the values of an answer in which all of them admit."""
    return values[1 : 2 * quotas : 2]


def admission_of(planned: PlannedAsk, values: Values) -> Decision:
    """Return the decision on a plain ask that every quota admits, of whose answer these are the values."""
    assert planned.plain is not None
    decision, ask = planned.plain.decision, planned.ask
    if not ask.detail:
        return decision
    verdicts = tuple(
        Verdict(
            *named(match.applied, enforcement_of(ask, match.applied.quota)),
            "admit",
            0,
            values[2 * place],
            values[2 * place + 1],
        )
        for place, match in enumerate(planned.matches)
    )
    return Decision("admit", 0, decision.charged, decision.applied, decision.source, None, verdicts)


class PlainAsks:
    """Makes plain asks ready, by the quotas of one snapshot; what asks with the same quotas share is kept.

    Args:
        matches: the quotas that apply.
        most_bytes: the size of the cache.
    """

    def __init__(self, matches: Matches, secret: bytes, most_bytes: int = SHARED_MOST_BYTES) -> None:
        self._matches = matches
        self._secret = secret
        self._shared = SharedCache(secret, most_bytes)
        self._forms = Forms(matches.quotas, matches.rules, self._shared.of)

    def of(self, ask: Ask) -> PlainAsk | None:
        """Return an ask ready to be sent; None if it is not plain, or its quotas are not."""
        if not is_plain(ask):
            return None
        known = self._forms.of(ask)
        if known is None:
            matches = self._matches.of(ask)
            shared = self._shared.of(ask, matches)
        else:
            matches, shared = known
        return _plain_ask(ask, matches, shared, self._matches.edition, self._secret) if shared else None


class SharedCache:
    """What plain asks with the same quotas have in common, by these quotas."""

    def __init__(self, secret: bytes, most_bytes: int) -> None:
        self._secret = secret
        self._kept: Generations[tuple[int, ...], SharedBytes | Literal[False]] = Generations(most_bytes)

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, ask: Ask, matches: tuple[Match, ...]) -> SharedBytes | Literal[False]:
        """Return what asks with the quotas and ``deny`` of this one share; False if they are not plain."""
        # The quotas live as long as the snapshot, so no other quota gets the id of one of them.
        which = (ask.deny, *[id(match.applied.quota) for match in matches])
        shared = self._kept.get(which)
        if shared is None:
            shared = _shared_bytes(ask, matches, self._secret) or False
            self._kept.add(which, shared, SHARED_BYTES * (1 + len(matches)))
        return shared


def _shared_bytes(ask: Ask, matches: tuple[Match, ...], secret: bytes) -> SharedBytes | None:
    """Return what plain asks have in common that have the quotas and the ``deny`` of this one.

    None if an admission by these quotas has more to it: shadow quotas have metrics and log rows of their own,
    those of brokers and listeners have further metrics.
    """
    quotas = [match.applied.quota for match in matches]
    if any(quota.shadow or quota.key == MAX_CONNECTION_CREATION_RATE for quota in quotas):
        return None
    return SharedBytes(
        _form(ask, matches, secret),
        _form(ask, _others(matches), secret),
        tuple(quota.algorithm != "producer_ids" for quota in quotas),
        ADMITTED[len(quotas)],
    )


def _form(ask: Ask, matches: tuple[Match, ...], secret: bytes) -> ArgumentForm | None:
    """Return how the arguments of asks with these quotas are packed, by that of one of these asks."""
    plan = plan_of(ask, matches, secret)
    if plan is None:
        return None
    before_time, after_time, *pieces = pieces_of(plan)
    ids = None
    if matches[0].applied.quota.algorithm == "producer_ids":
        ids, pieces = (pieces[0], pieces[1], pieces[2]), pieces[3:]
    timeless = before_time + NUMBER.pack(0) + after_time
    fields = [usage_field(match.applied.quota) for match in matches[ids is not None :]]
    amounts = tuple((*field, piece) for field, piece in zip(fields, pieces, strict=True))
    return ArgumentForm(before_time, after_time, timeless, ids, amounts)


def _others(matches: tuple[Match, ...]) -> tuple[Match, ...]:
    """Return the matches behind that of the ids; none if no quota counts ids."""
    return matches[1:] if matches and matches[0].applied.quota.algorithm == "producer_ids" else ()


def _plain_ask(
    ask: Ask, matches: tuple[Match, ...], shared: SharedBytes, edition: object, secret: bytes
) -> PlainAsk:
    packed = _packed(ask, matches, shared.form, secret)
    places = tuple(
        [new_tuple(Place, (applied.quota, (applied.quota.key, applied.bucket))) for applied, _ in matches]
    )
    learns = None if ask.producer_ids is None else ids_match(ask, matches)
    quotas = PlainQuotas(edition, shared.of_units, places, shared.decision, shared, None, learns)
    planned = PlannedAsk(ask, matches, False, packed, quotas)
    if learns is None or not may_answer_alone(ask):
        return PlainAsk(planned, quotas, learns is None and PRODUCE not in ask.usage)
    return PlainAsk(
        planned, quotas, False, AnsweredIds(learns, partial(_other_quotas, ask, matches, quotas, secret))
    )


def _other_quotas(ask: Ask, matches: tuple[Match, ...], quotas: PlainQuotas, secret: bytes) -> OtherQuotas:
    """Return what is left of an ask whose ids a node knows."""
    shared, places = quotas.shared, quotas.places
    others = _packed(ask, matches[1:], shared.others, secret)
    decision = ADMITTED_ALONE if others is None else shared.decision
    its = PlainQuotas(quotas.edition, shared.of_units[1:], places[1:], decision, shared, places[0])
    verdict = local_verdict(ask, matches[0])
    if others is not None:
        return OtherQuotas(verdict, others, its, None)
    return OtherQuotas(
        verdict, None, its, PlannedAsk(ask, matches, False, None, its, LocalVerdict(verdict, 0))
    )


def _packed(
    ask: Ask, matches: tuple[Match, ...], form: ArgumentForm | None, secret: bytes
) -> PackedPlan | None:
    """Return the plan of an ask for some of its quotas, whose argument is packed in this way."""
    if form is None:
        return None
    before_time, after_time, timeless, around_ids, amounts = form
    argument = [timeless]
    if ask.at_ms is not None:
        argument = [before_time, NUMBER.pack(ask.at_ms), after_time]
    ids = 0
    if around_ids is not None:
        spreads = spreads_of(ask, secret)
        ids = len(spreads)
        number, usage, after = around_ids
        argument += (COUNT.pack(ids), number, NUMBER.pack(ids), usage, *spreads, after)
    spent = ask.usage
    for field, per_unit, piece in amounts:
        argument += (NUMBER.pack(spent[field] / per_unit), piece)
    return PackedPlan(tuple([key for _, key in matches]), b"".join(argument), ids)
