"""Fair turns: no waiting caller is starved."""

from __future__ import annotations

from app.admission.gathering.fair_turns import FairTurns


def test_waiting_caller_is_not_starved_by_newcomers():
    """Each newcomer has one waiting item, and comes again as soon as the item was served."""
    turns: FairTurns[list[int]] = FairTurns(list)
    turns.of("waits").extend(range(10))
    for n in range(8):
        turns.of(f"new {n}").append(n)
    served: list[str] = []
    while "waits" in turns._waiting and len(served) < 1_000:
        name, waiting = turns.first()
        served.append(name)
        waiting.pop(0)
        turns.charge(1.0, is_left=bool(waiting))
        if name != "waits":
            turns.of(name).append(0)
    assert 80 <= len(served) <= 100, "one turn in nine, like everybody else"
