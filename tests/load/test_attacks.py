"""Attacks by one caller, each of which once slowed others down: three other callers must not notice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from tests.load.attacked import ATTACKER, NOBODY, OTHERS, Attack, Site, asking, attacked
from tests.proofs import print_table

QUICK_S: Final = 2.0
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
"""The attacks that use a key in the quick tests; the others come without one, from an open network."""


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with attacked() as site:
        yield site


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_does_not_slow_other_callers(site, name):
    key = ATTACKER if name in BY_KEY else NOBODY
    site.check_others(name, QUICK_S, site.attack(ATTACKS[name], QUICK_S, key))


def test_flood_of_one_principal_does_not_slow_others_behind_one_gateway(site):
    """For the node they are all one caller, with the gateway's key and address."""
    gateway = OTHERS[0]
    flood = site.attack(Attack(asking(), connections=256), QUICK_S, gateway, source=gateway)
    site.check_others("one principal", QUICK_S, flood, keys=[gateway] * len(OTHERS))


@pytest.fixture(scope="module")
def rows() -> Iterator[list[tuple[object, ...]]]:
    """The rows of the proof's table, written after the last attack."""
    lines: list[tuple[object, ...]] = []
    yield lines
    if len(lines) == 2 * len(ATTACKS):
        columns = ("attack", "key", "others alone, ms", "during it, ms", "answers to it", "503")
        print_table("Others during an attack", "make prove T=tests/load", columns, lines)


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("key", [ATTACKER, NOBODY], ids=["with a key", "without one"])
@pytest.mark.parametrize("name", ATTACKS)
def test_long_attack_does_not_slow_other_callers(site, rows, name, key):
    came = site.check_others(name, LONG_S, site.attack(ATTACKS[name], LONG_S, key))
    (attack,) = came.attack
    waits = (f"{came.calm_ms:.1f}", f"{came.attacked_ms:.1f}")
    rows.append((name, "yes" if key else "no", *waits, f"{len(attack.waits_ms):,}", f"{attack.shed:,}"))
