"""Answers in the bytes of the script, for fake stores."""

from __future__ import annotations

import struct

from app.domain.decision import OUTCOMES, REASONS
from app.store.port import Answer, ChargeResult, PackedAnswer


def packed(answer: Answer, *, brief: bool = False) -> PackedAnswer:
    """Return an answer as the script would pack it; briefly, if it admits and counts no ids."""
    if brief:
        numbers = [struct.pack("<dd", result.observed, result.remaining) for result in answer.results]
        return PackedAnswer(b"\3" + b"".join(numbers), answer.at_ms, answer.order, answer.id_outcomes)
    if answer.error is not None:
        return PackedAnswer(b"\2" + str(answer.error).encode())
    kept = b"\0" if answer.kept is None else b"\1" + struct.pack("<H", len(answer.kept)) + answer.kept
    content = kept + b"".join(map(_packed_result, answer.results))
    return PackedAnswer(content, answer.at_ms, answer.order, answer.id_outcomes)


def _packed_result(result: ChargeResult) -> bytes:
    return struct.pack(
        "<BBBdddddd",
        OUTCOMES.index(result.outcome),
        REASONS.index(result.reason),
        result.correction + 4 * result.layers,
        result.throttle_ms,
        result.observed,
        result.remaining,
        (result.given or result.open_ms) if result.largest is None else result.largest,
        result.remembered,
        result.fill,
    )
