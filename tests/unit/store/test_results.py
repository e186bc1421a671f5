"""A result of the script, read as the kind that its mode and its charge give it."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from app.store.encoding import decode_answer, packed_results
from app.store.port import ChargeResult, IdsResult, LeaseResult, Plan, UndoResult, UnitsResult
from tests.unit.admission.fakes import IDS, RATE, charge_to

TOO_LARGE = 2
HEAD: Any = {"observed": 1.0, "remaining": 2.0}


def read(
    mode: Any, quota: Any, *, reason: int = 0, clock: int = 0, numbers: tuple[float, ...]
) -> ChargeResult:
    """The result of a plan in which the script's last three numbers are these."""
    packed = b"\0" + struct.pack("<BBBdddddd", 0, reason, clock, 0, 1, 2, *numbers)
    (result,) = decode_answer(packed, Plan(mode, (charge_to("user=alice", quota),))).results
    return result


@pytest.mark.parametrize("mode", ["admit", "peek", "record", "refund", "refresh"])
def test_units_say_what_lapsed_and_what_was_forgiven(mode: str):
    expected = UnitsResult("admit", None, 1, lapsed=3, forgiven=4, **HEAD)
    assert read(mode, RATE, clock=1, numbers=(0, 3, 4)) == expected


@pytest.mark.parametrize(
    ("number", "fields"),
    [(500, {"open_ms": 500}), (-2, {"unseen": 2}), (0, {})],
    ids=["open", "unseen", "none"],
)
@pytest.mark.parametrize("mode", ["admit", "record", "refresh", "renew"])
def test_ids_say_how_long_their_layer_is_open_or_how_many_are_unseen(
    mode: str, number: float, fields: dict[str, int]
):
    expected = IdsResult("admit", None, 2, remembered=9, fill=0.5, layers=3, **fields, **HEAD)
    assert read(mode, IDS, clock=2 + 4 * 3, numbers=(number, 9, 0.5)) == expected


@pytest.mark.parametrize("mode", ["hold", "peek_hold", "settle"])
def test_leases_say_what_is_held_and_granted(mode: str):
    assert read(mode, RATE, numbers=(6, 3, 7)) == LeaseResult("admit", lapsed=3, held=7, granted=6, **HEAD)


def test_undo_says_what_was_given_back():
    assert read("undo", RATE, numbers=(6, 3, 4)) == UndoResult(
        "admit", lapsed=3, forgiven=4, given_back=6, **HEAD
    )


@pytest.mark.parametrize(("mode", "quota"), [("admit", RATE), ("admit", IDS), ("hold", RATE)])
def test_too_large_usage_says_the_largest_and_nothing_else_in_its_place(mode: str, quota: Any):
    result = read(mode, quota, reason=TOO_LARGE, numbers=(5, 0, 0))
    assert result == type(result)("admit", "too_large", largest=5, **HEAD)


@pytest.mark.parametrize(
    "result",
    [
        UnitsResult("delay", None, 1, 9, 5.0, 4.0, 0.0, 3.0, 2.5),
        UnitsResult("reject", "too_large", 0, 0, 5.0, 4.0, 7.0),
        IdsResult("admit", None, 2, 0, 5.0, 4.0, 0.0, 9.0, 0.5, 3, open_ms=500),
        IdsResult("throttle", None, 0, 9, 5.0, 4.0, 0.0, 9.0, 0.5, 1, unseen=2),
        IdsResult("reject", "too_large", 0, 0, 5.0, 4.0, 3.0, 9.0, 0.5, 1),
    ],
)
def test_packed_result_is_read_as_it_was(result: ChargeResult):
    quota = IDS if isinstance(result, IdsResult) else RATE
    packed = packed_results([result])
    assert decode_answer(packed, Plan("admit", (charge_to("user=alice", quota),))).results == (result,)
    (common,) = decode_answer(packed).results
    assert common == ChargeResult(*(getattr(result, name) for name in ChargeResult.__struct_fields__))
