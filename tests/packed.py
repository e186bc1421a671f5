"""Answers in the script's binary format, for fake stores."""

from __future__ import annotations

import struct

from msgspec import structs

from app.store.encoding import decode_answer, packed_results
from app.store.port import Answer


def packed(answer: Answer, *, brief: bool = False) -> Answer:
    """Return an answer with its bytes in the script's format; `brief` only if it admits and counts no ids.

    The results stay as they are: without a plan, the bytes do not say of which kind they are.
    """
    if brief:
        content = b"\3" + b"".join(
            struct.pack("<dd", result.observed, result.remaining) for result in answer.results
        )
    elif answer.error is not None:
        content = b"\2" + str(answer.error).encode()
    else:
        content = packed_results(answer.results)
        if answer.kept is not None:
            content = b"\1" + struct.pack("<H", len(answer.kept)) + answer.kept + content[1:]
    decoded = decode_answer(content, None, answer.at_ms, answer.order, answer.id_outcomes)
    return decoded if decoded.error is not None else structs.replace(decoded, results=answer.results)
