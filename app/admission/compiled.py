"""Finds the buckets that an ask charges, by tables that follow from the quotas alone.

The rungs of a ladder that an ask can match depend on the names it has, and on the rungs with quotas. So
for each combination of names and usage fields there is a table: the ladders, without the rungs that have no
quota. The rule is read from ``app.domain.ladder`` for a made-up ask; this file adds none. A quota is
compiled when it first applies (``app.store.compiled_quota``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from msgspec import structs

from app.catalog.snapshot import SetQuota, Snapshot
from app.domain.ask import Ask
from app.domain.entity import TYPES, Entity, is_unreserved, network_of, rung_of, spell
from app.domain.ladder import AppliedQuota, MatchingRules, asks_for, ladders_of
from app.domain.quota import KEYS, Quota
from app.domain.usage import ids_of
from app.store.compiled_quota import DENY, RECHECK, RECORDS, CompiledQuota, compiled
from app.store.keys import LONGEST_NAME, bucket_key
from app.store.port import Charge

MANNERS: Final = 8
"""The number of manners of asks, and so of compiled forms of a quota."""

USER, CLIENT, ADDRESS, BROKER, LISTENER, PAIR, BROKER_PAIR, NETWORK = range(8)
"""Kinds of buckets, by the names in them. The kinds with one name are indexes of ``TYPES``."""
_KINDS: Final = {
    ("user",): USER,
    ("user", "client-id"): PAIR,
    ("client-id",): CLIENT,
    ("ip",): ADDRESS,
    ("broker",): BROKER,
    ("listener",): LISTENER,
    ("broker", "listener"): BROKER_PAIR,
}
_OF_BROKERS: Final = (BROKER, BROKER_PAIR)
_ONE: Final = -1
_PREFIXES: Final = tuple([f"{type_}=" for type_ in TYPES])


class LadderRung(NamedTuple):
    """A rung on which quotas are set.

    Attributes:
        find: finds a quota by names; None if the rung is a default.
        name, other: the names to look up, as indexes of ``TYPES``; ``_ONE`` instead of a second one.
        default: the quota, if the rung is a default.
        kind: the kind of the bucket that it charges.
    """

    find: Callable[[Any], SetQuota | None] | None
    name: int
    other: int
    default: SetQuota | None
    kind: int


class Tables:
    """The ladders of asks, for the quotas of one snapshot."""

    def __init__(self, snapshot: Snapshot, rules: MatchingRules) -> None:
        self.rungs: Final = snapshot.rungs
        self._rules = rules
        self._between = rules.inter_broker_listener
        self._ladders: dict[tuple[object, ...], tuple[tuple[LadderRung, ...], ...]] = {}
        """The ladders by the kind of an ask, which is its combination of names and usage."""

    def charges(self, ask: Ask) -> list[Charge]:
        """The buckets that an ask charges, in the order that breaks ties; its ids are not hashed yet."""
        principal, client_id, ip, broker, listener = names = (
            ask.principal,
            ask.client_id,
            ask.ip,
            ask.broker,
            ask.listener,
        )
        usage = ask.usage
        has = (
            principal is None,
            client_id is None,
            ip and ":" in ip,
            broker is None,
            listener and listener == self._between,
            ask.cluster_action,
            ask.producer_ids is None,
            frozenset(usage),
        )
        ladders = self._ladders.get(has)
        if ladders is None:
            ladders = self._ladders[has] = tuple(self._made(ask))
        charges: list[Charge] = []
        manner = manner_of(ask)
        texts: dict[int, str] = {}
        for ladder in ladders:
            for find, name, other, found, kind in ladder:  # noqa: B007  it is used behind the loop
                if find is not None:
                    found = find(  # noqa: PLW2901  it is None on these rungs
                        names[name] if other == _ONE else (names[name], names[other])
                    )
                if found is not None:
                    break
            else:
                continue
            form = found.compiled[manner] if found.compiled is not None else None
            if form is None:
                form = _compile(found, manner)
            bucket = texts.get(kind)
            if bucket is None:
                if kind < PAIR:
                    text = names[kind] or ""  # few names need the function
                    bucket = f"{_PREFIXES[kind]}{text if is_unreserved(text) else spell(text)}"
                else:
                    bucket = self._bucket(kind, names, texts)
                texts[kind] = bucket
            owner = texts[USER] if kind == PAIR else bucket
            if form.is_by_broker and broker is not None and kind not in _OF_BROKERS:
                bucket = f"{bucket};broker={spell(broker)}"
            if len(bucket) > LONGEST_NAME:  # then the key has a hash
                key = bucket_key(AppliedQuota(form.quota, form.entity, bucket, owner))
            else:
                key = f"{form.head}{owner}{form.middle}{bucket}{form.tail}".encode()
            amount = len(ids_of(ask)) if form.counts_ids else usage[form.field] / form.per_unit
            charges.append(Charge(form, owner, bucket, key, amount))
        return charges

    def _bucket(self, kind: int, names: Sequence[str | None], texts: dict[int, str]) -> str:
        """The name of a bucket of two names or of a network; a pair also adds its user to ``texts``."""
        if kind == PAIR:
            user = texts.get(USER)
            if user is None:
                user = texts[USER] = f"user={spell(names[0] or '')}"
            return f"{user},client-id={spell(names[1] or '')}"
        if kind == BROKER_PAIR:
            return f"broker={spell(names[3] or '')},listener={spell(names[4] or '')}"
        return f"ip={spell(network_of(names[2] or '', self._rules.ipv6_prefix))}"

    def _made(self, ask: Ask) -> Iterator[tuple[LadderRung, ...]]:
        """Make the ladders of all asks of this kind."""
        is_ipv6 = ask.ip is not None and ":" in ask.ip
        for key in KEYS.values():
            if asks_for(key, ask):
                for rungs in ladders_of(key.name, ask, self._rules):
                    if ladder := tuple(self._set_rungs(key.name, rungs, is_ipv6=is_ipv6)):
                        yield ladder

    def _set_rungs(
        self, key: str, rungs: Iterator[tuple[Entity, Entity]], *, is_ipv6: bool
    ) -> Iterator[LadderRung]:
        """The rungs of a ladder on which quotas are set, as far as the first default."""
        for entity, bucket in rungs:
            rung, names = rung_of(entity)
            found = self.rungs.get((key, rung))
            if not found:
                continue
            kind = _KINDS[bucket.types]
            if names is None:
                yield LadderRung(None, 0, _ONE, found[None], NETWORK if kind == ADDRESS and is_ipv6 else kind)
                return
            name, *others = [TYPES.index(type_) for type_, each in entity.parts if isinstance(each, str)]
            yield LadderRung(found.get, name, others[0] if others else _ONE, None, kind)


def charge_of(applied: AppliedQuota, ask: Ask) -> Charge:
    """The charge of an ask to one bucket, if the quota was found without the tables."""
    form = compiled(applied.quota, applied.entity, manner_of(ask))
    amount = len(ids_of(ask)) if form.counts_ids else ask.usage[form.field] / form.per_unit
    return Charge(form, applied.owner, applied.bucket, bucket_key(applied), amount)


def compiled_again(charge: Charge, quota: Quota, manner: int) -> Charge:
    """A charge to the same bucket under another quota, or for another manner of asks."""
    return structs.replace(charge, compiled=compiled(quota, charge.entity, manner))


def manner_of(ask: Ask) -> int:
    """How an ask is decided, in the bits of ``app.store.compiled_quota``."""
    manner = DENY if ask.deny else 0
    if ask.mode == "record":
        manner |= RECORDS
    return manner | RECHECK if ask.recheck else manner


def _compile(found: SetQuota, manner: int) -> CompiledQuota:
    """Compile a quota for a manner of asks, and keep the result with the quota."""
    if found.compiled is None:
        found.compiled = [None] * MANNERS
    form = found.compiled[manner] = compiled(found.quota, str(found.entity), manner)
    return form
