"""Plans and answers as the packed bytes of the script; ``lua/call.lua`` describes them."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import msgpack, structs

from app.domain.ask import MODES
from app.domain.decision import OUTCOMES, REASONS
from app.domain.undo import Stamp
from app.store.compiled_quota import BETWEEN
from app.store.keys import BIRTH_KEY, reset_key, retry_key
from app.store.port import (
    SPREAD_BYTES,
    Answer,
    Charge,
    ChargeResult,
    IdsResult,
    LeaseResult,
    Plan,
    StoreCalls,
    StoreError,
    UndoResult,
    UnitsResult,
)

_CALL: Final = struct.Struct("<BBd")
_ASK: Final = struct.Struct("<BBdH")
_RESULT: Final = struct.Struct("<BBBdddddd")
_CONTEXT: Final = struct.Struct("<H")
_OUTCOMES: Final = struct.Struct("<HH")
HISTORY_BYTES: Final = 16
FULL, _KEPT, _UNREADABLE, BRIEF, STAMPED = range(5)
"""The first byte of an answer; a brief one has two numbers for each quota, and all quotas admit."""
_OTHER_SLOTS: Final = b"\xc1"
"""The first byte of a context with the results of other slots; no msgpack begins with it."""
_TOO_LARGE: Final = REASONS.index("too_large")
_LAYER: Final = 4
"""The value of one live layer in the byte that also holds the clock correction.

The shared byte leaves the length of kept answers unchanged."""
_CHARGED: Final = struct.Struct("<ddd")
_STAMP: Final = struct.Struct("<dd16s")
_LEASE: Final = struct.Struct("<16sd")
_BYTE_DELAY: Final = struct.Struct("<d")
_BRIEF: Final = struct.Struct("<dd")

ORDER_STEP: Final = 128
"""How far the order advances from call to call: by more than the asks of any call."""

_MODES: Final = {
    **{mode: number for number, mode in enumerate((*MODES, "refresh", "renew", "hold", "settle"))},
    "undo": 16,
    "peek_hold": 17,
}
_KEEPS, _STAMPED, _DELAYED = 32, 64, 128


def encode_call(
    *, caller_clock: bool, sequential: bool, logged: bool, max_ids: int, brief: bool = False
) -> bytes:
    """The first argument of a call, which applies to all its asks."""
    return _CALL.pack(caller_clock, sequential + 2 * logged + 4 * brief, max_ids)


def read_reply(reply: Sequence[Any], plans: Sequence[Plan], *, logged: bool) -> list[Answer]:
    """The answers to the first plans of a call; in a logged call each has its place in the store's order."""
    at_ms = reply[0]
    if not logged:
        return [decode_answer(packed, plan, at_ms) for plan, packed in zip(plans, reply[1:], strict=False)]
    first, found = reply[-2] * ORDER_STEP, dict(_id_outcomes(reply[-1]))
    return [
        decode_answer(packed, plan, at_ms, first + place if first else None, found.get(place, b""))
        for place, (plan, packed) in enumerate(zip(plans, reply[1:-2], strict=False))
    ]


def _id_outcomes(packed: bytes) -> Iterator[tuple[int, bytes]]:
    """The outcomes of ids, with the place of their ask."""
    at = 0
    while at < len(packed):
        place, ids = _OUTCOMES.unpack_from(packed, at)
        at += _OUTCOMES.size + ids
        yield place, packed[at - ids : at]


