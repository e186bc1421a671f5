"""Large keys are extended in place: the state machine, with a script that treats small keys as large."""

from __future__ import annotations

from collections import Counter

import pytest

from app.store.script import SCRIPT
from tests.contract.machine import run
from tests.stores import running

pytestmark = pytest.mark.usefixtures("patient_connections")

THRESHOLD = "local LARGE = 4194304"
OF_IDS = (
    *("ask", "flood", "crowd", "march", "renew", "grow_in_a_full_store"),
    *("advance", "advance_far", "change_policy", "change_quota"),
)
"""The rules that make keys of ids grow; no other keys become large."""


@pytest.mark.parametrize("large", [0, 3_000])
def test_key_extended_in_place_has_the_same_content(large: int) -> None:
    assert SCRIPT.count(THRESHOLD) == 1
    script, met = SCRIPT.replace(THRESHOLD, f"local LARGE = {large}"), Counter[str]()
    with running("valkey") as url:
        while met["growth"] < 50:
            met += run(url, examples=5, steps=50, script=script, only=OF_IDS)
    assert met["layer death"] > 50
