"""Forms of asks: they give the matches that the readable rule finds, and are bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from app.admission import forms
from app.admission.forms import Forms
from app.admission.generations import Sightings
from app.admission.plan import Match, matches_of
from app.domain.ask import AMOUNTS, COUNTS, Ask
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import KEYS, Quota, Scope
from tests.planted import planted

TEXTS = ("a", "b", "user", "*", "a,b", "%000", "%001", "~0", "ü" * 30, "x" * 118, "x" * 130, "%s", "")
NAMES = tuple(text for text in TEXTS if text)
IPS = ("10.0.0.7", "10.0.0.8", "2001:db8::1", "2001:db8::2", "2001:db8:0:1::", "::1")
USAGE = COUNTS + AMOUNTS
FIELDS: dict[str, Callable[[Random], object]] = {
    "usage": lambda random: dict.fromkeys(random.sample(USAGE, random.randint(0, 3)), 1.0),
    "producer_ids": lambda random: random.choice([None, (), (7, "seven")]),
    "principal": lambda random: random.choice([None, *NAMES]),
    "client_id": lambda random: random.choice([None, *TEXTS]),
    "ip": lambda random: random.choice([None, *IPS]),
    "broker": lambda random: random.choice([None, *NAMES]),
    "listener": lambda random: random.choice([None, *NAMES]),
    "deny": lambda random: random.random() < 0.5,
    "cluster_action": lambda random: random.random() < 0.2,
}


def some_asks(random: Random) -> list[Ask]:
    """Some asks, each of which differs a little from the one before."""
    fields = {name: make(random) for name, make in FIELDS.items()}
    asks = []
    for _ in range(6):
        asks.append(Ask(**fields))  # type: ignore[arg-type]
        for name in random.sample([*FIELDS], random.randint(1, 2)):
            fields[name] = FIELDS[name](random)
    return asks


def some_quotas(random: Random) -> dict[str, dict[Entity, Quota]]:
    """Quotas on defaults and names, of few keys, so that they meet the asks."""
    made: dict[str, dict[Entity, Quota]] = {}
    for key in random.sample([*KEYS.values()], random.randint(1, 3)):
        for types in random.choices(key.entities, k=random.randint(1, 5)):
            either = {type_: IPS if type_ == "ip" else NAMES for type_ in types}
            is_pair = types == ("broker", "listener")  # of which there is no default
            entity = Entity(
                tuple(
                    (type_, ANY if random.random() < 0.5 and not is_pair else random.choice(names))
                    for type_, names in either.items()
                )
            )
            scope: Scope = random.choice(["cluster", "broker"])
            made.setdefault(key.name, {})[entity] = Quota(
                key.name, 5, key.algorithm, key.enforcement, scope=scope, epoch=random.randint(0, 2)
            )
    return made


def some_rules(random: Random) -> MatchingRules:
    return MatchingRules(random.choice([None, *NAMES]), random.choice([1, 48, 64, 128]))


def difference(
    its: dict[str, dict[Entity, Quota]], rules: MatchingRules, asks: list[Ask], met: Counter[str]
) -> str | None:
    """What the forms find wrongly; None if they find what the rule finds, each time that an ask comes."""
    made: Forms[tuple[bool, list[Quota]]] = forms.Forms(its, rules, _common)
    for ask in (*asks, *asks, *reversed(asks)):
        right = matches_of(ask, its, rules)
        found = made.of(ask)
        met["matches"] += len(right)
        met["no form yet"] += found is None
        if found is None:
            continue
        met["matches of a form"] += len(right)
        met["named"] += any("*" not in match.applied.entity for match in right)
        met["networks"] += any("%2F" in match.applied.bucket for match in right)
        met["hashed"] += any(b"#" in match.key for match in right)
        met["pairs"] += any(match.applied.owner != match.applied.bucket for match in right)
        met["at brokers"] += any(";" in match.applied.bucket for match in right)
        matches, common = found
        if matches != right or any(
            own.applied.quota is not its.applied.quota for own, its in zip(matches, right, strict=True)
        ):
            return f"{ask}\nform: {matches}\nrule: {right}"
        if common != _common(ask, right):
            return f"{ask}\nform: {common}\nrule: {right}"
    return None


def _common(ask: Ask, matches: tuple[Match, ...]) -> tuple[bool, list[Quota]]:
    return ask.deny, [match.applied.quota for match in matches]


def search(cases: int) -> tuple[str | None, Counter[str]]:
    """Compare forms and rule for random quotas and asks, up to the first difference."""
    met: Counter[str] = Counter()
    for seed in range(cases):
        random = Random(seed)
        wrong = difference(some_quotas(random), some_rules(random), some_asks(random), met)
        if wrong is not None:
            return wrong, met
    return None, met


def test_a_form_finds_what_the_rule_finds() -> None:
    wrong, met = search(1_500)
    assert wrong is None
    for event in ("matches of a form", "named", "networks", "hashed", "pairs", "at brokers"):
        assert met[event] > 100, met


FAULTS = {
    "no look-up before the defaults": ("lookups.append(", "list[Lookup]().append("),
    "a name that is not spelled": ('[spell(names[place] or "")', '[(names[place] or "")'),
    "a long name in full": ("if len(bucket) > LONGEST_NAME:", "if len(bucket) > 2 * LONGEST_NAME:"),
    "the address for its network": ('f"ip={_BLANKS[_NETWORK]}"', 'f"ip={_BLANKS[2]}"'),
    "the bucket for its owner": (
        "bucket, owner = texts[in_bucket], texts[in_owner]",
        "bucket = owner = texts[in_bucket]",
    ),
    "deny left out": ("            ask.deny,\n            ask.cl", "            ask.cl"),
    "cluster action left out": ("            ask.cluster_action,\n            *", "            *"),
    "ids left out": ("            ask.producer_ids is None,\n", ""),
    "usage left out": ("            *ask.usage,\n", ""),
    "the listener between brokers left out": ('(listener == self._between and "between brokers")', "False"),
    "kinds of addresses mixed up": ('(":" in ip and "IPv6")', "False"),
    "quotas mixed up": ("which = (fields, *map(id, found))", "which = fields"),
}
"""What is right in forms, and what is wrong."""


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "Forms", planted(forms, *FAULTS[fault])["Forms"])
    found, _ = search(3_000)
    assert found is not None


EVERYONE = Entity.of(user=ANY)
RATE = Quota("request_rate", 5, "sampled_rate", "delay")


def test_callers_without_quotas_of_their_own_share_one_form() -> None:
    made = Forms({"request_rate": {EVERYONE: RATE}}, MatchingRules(), _common)
    for n in range(100):
        assert made.of(Ask({"requests": 1}, principal=f"{n}")) is not None
    assert len(made) == 1


def test_quota_of_one_caller_gets_a_variant_when_it_is_found_again() -> None:
    alice = Entity.of(user="alice")
    made = Forms({"request_rate": {EVERYONE: RATE, alice: replace(RATE, limit=7)}}, MatchingRules(), _common)
    ask = Ask({"requests": 1}, principal="alice")
    assert made.of(ask) is None
    assert made.of(ask) is not None
    assert made.of(ask) is not None
    assert len(made) == 2


def test_forms_are_bounded() -> None:
    named = {Entity.of(user=f"{n}"): replace(RATE, limit=n) for n in range(1_000)}
    made = Forms({"request_rate": {EVERYONE: RATE, **named}}, MatchingRules(), _common, 100_000)
    for n in range(1_000):
        ask = Ask({"requests": 1}, principal=f"{n}")
        made.of(ask)
        made.of(ask)
        fields = [usage for bit, usage in enumerate(COUNTS + AMOUNTS) if n >> bit & 1]
        made.of(Ask(dict.fromkeys(fields, 1), broker="1" if n >> 7 & 1 else None))
    assert 5 < len(made) < 60


@pytest.mark.parametrize("varies", ["who asks", "what is asked"])
def test_where_more_is_in_use_than_fits_few_are_made(varies: str) -> None:
    """Each would be pushed out before it is used again; a caller can bring that about by itself."""
    made: list[Ask] = []

    def common(ask: Ask, _: tuple[Match, ...]) -> bool:
        made.append(ask)
        return True

    named = {Entity.of(user=f"{n}"): replace(RATE, limit=n) for n in range(100)}
    of = Forms({"request_rate": {EVERYONE: RATE, **named}}, MatchingRules(), common, 100_000)
    if varies == "who asks":
        asks = [Ask({"requests": 1}, principal=f"{n}") for n in range(100)]
    else:
        fields = [usage for usage in COUNTS + AMOUNTS if usage != "requests"]
        chosen = [
            [field for bit, field in enumerate(fields) if n >> bit & 1] for n in range(2 ** len(fields))
        ]
        asks = [Ask(dict.fromkeys(["requests", *few], 1)) for few in chosen]
    for _ in range(5):
        for ask in asks:
            of.of(ask)
    made.clear()
    for ask in asks * 16:
        of.of(ask)
    assert 0 < len(made) <= 2 * len(asks)


def test_what_has_nothing_in_common_gets_no_matches() -> None:
    """As with shadow quotas, which plain asks do not have."""
    of: Forms[bool] = Forms({"request_rate": {EVERYONE: RATE}}, MatchingRules(), lambda _, __: False)
    assert of.of(Ask({"requests": 1}, principal="alice")) is None


def test_few_keys_are_taken_for_others_and_the_latest_are_remembered() -> None:
    seen = Sightings()
    assert sum(seen.again(("first", n)) for n in range(10_000)) < 20
    assert sum(seen.again(("first", n)) for n in range(10_000)) > 8_000
