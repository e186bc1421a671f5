"""Answers of one iteration of the event loop are sent together, in order."""

from __future__ import annotations

import asyncio

from app.admission.metrics.metrics import Metrics
from app.http.server.hot_protocol import Outbox
from tests.http.ways import Line


async def test_answers_wait_for_the_end_of_the_iteration_and_keep_their_order() -> None:
    outbox, lines = Outbox(Metrics().count_unsent_answer), [Line(), Line()]
    loop = asyncio.get_running_loop()
    for line in lines:
        outbox.add(line, b"a", loop)
        outbox.add(line, b"b", loop)
    assert [bytes(line.sent) for line in lines] == [b"", b""]
    await asyncio.sleep(0)
    assert [bytes(line.sent) for line in lines] == [b"ab", b"ab"]


async def test_what_is_sent_early_is_sent_once_and_the_next_iteration_has_its_own() -> None:
    outbox, line = Outbox(Metrics().count_unsent_answer), Line()
    loop = asyncio.get_running_loop()
    outbox.add(line, b"a", loop)
    outbox.flush()
    outbox.add(line, b"b", loop)
    assert line.sent == b"a"
    await asyncio.sleep(0)
    assert line.sent == b"ab"
    await asyncio.sleep(0)
    assert line.sent == b"ab"


class Broken(Line):
    """A transport that cannot write, and notes that it was aborted."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        raise RuntimeError("the handle is closed")

    def abort(self) -> None:
        self.has_ended = True


async def test_connection_that_fails_is_cut_and_the_others_get_their_answers() -> None:
    metrics, broken, line = Metrics(), Broken(), Line()
    outbox = Outbox(metrics.count_unsent_answer)
    loop = asyncio.get_running_loop()
    outbox.add(broken, b"a", loop)
    outbox.add(line, b"b", loop)
    outbox.flush()
    assert line.sent == b"b"
    assert broken.has_ended
    assert b"quotagate_unsent_answers_total 1.0" in await metrics.text()
