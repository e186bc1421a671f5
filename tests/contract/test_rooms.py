"""The files that an ask enters, from the socket to its answer, and the list of them in the documents."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

import pytest

from app.admission.admission import Admission
from app.admission.metrics.metrics import Metrics
from app.catalog.snapshot import Snapshot
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import Quota
from app.store.redis import RedisStore
from tests.fuzz.messages import BATCH, CHECK, ONE, message
from tests.http.ways import Connection, InMemory
from tests.stores import running
from tests.waiting import until

ROOT: Final = Path(__file__).parents[2]
DOCUMENT: Final = ROOT / "docs" / "architecture.md"
QUOTA: Final = Quota("request_rate", 1, "sampled_rate", "delay")
SNAPSHOT: Final = Snapshot().apply(1, [("request_rate", Entity.of(user=ANY), QUOTA)])
WARM: Final = 2
"""The number of requests before the watched one; the first one makes tables and connects."""

SOMETIMES: Final = frozenset({"Patience.now", "Patience._busy_s", "Patience._crowded_s"})
"""Listed functions that are entered only if a call takes long."""

Entered = dict[str, dict[str, None]]
"""The functions that were entered, by file, in order."""


class Kind(NamedTuple):
    """A kind of request.

    Attributes:
        request: makes a request for a user.
        answer: a part of the answer.
        most: the most files that the request may enter.
    """

    request: Callable[[str], bytes]
    answer: bytes
    most: int


def ask(user: str, amount: int = 1) -> str:
    """An ask, as JSON."""
    return f'{{"principal":"{user}","usage":{{"requests":{amount}}}}}'


KINDS: Final = {
    "admitted": Kind(lambda user: message("POST", ONE, (), ask(user).encode()), b'"admit"', 12),
    "delayed": Kind(lambda user: message("POST", ONE, (), ask(user, 10_000).encode()), b'"delay"', 16),
    "checked": Kind(
        lambda user: message("GET", CHECK, (f"X-Quotagate-Principal: {user}",), None), b"ratelimit-policy", 17
    ),
    "in a batch": Kind(
        lambda user: message("POST", BATCH, (), f'{{"asks":[{ask(user)},{ask(user)}]}}'.encode()),
        b'"decisions"',
        21,
    ),
}


async def entered_by(kind: Kind, url: str) -> Entered:
    """Send requests of a kind, and return the functions that the last one entered before its answer left."""
    store = RedisStore(url)
    await store.connect()
    admission = Admission(
        store,
        lambda: SNAPSHOT,
        rules=MatchingRules(),
        secret=lambda: bytes(32),
        sequential=False,
        budget_s=1_000.0,
        metrics=Metrics(),
    )
    connection = Connection(InMemory(hot=True, decider=admission))
    sent, entered = connection.line.sent, Entered()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and not sent and file.startswith(f"{ROOT}/app/"):
            entered.setdefault(file.removeprefix(f"{ROOT}/"), {})[frame.f_code.co_qualname] = None

    for number in range(WARM + 1):
        sent.clear()
        sys.setprofile(note if number == WARM else None)
        try:
            connection.protocol.data_received(kind.request(f"user-{number}"))
            await until(lambda: bool(sent), every_s=0.001)
        finally:
            sys.setprofile(None)
        assert kind.answer in sent
    await connection.settle()
    connection.end()
    await store.close()
    return entered


@pytest.mark.parametrize("name", KINDS)
def test_an_ask_enters_few_files(name: str) -> None:
    kind = KINDS[name]
    with running("valkey") as url:
        entered = asyncio.run(entered_by(kind, url))
    assert len(entered) <= kind.most, "\n".join(entered)
    if name == "admitted":
        listed = documented()
        assert list(entered) == list(listed)
        for file, names in entered.items():
            named = {each for each in names if "<" not in each}
            assert named <= listed[file] <= named | SOMETIMES, file


def documented() -> dict[str, set[str]]:
    """The list in the documents: the named functions of each file."""
    rows = re.findall(
        r"^\| `(app/[a-z_/]+\.py)` \| (`.*`) \|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE
    )
    return {file: set(re.findall(r"`([^`]+)`", names)) for file, names in rows}
