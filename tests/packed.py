"""Answers in the script's binary format, for fake stores."""

from __future__ import annotations

import struct

from app.domain.decision import OUTCOMES, REASONS
from app.store.encoding import decode_answer
from app.store.port import Answer, ChargeResult


def packed(answer: Answer, *, brief: bool = False) -> Answer:
    """Return an answer decoded from the script's format; `brief` fits only if it admits and counts no ids."""
    if brief:
        content = b"\3" + b"".join(
            struct.pack("<dd", result.observed, result.remaining) for result in answer.results
        )
    elif answer.error is not None:
        content = b"\2" + str(answer.error).encode()
    else:
        kept = b"\0" if answer.kept is None else b"\1" + struct.pack("<H", len(answer.kept)) + answer.kept
        content = kept + b"".join(map(_packed_result, answer.results))
    return decode_answer(content, answer.at_ms, answer.order, answer.id_outcomes)


def _packed_result(result: ChargeResult) -> bytes:
    return struct.pack(
        "<BBBdddddd",
        OUTCOMES.index(result.outcome),
        REASONS.index(result.reason),
        result.clock,
        result.throttle_ms,
        result.observed,
        result.remaining,
        result.given,
        result.remembered,
        result.fill,
    )
