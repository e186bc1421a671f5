"""The queue: the weight of a turn of a caller's principal."""

from __future__ import annotations

from app.admission.gathering.queue import Group, Queue
from app.store.port import Plan


def group(name: str) -> Group:
    plans = [Plan("admit", (), context=name.encode())]
    return Group.of(plans, lambda _group, _failure: None, on_behalf_of=name)


async def test_ids_weigh_as_much_as_asks_among_the_principals_of_a_caller():
    queue = Queue()
    for name in ("ids", "asks"):
        for _ in range(8):
            queue.add(group(name))
    served = []
    while queue.asks > 6:
        first = queue.first()
        first.sent = 1
        served.append(first.on_behalf_of)
        queue.charge(1, 3 if first.on_behalf_of == "ids" else 0)
    assert served.count("asks") == 4 * served.count("ids")
