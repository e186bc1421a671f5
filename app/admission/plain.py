"""The short way of plain asks: what equal asks have in common is made once, and admissions make no objects.

An ask is plain if it only asks: mode admit, without id, recheck or cluster action. Most asks are, and most of
them are admitted by every quota. Such an ask leaves as bytes that are kept, and its answer is read
only as far as that it admits, and for the metrics. Everything else about a plain ask goes the readable way:
``app.admission.plan``, which has the rules, and whose bytes these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from app.admission.generations import Generations
from app.admission.plan import LocalVerdict, Match, Matches, combined, named, plan_of
from app.domain.ask import Ask
from app.domain.decision import Decision, Verdict
from app.domain.quota import KEYS, MAX_CONNECTION_CREATION_RATE, Quota
from app.domain.usage import enforcement_of, usage_of
from app.store.encoding import NUMBER, OBSERVED, REMAINING, VALUES, VALUES_OF, encode_plan, pieces_of
from app.store.port import PackedPlan, Plan

OWN_BYTES: Final = 1_000
SHARED_BYTES: Final = 500
ID_BYTES: Final = 80
"""Estimated size of a plain ask, of each of its quotas and of each of its ids, without names."""

SHARED_MOST_BYTES: Final = 4 * 1024 * 1024
"""The memory for what plain asks with the same quotas share."""

_ADMITS: Final = Verdict("", "", "", 0.0, "deny", shadow=False, outcome="admit", throttle_ms=0)
ADMITTED: Final[Sequence[Decision]] = [
    combined("admit", (_ADMITS,) * quotas, detail=False, sequential=False) for quotas in range(len(VALUES_OF))
]
"""The decision that is made when every quota admits, by their number; each is one object for all asks."""


class Place(NamedTuple):
    """A quota that applies, and under which labels its bucket is shown in the metrics."""

    quota: Quota
    labels: tuple[str, str]


class SharedBytes(Struct, frozen=True):
    """What plain asks with the same quotas have in common.

    Attributes:
        pieces: the argument of an ask, between the numbers that differ; none if it has producer ids.
        of_units: for each quota, whether it counts units, not ids.
    """

    pieces: tuple[bytes, ...]
    of_units: tuple[bool, ...]
    decision: Decision


class PlainQuotas(Struct, frozen=True):
    """The quotas of a plain ask, as far as an admission needs them.

    Attributes:
        snapshot: the quotas of which these are some; others may be in force by now.
        of_units: for each quota, whether it counts units, not ids.
        decision: the one if all of them admit.
    """

    snapshot: Matches
    of_units: tuple[bool, ...]
    places: tuple[Place, ...]
    decision: Decision


class PlannedAsk(Struct, frozen=True):
    """An ask on its way to a decision.

    Attributes:
        matches: the quotas that apply, scaled by the throttle factor in force.
        is_held: whether a factor of 0 holds the ask.
        plan: what to ask the store; None if the store is not needed.
        plain: its quotas, if it goes the short way.
        alone: the verdict on its ids, if this node gives it alone; the plan then lacks their quota.
        travels: the ask without the ids that this node knows, if it knows some; the plan is that of this one.
        turn: the turn of the node's knowledge (``LocalAnswers.turn``) when it was planned.
    """

    ask: Ask
    matches: tuple[Match, ...]
    is_held: bool
    plan: Plan | PackedPlan | None
    plain: PlainQuotas | None = None
    alone: LocalVerdict | None = None
    travels: Ask | None = None
    turn: int = 0


class PlainAsk(Struct, frozen=True):
    """A plain ask, ready to be sent.

    Attributes:
        size: how many bytes of memory it takes, by estimate.
    """

    planned: PlannedAsk
    quotas: PlainQuotas
    size: int


def is_plain(ask: Ask) -> bool:
    """Return whether an ask is plain."""
    return ask.mode == "admit" and ask.id is None and not (ask.recheck or ask.cluster_action)


def admission_of(planned: PlannedAsk, values: Sequence[float]) -> Decision:
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
            values[1 + VALUES * place + OBSERVED],
            values[1 + VALUES * place + REMAINING],
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
        self._shared: Generations[tuple[int, ...], SharedBytes | Literal[False]] = Generations(most_bytes)

    def of(self, ask: Ask) -> PlainAsk | None:
        """Return an ask ready to be sent; None if it is not plain, or its quotas are not."""
        if not is_plain(ask):
            return None
        matches = self._matches.of(ask)
        # The quotas live as long as the snapshot, so no other quota gets the id of one of them.
        which = (ask.deny, *[id(match.applied.quota) for match in matches])
        shared = self._shared.get(which)
        if shared is None:
            shared = _shared_bytes(ask, matches, self._secret) or False
            self._shared.add(which, shared, SHARED_BYTES * (1 + len(matches)))
        return _plain_ask(ask, matches, shared, self._matches, self._secret) if shared else None


def _shared_bytes(ask: Ask, matches: tuple[Match, ...], secret: bytes) -> SharedBytes | None:
    """Return what plain asks have in common that have the quotas and the ``deny`` of this one.

    None if an admission by these quotas has more to it: shadow quotas have metrics and log rows of their own,
    those of brokers and listeners have further metrics.
    """
    quotas = [match.applied.quota for match in matches]
    if any(quota.shadow or quota.key == MAX_CONNECTION_CREATION_RATE for quota in quotas):
        return None
    algorithms = [quota.algorithm for quota in quotas]
    plan = None if "producer_ids" in algorithms else plan_of(ask, matches, secret)
    return SharedBytes(
        () if plan is None else pieces_of(encode_plan(plan)[1], len(quotas)),
        tuple(algorithm != "producer_ids" for algorithm in algorithms),
        ADMITTED[len(quotas)],
    )


def _plain_ask(
    ask: Ask, matches: tuple[Match, ...], shared: SharedBytes, snapshot: Matches, secret: bytes
) -> PlainAsk:
    packed: PackedPlan | None = None
    keys = tuple([match.key for match in matches])
    if shared.pieces:
        first, second, *others = shared.pieces
        argument = [first, NUMBER.pack(ask.at_ms or 0), second]
        for match, piece in zip(matches, others, strict=True):
            argument += (NUMBER.pack(usage_of(ask, match.applied.quota)), piece)
        packed = PackedPlan(keys, b"".join(argument))
    elif (plan := plan_of(ask, matches, secret)) is not None:
        packed = PackedPlan(keys, encode_plan(plan)[1], plan.ids)
    places = tuple([Place(applied.quota, (applied.quota.key, applied.bucket)) for applied, _ in matches])
    quotas = PlainQuotas(snapshot, shared.of_units, places, shared.decision)
    size = OWN_BYTES + SHARED_BYTES * len(matches)
    if packed is not None:
        size += len(packed.argument) + 4 * sum(map(len, keys)) + ID_BYTES * packed.ids
    return PlainAsk(PlannedAsk(ask, matches, False, packed, quotas), quotas, size)


assert len(VALUES_OF) > len(KEYS), "each key may match, and two of them twice"