def encode_plan(plan: Plan, keys: list[bytes], *, clustered: bool = False) -> bytes:
    """The argument of a plan; appends the keys of the plan."""
    charges, mode, extra = plan.charges, _MODES[plan.mode], 0
    if plan.retry is not None:
        keys.append(retry_key(*plan.retry, clustered=clustered))
        extra = len(plan.context) + 1
    elif plan.mode == "renew":
        keys += (reset_key(charges[0].key), BIRTH_KEY)
        extra = len(plan.context) + 1
    if plan.keeps:
        mode += _KEEPS
    if plan.stamped:
        mode += _STAMPED
    delay = b""
    if plan.byte_delay_ms:
        mode += _DELAYED
        delay = _BYTE_DELAY.pack(plan.byte_delay_ms)
    parts = [_ASK.pack(mode, len(charges), plan.at_ms or 0, extra), delay]
    for charge in charges:
        keys.append(charge.key)
        compiled, spreads = charge.compiled, charge.spreads
        between = BETWEEN.pack(len(spreads) // SPREAD_BYTES, compiled.limit, charge.usage)
        parts += (compiled.before, between, compiled.after, spreads)
    if extra:
        parts.append(plan.context)
    if plan.lease is not None:
        parts.append(_LEASE.pack(*plan.lease))
    return b"".join(parts)


def decode_answer(
    packed: bytes,
    plan: Plan | None = None,
    at_ms: int = 0,
    order: int | None = None,
    id_outcomes: bytes = b"",
) -> Answer:
    """One answer of the script.

    Args:
        plan: its plan; without it, results have only the fields that are common to all kinds.
    """
    first = packed[0]
    if first == BRIEF:
        results: tuple[ChargeResult, ...] = tuple(
            [UnitsResult("admit", None, 0, 0, *pair) for pair in _BRIEF.iter_unpack(packed[1:])]
        )
        return Answer(results, None, None, at_ms, order, id_outcomes, True, packed)
    if first == FULL:
        results = _decode_results(packed[1:], plan)
        return Answer(results, None, None, at_ms, order, id_outcomes, _admit(results), packed)
    if first == STAMPED:
        return _stamped_answer(packed, plan, at_ms, order, id_outcomes)
    if first == _UNREADABLE:
        return Answer((), error=StoreError("response", packed[1:].decode(errors="replace")))
    (length,) = _CONTEXT.unpack_from(packed, 1)
    context, results = packed[3 : 3 + length], _decode_results(packed[3 + length :], None)
    if context[:1] == _OTHER_SLOTS:
        context, places, others = msgpack.decode(context[1:], type=tuple[bytes, list[int], bytes])
        results = _in_places(results, places, _decode_results(others, None))
    return Answer(results, context, None, at_ms, order)


def _admit(results: Iterable[ChargeResult]) -> bool:
    return all(result.outcome == "admit" and result.reason is None for result in results)


def with_other_slots(context: bytes, places: Sequence[int], results: Sequence[ChargeResult]) -> bytes:
    """The context of an answer that is kept in one slot, with the results of the other slots.

    Args:
        places: the indexes of these results in the whole answer.
    """
    packed = b"".join(map(_pack_result, results))
    return _OTHER_SLOTS + msgpack.encode((context, places, packed))


def _in_places(
    own: Sequence[ChargeResult], places: Sequence[int], others: Sequence[ChargeResult]
) -> tuple[ChargeResult, ...]:
    """All results of an answer: the others in their places, its own in the rest."""
    placed, rest = dict(zip(places, others, strict=True)), iter(own)
    return tuple(placed[place] if place in placed else next(rest) for place in range(len(own) + len(others)))


def packed_results(results: Iterable[ChargeResult]) -> bytes:
    """Results that did not come in one answer, packed as an answer of the script."""
    return bytes([FULL]) + b"".join(map(_pack_result, results))


def _pack_result(result: ChargeResult) -> bytes:
    clock, number, second, third = result.correction, result.largest, 0.0, 0.0
    if isinstance(result, IdsResult):
        clock += _LAYER * result.layers
        number = number or result.open_ms or -result.unseen
        second, third = result.remembered, result.fill
    elif isinstance(result, UnitsResult):
        second, third = result.lapsed, result.forgiven
    return _RESULT.pack(
        OUTCOMES.index(result.outcome),
        REASONS.index(result.reason),
        clock,
        result.throttle_ms,
        result.observed,
        result.remaining,
        number,
        second,
        third,
    )


def _stamped_answer(
    packed: bytes, plan: Plan | None, at_ms: int, order: int | None, id_outcomes: bytes
) -> Answer:
    quotas = (len(packed) - 1 - HISTORY_BYTES) // (_RESULT.size + _CHARGED.size)
    ends = 1 + quotas * _RESULT.size
    history = packed[-HISTORY_BYTES:]
    charged = _CHARGED.iter_unpack(packed[ends:-HISTORY_BYTES])
    stamps = tuple(Stamp(birth, charged_ms, taken, history) for birth, charged_ms, taken in charged)
    results = _decode_results(packed[1:ends], plan)
    return Answer(results, None, None, at_ms, order, id_outcomes, _admit(results), packed, stamps)


def undo_plan(charges: Iterable[tuple[Charge, Stamp]], at_ms: int | None) -> Plan | None:
    """The plan that takes charges back; None if none of them can be undone.

    Args:
        at_ms: the caller's clock; None under the store's.
    """
    undone = tuple(
        structs.replace(
            charge, usage=stamp.taken, spreads=_STAMP.pack(stamp.birth, stamp.at_ms, stamp.history)
        )
        for charge, stamp in charges
        if stamp.birth
    )
    return Plan("undo", undone, at_ms=at_ms) if undone else None


def release_plan(plan: Plan) -> Plan:
    """The plan that frees all units that a plan holds for its lease."""
    assert plan.lease is not None
    charges = tuple(structs.replace(charge, usage=0) for charge in plan.charges)
    return Plan("settle", charges, at_ms=plan.at_ms, lease=(plan.lease[0], 0))


async def answers_of(store: StoreCalls, plans: Sequence[Plan]) -> list[Answer]:
    """The answers of a call, for a caller that can wait.

    Raises:
        StoreError: no answer, or an error as the answer; a late call may still be counted.
    """
    came: asyncio.Future[list[Answer] | Exception] = asyncio.get_running_loop().create_future()
    store.ask(plans, lambda answers: None if came.done() else came.set_result(answers))
    answers = await came
    if isinstance(answers, Exception):
        raise answers
    return answers


def _decode_results(packed: bytes, plan: Plan | None) -> tuple[ChargeResult, ...]:
    kind = _common_result if plan is None else _OF_MODE.get(plan.mode)
    if kind is not None:
        return tuple([kind(*row) for row in _RESULT.iter_unpack(packed)])
    first: tuple[ChargeResult, ...] = ()
    if plan is not None and plan.charges and plan.charges[0].compiled.counts_ids:  # no other can count ids
        first = (_ids_result(*_RESULT.unpack_from(packed)),)
        packed = packed[_RESULT.size :]
    return first + tuple(
        [
            UnitsResult(OUTCOMES[outcome], REASONS[reason], clock, int(throttle_ms), *numbers)
            for outcome, reason, clock, throttle_ms, *numbers in _RESULT.iter_unpack(packed)
        ]
    )


def _ids_result(
    outcome: int,
    reason: int,
    clock: int,
    throttle_ms: float,
    observed: float,
    remaining: float,
    number: float,
    remembered: float,
    fill: float,
) -> IdsResult:
    head = OUTCOMES[outcome], REASONS[reason], clock % _LAYER, int(throttle_ms), observed, remaining
    layers = clock // _LAYER
    if reason == _TOO_LARGE:
        return IdsResult(*head, number, remembered, fill, layers)
    if number < 0:
        return IdsResult(*head, 0.0, remembered, fill, layers, 0, int(-number))
    return IdsResult(*head, 0.0, remembered, fill, layers, int(number))


def _common_result(
    outcome: int, reason: int, clock: int, throttle_ms: float, *numbers: float
) -> ChargeResult:
    observed, remaining, number, _, _ = numbers
    head = OUTCOMES[outcome], REASONS[reason], clock % _LAYER, int(throttle_ms), observed, remaining
    return ChargeResult(*head, number if reason == _TOO_LARGE else 0.0)


def _lease_result(outcome: int, reason: int, clock: int, throttle_ms: float, *numbers: float) -> LeaseResult:
    observed, remaining, number, lapsed, held = numbers
    largest, granted = (number, 0.0) if reason == _TOO_LARGE else (0.0, max(number, 0.0))
    head = OUTCOMES[outcome], REASONS[reason], clock, int(throttle_ms), observed, remaining, largest
    return LeaseResult(*head, lapsed, held=held, granted=granted)


def _undo_result(outcome: int, reason: int, clock: int, throttle_ms: float, *numbers: float) -> UndoResult:
    observed, remaining, given_back, lapsed, forgiven = numbers
    head = OUTCOMES[outcome], REASONS[reason], clock, int(throttle_ms), observed, remaining
    return UndoResult(*head, 0.0, lapsed, forgiven, given_back)


_OF_MODE: Final[Mapping[str, Callable[..., ChargeResult]]] = {
    "hold": _lease_result,
    "peek_hold": _lease_result,
    "settle": _lease_result,
    "undo": _undo_result,
}
"""The kind of all results of a mode; in other modes a result has the kind of its charge."""


def unknown_result(mode: str, charge: Charge) -> ChargeResult:
    """The placeholder of a result that is not known, such as one from a slot whose primary is away."""
    if mode in _OF_MODE:
        return LeaseResult("admit")
    return IdsResult("admit") if charge.compiled.counts_ids else UnitsResult("admit")


def encode_plans(plans: Sequence[Plan], *, clustered: bool = False) -> tuple[list[bytes], list[bytes]]:
    """The keys and the arguments of a call, in order."""
    keys: list[bytes] = []
    return keys, [encode_plan(plan, keys, clustered=clustered) for plan in plans]
