"""Finds the quotas that apply to a caller of a log: ``app.domain.ladder``, for all keys at once."""

from __future__ import annotations

from itertools import chain
from operator import itemgetter
from typing import Final, NamedTuple

from app.domain.entity import Entity
from app.domain.ladder import AppliedQuota, MatchingRules, Quotas, applied_on, asks_for, ladders_of
from app.domain.quota import KEYS, MAX_CONNECTION_CREATION_RATE, REQUEST_RATE
from workers.jobs.whatif.quota_form import QuotaForms
from workers.jobs.whatif.rows import LoggedCaller

WIDEST: Final = (REQUEST_RATE, MAX_CONNECTION_CREATION_RATE)
"""Two keys whose ladders together are the ladders of all keys."""


class Match(NamedTuple):
    """A quota that applies to a caller."""

    applied: AppliedQuota
    forms: QuotaForms


class QuotaMatcher:
    """Finds the quotas that apply to callers. Each ladder is climbed once, since its rungs have no key."""

    def __init__(self, quotas: Quotas, rules: MatchingRules) -> None:
        self._rules = rules
        self._set_on: dict[Entity, list[tuple[int, QuotaForms]]] = {}
        """The quotas of each entity, with the places of their keys among all keys."""
        for place, key in enumerate(KEYS):
            for entity, quota in quotas.get(key, {}).items():
                self._set_on.setdefault(entity, []).append((place, QuotaForms(quota)))

    def matches(self, caller: LoggedCaller) -> list[Match]:
        """The quotas that apply to a caller's asks, in the order that breaks ties."""
        ask = caller.ask()
        ladders = chain.from_iterable(ladders_of(key, ask, self._rules) for key in WIDEST)
        found: list[tuple[int, int, Match]] = []
        for ladder, rungs in enumerate(ladders):
            matched = set()
            for entity, bucket in rungs:
                for place, forms in self._set_on.get(entity, ()):
                    if place not in matched and asks_for(KEYS[forms.quota.key], ask):
                        matched.add(place)
                        applied = applied_on(forms.quota, entity, bucket, ask)
                        found.append((place, ladder, Match(applied, forms)))
        found.sort(key=itemgetter(0, 1))
        return [match for _, _, match in found]
