"""A change of a quota enters the code that docs/architecture.md names, in its order."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Final

from httpx import ASGITransport, AsyncClient

from app.catalog.catalog import Catalog
from tests.http.application import KEY, app_of

ROOT: Final = Path(__file__).parents[2]
WITHOUT_FUNCTIONS: Final = {"app/catalog/tables.py"}


def documented() -> list[str]:
    """The code that the steps after the check of the key name, up to the answer: paths, some with a name."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    steps = text.partition("## A change of a quota")[2].partition("\n2. ")[2].partition("\n6. ")[0]
    named = dict.fromkeys(re.findall(r"`(app/[\w/]+\.py(?:::[\w.]+)?)`", steps))
    return [each for each in named if each not in WITHOUT_FUNCTIONS]


async def test_a_change_enters_the_documented_code_in_its_order(one_catalog: Catalog):
    entered: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(f"{ROOT}/app/"):
            entered.append(f"{file.removeprefix(f'{ROOT}/')}::{frame.f_code.co_qualname}")

    async with AsyncClient(transport=ASGITransport(app_of(one_catalog)), base_url="http://node") as http:
        sys.setprofile(note)
        try:
            answer = await http.put(
                "/v1/quotas/user=alice",
                json={"request_rate": 20},
                headers={"Authorization": f"Bearer {KEY}"},
            )
        finally:
            sys.setprofile(None)
    assert answer.status_code == 201, answer.text
    places = {
        name: next((at for at, each in enumerate(entered) if each.startswith(name)), -1)
        for name in documented()
    }
    assert len(places) > 8
    assert [name for name, place in places.items() if place < 0] == []
    assert [f"{later} before {one}" for one, later in pairwise(places) if places[later] < places[one]] == []
