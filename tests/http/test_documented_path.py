"""A change of a quota enters the code that docs/architecture.md names, in its order."""

from __future__ import annotations

from itertools import pairwise

from httpx import ASGITransport, AsyncClient

from app.catalog.catalog import Catalog
from tests.documented import first_entries, steps, watching
from tests.http.application import KEY, app_of


async def test_a_change_enters_the_documented_code_in_its_order(one_catalog: Catalog):
    named = [each for each in steps("A change of a quota", 2, 5) if each != "app/catalog/tables.py"]
    async with AsyncClient(transport=ASGITransport(app_of(one_catalog)), base_url="http://node") as http:
        with watching() as entered:
            answer = await http.put(
                "/v1/quotas/user=alice",
                json={"request_rate": 20},
                headers={"Authorization": f"Bearer {KEY}"},
            )
    assert answer.status_code == 201, answer.text
    places = first_entries(named, entered)
    assert len(places) > 8
    assert [name for name, place in places.items() if place < 0] == []
    assert [f"{later} before {one}" for one, later in pairwise(places) if places[later] < places[one]] == []
