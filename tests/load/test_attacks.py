"""What one hostile caller may send, and three others do not feel: the attacks that worked, done again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.load.attacked import ATTACKER, NOBODY, OTHERS, Attack, Site, asking, attacked
from tests.proofs import found

QUICK_S: Final = 4.0
LONG_S: Final = 30.0
NEW: Final = '{"principal":"new-$n","usage":{"producer_ids":["$n"]}}'
LONG_NAMES: Final = asking(principal=f"{'n' * 490}$n")
ATTACKS: Final = {
    "512 connections of asks": Attack(asking(principal="hostile-$c"), connections=512),
    "asks that look at 1,000 ids": Attack(asking(1_000, mode="peek"), connections=8),
    "batches with 10,000 ids": Attack(asking(1_000), batch=10, connections=4),
    "batches of 1,000 asks": Attack(asking(), batch=1_000, connections=4),
    "batches of 1,000 unknown callers with long names": Attack(LONG_NAMES, batch=1_000, connections=4),
    "100 new principals a second": Attack(NEW, batch=100, pause_s=1.0),
    "30 scrapes at once": Attack(path="/metrics", connections=30),
    "the OpenAPI document on 100 connections": Attack(path="/openapi.json", connections=100),
}
BY_KEY: Final = frozenset(list(ATTACKS)[::2])
"""Those that come with a key in the quick tests; the rest come without one, from an open network."""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with attacked() as site:
        yield site


@pytest.mark.parametrize("name", ATTACKS)
def test_others_do_not_feel_an_attack(site, name):
    key = ATTACKER if name in BY_KEY else NOBODY
    site.held(name, QUICK_S, site.attack(ATTACKS[name], QUICK_S, key))


def test_others_behind_one_gateway_do_not_feel_one_principals_flood(site):
    """To the node all of them are one caller, with the gateway's key and address."""
    gateway = OTHERS[0]
    flood = site.attack(Attack(asking(), connections=256), QUICK_S, gateway, source=gateway)
    site.held("one principal", QUICK_S, flood, keys=[gateway] * len(OTHERS))


@pytest.fixture(scope="module")
def rows() -> Iterator[list[tuple[object, ...]]]:
    """The lines of the proof's table, written when all attacks are over."""
    lines: list[tuple[object, ...]] = []
    yield lines
    if len(lines) == 2 * len(ATTACKS):
        columns = ("attack", "key", "others alone, ms", "beside it, ms", "answers to it", "503")
        found("hold", "Attacks", "make prove T=tests/load", columns, lines)


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("key", [ATTACKER, NOBODY], ids=["with a key", "without one"])
@pytest.mark.parametrize("name", ATTACKS)
def test_others_do_not_feel_a_long_attack(site, rows, name, key):
    came = site.held(name, LONG_S, site.attack(ATTACKS[name], LONG_S, key))
    (attack,) = came.attack
    waits = (f"{came.calm_ms:.1f}", f"{came.beside_ms:.1f}")
    rows.append((name, "yes" if key else "no", *waits, f"{len(attack.waits_ms):,}", f"{attack.shed:,}"))
