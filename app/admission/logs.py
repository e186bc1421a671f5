"""The port to whoever takes decisions down, and the one who takes down nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from app.admission.plan import Match
from app.domain.ask import Ask
from app.domain.decision import Decision, Verdict
from app.store.port import Answer


class Logs(Protocol):
    """Who takes decisions down; ``app.admission.decision_log`` does."""

    def decided(
        self,
        ask: Ask,
        matches: Sequence[Match],
        answer: Answer | None,
        decision: Decision,
        verdicts: Sequence[Verdict],
        failure: str | None,
    ) -> None:
        """Take a decision down; ``failure`` is why it was made without the store."""

    def late(
        self,
        ask: Ask,
        matches: Sequence[Match],
        answer: Answer,
        decision: Decision,
        verdicts: Sequence[Verdict],
    ) -> None:
        """Take down what the store decided of an ask that had been answered without it by then."""

    def refreshed(self, ask: Ask, matches: Sequence[Match], answer: Answer) -> None:
        """Take down that ids of a refused ask were refreshed."""


class Unlogged:
    """Nothing is logged."""

    def decided(self, *_: object) -> None:
        """Let a decision go."""

    def late(self, *_: object) -> None:
        """Let an answer that came late go."""

    def refreshed(self, *_: object) -> None:
        """Let a refresh go."""


UNLOGGED: Final = Unlogged()
