"""The cache of matching quotas: how many callers it holds, and which it forgets first."""

from __future__ import annotations

import pytest

from app.admission import plan
from app.admission.plan import Matches
from app.domain.ask import Ask
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import Quota

QUOTAS = {"request_rate": {Entity.of(user=ANY): Quota("request_rate", 5, "sampled_rate", "delay")}}


def ask(name: str) -> Ask:
    return Ask({"requests": 1}, principal=name)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The principals for which the ladder was evaluated."""
    walked: list[str | None] = []
    matches_of = plan.matches_of

    def counted(asked: Ask, *given: object) -> object:
        walked.append(asked.principal)
        return matches_of(asked, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(plan, "matches_of", counted)
    return walked


def test_matches_of_a_caller_are_remembered(walks: list[str | None]):
    matches = Matches(QUOTAS, MatchingRules())
    assert matches.of(ask("alice")) is matches.of(ask("alice"))
    assert walks == ["alice"]


def test_full_cache_forgets_old_callers_and_keeps_active_ones(walks: list[str | None]):
    matches = Matches(QUOTAS, MatchingRules(), 100_000)
    for n in range(10_000):
        matches.of(ask(f"stranger {n}"))
        if n % 10 == 0:
            matches.of(ask("alice"))
    assert walks.count("alice") == 1
    assert 50 < len(matches) < 300


def test_long_names_count_by_their_length():
    small, large = Matches(QUOTAS, MatchingRules(), 1_000_000), Matches(QUOTAS, MatchingRules(), 1_000_000)
    for n in range(5_000):
        small.of(ask(f"{n}"))
        large.of(ask(f"{n}".ljust(512, "ü")))
    assert len(large) < len(small) / 3
