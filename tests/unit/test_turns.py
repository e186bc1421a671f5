"""Fair turns: nobody who waits is passed for ever."""

from __future__ import annotations

from app.admission.turns import Turns


def test_who_has_waited_is_not_passed_by_ever_new_ones():
    """Each of the new has one thing waiting, and comes again as soon as that was done."""
    turns: Turns[list[int]] = Turns(list)
    turns.of("waits").extend(range(10))
    for n in range(8):
        turns.of(f"new {n}").append(n)
    served: list[str] = []
    while "waits" in turns._waiting and len(served) < 1_000:
        who, waiting = turns.first()
        served.append(who)
        waiting.pop(0)
        turns.took(1.0, is_left=bool(waiting))
        if who != "waits":
            turns.of(who).append(0)
    assert 80 <= len(served) <= 100, "one turn in nine, as for everybody"
