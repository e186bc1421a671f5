"""Forms of asks: the matches of all asks with the same fields, worked out once, with blanks for their names.

Which quotas apply to an ask, and which buckets they charge, depends on which fields the ask has, and on which
of its names quotas are set. Most quotas are set on defaults, so callers that are otherwise alike have matches
that differ only in names. ``matches_of`` finds these matches for a made-up ask, once; for any other ask with
the same fields the names in them are replaced. So this file has no rules of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Any, Final, Generic, NamedTuple, TypeVar

from app.admission.generations import Generations, Sightings
from app.admission.plan import Match, matches_of
from app.domain.ask import Ask
from app.domain.entity import ANY, TYPES, Entity, network_of, spell
from app.domain.ladder import AppliedQuota, MatchingRules, Quotas, ladders_of
from app.domain.quota import Quota
from app.store.keys import LONGEST_NAME, bucket_key

T = TypeVar("T")
Names = tuple[str | None, ...]

FORMS_BYTES: Final = 4 * 1024 * 1024
"""The memory for forms."""

MISSES: Final = 16
"""Once a cache has been full, a form or variant is made at every 16th miss: where more are in use than fit,
each would be pushed out before it is used again, and making one takes several times as long as the rule."""

FORM_BYTES: Final = 2_000
MATCH_BYTES: Final = 1_500
"""Estimated size of a form or a variant of it, and of each of its look-ups and matches."""

_NETWORK: Final = len(TYPES)
_NAMES: Final = tuple(f"\0{place}" for place in range(_NETWORK))
"""The made-up names, in the order of ``TYPES``; no real name has a control character."""
_BLANKS: Final = tuple(f"%00{place}" for place in range(_NETWORK + 1))
"""These names as they are spelled, and the network."""
_BLANK: Final = re.compile("%00([0-9])")
_IPV6: Final = "2001:db8::1"
"""The made-up address of an ask that has an IPv6 address."""

_DEFAULTS: Final = tuple((type_, ANY) for type_ in TYPES)
names_of: Final[Callable[[Ask], Names]] = attrgetter("principal", "client_id", "ip", "broker", "listener")
"""Returns the names of an ask, in the order of ``TYPES``."""
_network_of: Final = lru_cache(4096)(network_of)

Choose = Callable[[Any], Any]
"""Chooses from a list: parts of an entity, or the names for the blanks of a text, as ``%`` takes them."""


class Text(NamedTuple):
    """A text with blanks, and what chooses the names for them; that is None without any."""

    text: str
    choose: Choose | None


class MatchForm(NamedTuple):
    """A match with blanks.

    Attributes:
        entity, bucket, owner: as in an ``AppliedQuota``; each is the place of a text.
        head, middle, tail: the key, around owner and bucket.
    """

    quota: Quota
    entity: int
    bucket: int
    owner: int
    head: str
    middle: str
    tail: str


class Variant(NamedTuple, Generic[T]):
    """The matches of asks that have the same fields and the same quotas.

    Attributes:
        names: the places of the names that the blanks take.
        texts: of the matches, each once.
        common: what was made for all these asks.
    """

    names: tuple[int, ...]
    texts: tuple[Text, ...]
    matches: tuple[MatchForm, ...]
    common: T


class Form(NamedTuple, Generic[T]):
    """Asks with the same fields.

    Attributes:
        made_up: one of them; its names are the blanks.
        lookups: where quotas set on names may be that go before the defaults.
        defaults: the quotas set on defaults that may apply.
        variant: of the asks for which nothing is found by the look-ups.
    """

    made_up: Ask
    lookups: tuple[Lookup, ...]
    defaults: Mapping[str, Mapping[Entity, Quota]]
    variant: Variant[T]


class Lookup(NamedTuple):
    """A look-up of a quota by names.

    Attributes:
        get: returns the quota of an entity, or None.
        choose: chooses the parts of the entity.
        entity: the one of the made-up ask.
    """

    get: Callable[[Any], Quota | None]
    choose: Choose
    entity: Entity


class Forms(Generic[T]):
    """The forms of asks under the quotas of one snapshot.

    Args:
        common: makes what the asks of a variant have in common, for a made-up one and its matches.
        most_bytes: the memory for forms and variants.
    """

    def __init__(
        self,
        quotas: Quotas,
        rules: MatchingRules,
        common: Callable[[Ask, tuple[Match, ...]], T],
        most_bytes: int = FORMS_BYTES,
    ) -> None:
        self._quotas = quotas
        self._rules = rules
        self._between = rules.inter_broker_listener
        self._common = common
        self._forms: Generations[tuple[object, ...], Form[T]] = Generations(most_bytes // 2)
        self._variants: Generations[tuple[object, ...], Variant[T]] = Generations(most_bytes // 2)
        self._found = Sightings()
        self._misses = 0

    def __len__(self) -> int:
        return len(self._forms) + len(self._variants)

    def of(self, ask: Ask) -> tuple[tuple[Match, ...], T] | None:
        """Return the matches of an ask, and what it has in common with asks alike.

        None if it has no form yet, or what it has in common is False.
        """
        principal, client_id, ip, broker, listener = names = names_of(ask)
        fields = (
            principal is None,
            client_id is None,
            broker is None,
            ip is None or (":" in ip and "IPv6"),
            listener is None or (listener == self._between and "between brokers"),
            ask.producer_ids is None,
            ask.deny,
            ask.cluster_action,
            *ask.usage,
        )
        form = self._forms.get(fields)
        if form is None:
            if not self._is_worth_making(self._forms):
                return None
            form = self._made(ask)
            self._forms.add(
                fields, form, FORM_BYTES + MATCH_BYTES * (len(form.lookups) + _size(form.variant))
            )
        variant = form.variant
        if form.lookups:
            parts = (
                ("user", principal),
                ("client-id", client_id),
                ("ip", ip),
                ("broker", broker),
                ("listener", listener),
                *_DEFAULTS,
            )
            found = [get((choose(parts),)) for get, choose, _ in form.lookups]
            if any(found):
                its = self._variant(fields, form, found)
                if its is None:
                    return None
                variant = its
        return None if variant.common is False else (_filled(variant, names, self._rules), variant.common)

    def _is_worth_making(self, cache: Generations[Any, Any]) -> bool:
        """Return whether to make what the cache does not have."""
        self._misses += 1
        return not cache.has_forgotten or self._misses % MISSES == 0

    def _variant(
        self, fields: tuple[object, ...], form: Form[T], found: list[Quota | None]
    ) -> Variant[T] | None:
        """Return the variant for what was found by the look-ups; None if none is worth making yet."""
        # The quotas live as long as the snapshot, so no other quota gets the id of one of them.
        which = (fields, *map(id, found))
        variant = self._variants.get(which)
        if variant is None and self._found.again(which) and self._is_worth_making(self._variants):
            quotas = {key: dict(entities) for key, entities in form.defaults.items()}
            for lookup, quota in zip(form.lookups, found, strict=True):
                if quota is not None:
                    quotas.setdefault(quota.key, {})[lookup.entity] = quota
            variant = self._variant_of(form.made_up, quotas)
            self._variants.add(which, variant, FORM_BYTES + MATCH_BYTES * _size(variant))
        return variant

    def _made(self, ask: Ask) -> Form[T]:
        """Return the form of an ask."""
        made_up = _made_up(ask, self._rules)
        lookups = []
        defaults: dict[str, dict[Entity, Quota]] = {}
        for entities, rungs in ladders_of(made_up, self._quotas, self._rules):
            for entity, _ in rungs:
                if all(name is ANY for _, name in entity.parts):
                    quota = entities.get(entity)
                    if quota is not None:
                        defaults.setdefault(quota.key, {})[entity] = quota
                        break
                else:
                    lookups.append(Lookup(entities.get, _chooser(entity), entity))
        return Form(made_up, tuple(lookups), defaults, self._variant_of(made_up, defaults))

    def _variant_of(self, made_up: Ask, quotas: Quotas) -> Variant[T]:
        matches = matches_of(made_up, quotas, self._rules)
        named = [_replaced(match.applied, made_up, self._rules) for match in matches]
        texts = [*dict.fromkeys(text for each in named for text in each)]
        names = sorted({int(place) for text in texts for place in _BLANK.findall(text)})
        forms = []
        for match, each in zip(matches, named, strict=True):
            entity, bucket, owner = map(texts.index, each)
            quota = match.applied.quota
            forms.append(MatchForm(quota, entity, bucket, owner, *_around(quota)))
        blank = tuple(_blanked(text, names) for text in texts)
        return Variant(tuple(names), blank, tuple(forms), self._common(made_up, matches))


def _size(variant: Variant[T]) -> int:
    return len(variant.matches)


def _made_up(ask: Ask, rules: MatchingRules) -> Ask:
    """Return an ask with the same fields, whose names are blanks."""
    principal, client_id, ip, broker, listener = (
        None if name is None else made_up for name, made_up in zip(names_of(ask), _NAMES, strict=True)
    )
    if ask.ip is not None and ":" in ask.ip:
        ip = _IPV6
    if ask.listener is not None and ask.listener == rules.inter_broker_listener:
        listener = ask.listener
    return Ask(
        dict.fromkeys(ask.usage, 1.0),
        None if ask.producer_ids is None else (0,),
        principal,
        client_id,
        ip,
        broker,
        listener,
        deny=ask.deny,
        cluster_action=ask.cluster_action,
    )


def _chooser(entity: Entity) -> Choose:
    """Return the function that chooses the parts of an entity from those of an ask, then the defaults."""
    places = [TYPES.index(type_) + len(TYPES) * (name is ANY) for type_, name in entity.parts]
    return itemgetter(slice(places[0], places[0] + 1)) if len(places) == 1 else itemgetter(*places)


def _replaced(applied: AppliedQuota, made_up: Ask, rules: MatchingRules) -> tuple[str, str, str]:
    """Return entity, bucket and owner with blanks also where an address or a listener is a real one."""
    entity, bucket, owner = applied.entity, applied.bucket, applied.owner
    replaced = {}
    if made_up.ip == _IPV6:  # the network first, which may contain the address
        replaced[f"ip={spell(network_of(_IPV6, rules.ipv6_prefix))}"] = f"ip={_BLANKS[_NETWORK]}"
        replaced[f"ip={spell(_IPV6)}"] = f"ip={_BLANKS[2]}"
    if made_up.listener not in (None, _NAMES[4]):
        replaced[f"listener={spell(made_up.listener or '')}"] = f"listener={_BLANKS[4]}"
    for text, blank in replaced.items():
        entity, bucket, owner = (each.replace(text, blank) for each in (entity, bucket, owner))
    return entity, bucket, owner


def _around(quota: Quota) -> tuple[str, str, str]:
    """Return what the key of a bucket has before, between and behind owner and bucket."""
    head, rest = bucket_key(AppliedQuota(quota, "", "~bucket", "~owner")).decode().split("~owner")
    middle, tail = rest.split("~bucket")
    return head, middle, tail


def _blanked(text: str, names: list[int]) -> Text:
    places = [names.index(int(place)) for place in _BLANK.findall(text)]
    return Text(_BLANK.sub("%s", text), itemgetter(*places) if places else None)


def _filled(variant: Variant[T], names: Names, rules: MatchingRules) -> tuple[Match, ...]:
    """Return the matches of a variant for these names."""
    used, blank, forms, _ = variant
    if _NETWORK in used:
        names = (*names, _network_of(names[2] or "", rules.ipv6_prefix))
    spelled = [spell(names[place] or "") for place in used]
    texts = [text if choose is None else text % choose(spelled) for text, choose in blank]
    matches = []
    for quota, in_entity, in_bucket, in_owner, head, middle, tail in forms:
        bucket, owner = texts[in_bucket], texts[in_owner]
        applied = AppliedQuota(quota, texts[in_entity], bucket, owner)
        if len(bucket) > LONGEST_NAME:  # then the key has a hash
            key = bucket_key(applied)
        else:
            key = f"{head}{owner}{middle}{bucket}{tail}".encode()
        matches.append(new_tuple(Match, (applied, key)))
    return tuple(matches)


new_tuple: Final = tuple.__new__
"""Makes a named tuple faster than its class does, which is called for every ask."""
