"""The step of an acceptor after each answer, according to KIP-612, and the invalid answers."""

from __future__ import annotations

import pytest

from examples.connections.proxy import Step, next_step, shed_step


@pytest.mark.parametrize(
    ("decision", "throttle_ms", "rechecked", "step"),
    [
        ("admit", 0, False, Step("pipe", "admitted")),
        ("admit", 0, True, Step("pipe", "admitted")),
        ("delay", 250, False, Step("pipe", "delayed", 250)),
        ("delay", 60_000, True, Step("pipe", "delayed", 60_000)),
        ("throttle", 250, False, Step("hold", "throttled", 250)),
        ("throttle", 1_001, False, Step("hold", "throttled", 1_000)),
        ("throttle", 250, True, Step("close", "rejected")),
        ("reject", 0, False, Step("close", "rejected")),
        ("reject", 0, True, Step("close", "rejected")),
    ],
)
def test_each_answer_has_its_step(decision, throttle_ms, rechecked, step) -> None:
    """A delay lasts as long as the answer says, a hold at most a second, and nothing is held twice."""
    assert next_step(decision, throttle_ms, rechecked=rechecked) == step


@pytest.mark.parametrize(
    ("decision", "throttle_ms"),
    [("allow", 0), (None, 0), ("delay", -1), ("delay", 1.5), ("delay", "1"), ("throttle", None)],
)
def test_invalid_answer_is_refused(decision, throttle_ms) -> None:
    with pytest.raises(ValueError, match="is "):
        next_step(decision, throttle_ms, rechecked=False)


@pytest.mark.parametrize(
    ("retry_after", "wait_ms"), [("1", 1_000), ("3", 3_000), ("60", 3_000), (None, 1_000), ("soon", 1_000)]
)
def test_a_connection_that_was_shed_waits_once(retry_after, wait_ms) -> None:
    assert shed_step(retry_after, rechecked=False) == Step("hold", "shed", wait_ms)
    assert shed_step(retry_after, rechecked=True) == Step("close", "closed_shed")
