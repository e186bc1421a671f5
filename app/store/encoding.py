"""Plans and answers as the packed bytes of the script; ``lua/call.lua`` describes them."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, cast

from msgspec import msgpack, structs

from app.domain.ask import MODES
from app.domain.decision import BYTE_RATES, OUTCOMES, REASONS, REQUEST_RATES
from app.domain.quota import CONNECTION_CREATION_RATE, KEYS, Quota
from app.domain.undo import Stamp
from app.store.keys import BIRTH_KEY, reset_key, retry_key
from app.store.port import (
    Answer,
    Charge,
    ChargeResult,
    PackedAnswer,
    PackedPlan,
    Plan,
    StoreCalls,
    StoreError,
)

_CALL: Final = struct.Struct("<BBd")
_ASK: Final = struct.Struct("<BBdH")
QUOTA: Final = struct.Struct("<BBHdddddd")
_RESULT: Final = struct.Struct("<BBBdddddd")
_CONTEXT: Final = struct.Struct("<H")
_OUTCOMES: Final = struct.Struct("<HH")
HISTORY_BYTES: Final = 16
BRIEF: Final = 3
"""The first byte of an answer that has two numbers of each quota, which admits."""
STAMPED: Final = 4
"""The first byte of an answer with the stamps of its charges."""
NO_ANSWER: Final = 5
"""The first byte of what is in the place of an answer, if this node could not get one."""
_MERGED: Final = bytes([6])
_IS_SPREAD: Final = b"\xc1"
"""The first byte of a context with the results of other slots; no msgpack begins with it."""
UNKNOWN_RESULT: Final = ChargeResult("admit", 0, None, 0, math.nan, math.nan, None, 0, 0.0)
"""In the place of a result that is not known, such as that of a slot whose primary is away."""
_CHARGED: Final = struct.Struct("<ddd")
_STAMP: Final = struct.Struct("<dd16s")
_LEASE: Final = struct.Struct("<16sd")

NUMBER: Final = struct.Struct("<d")
NUMBERS: Final = struct.Struct("<dd")
COUNT: Final = struct.Struct("<H")
_TIME_AT: Final = 2
_IDS_AT: Final = 2
_USAGE_AT: Final = 12
"""Where the caller's time lies in the bytes of an ask; the number of ids and the usage in a charge's."""

Values = tuple[float, ...]
"""The numbers of an admission: what is observed and what remains of each quota, in order; if the first one
counts ids, then ``OPEN_MS``, ``REMEMBERED`` and ``FILL``, which are behind all of these."""
OPEN_MS, REMEMBERED, FILL = -3, -2, -1
MOST_MATCHES: Final = len(KEYS) + 2
"""The most quotas of an ask: each key may match, and two of them twice."""
_BRIEF_OF: Final = [struct.Struct("<x" + "dd" * quotas) for quotas in range(MOST_MATCHES + 1)]
"""How a brief answer is read, by the number of quotas."""

_OBSERVED, _REMAINING = 3, 4
_VALUES: Final = 8
"""What is read of each quota of a full answer: outcome, reason, clock and layers, then what is observed and
what remains, and three numbers of ids or of forgiven debt."""
_VALUES_OF: Final = [struct.Struct("<B" + "BBB8xddddd" * quotas) for quotas in range(MOST_MATCHES + 1)]
"""How these are read, by the number of quotas.

The decision log has answers in the bytes of both layouts; another one needs another ``VERSION`` of batches.
"""

ORDER_STEP: Final = 128
"""How far the order advances from call to call: by more than the asks of any call."""
_LAYER: Final = 4
"""One live layer, in the byte that also holds the clock correction: so kept answers keep their length."""

ALGORITHMS: Final = {"sampled_rate": 1, "token_bucket": 2, "producer_ids": 3}
_MODES: Final = {
    **{mode: number for number, mode in enumerate((*MODES, "refresh", "renew", "hold", "settle"))},
    "undo": 16,
    "look": 17,
}
_KEEPS, _STAMPED, _DELAYED = 32, 64, 128
_FIELDS: Final = {key.usage: number for number, key in enumerate(KEYS.values())}
"""The number of each usage field: a lease takes the same of each bucket of one field."""
_DENY, _SHADOW, _CONNECTION, _RECHECK, _BYTES, _REQUESTS, _CLOSED = 1, 2, 4, 8, 16, 32, 64


def encode_call(
    *, caller_clock: bool, sequential: bool, logged: bool, max_ids: int, brief: bool = False
) -> bytes:
    """The argument for what all asks of a call have in common."""
    return _CALL.pack(caller_clock, sequential + 2 * logged + 4 * brief, max_ids)


def read_reply(reply: Sequence[Any], *, logged: bool) -> list[PackedAnswer]:
    """The answers of a call; in a logged call each has its place in the store's order."""
    at_ms = reply[0]
    if not logged:
        return [PackedAnswer(packed, at_ms) for packed in reply[1:]]
    first, found = reply[-2] * ORDER_STEP, dict(_id_outcomes(reply[-1]))
    return [
        PackedAnswer(packed, at_ms, first + place if first else None, found.get(place, b""))
        for place, packed in enumerate(reply[1:-2])
    ]


def _id_outcomes(packed: bytes) -> Iterator[tuple[int, bytes]]:
    """By the place of their ask, what became of ids."""
    at = 0
    while at < len(packed):
        place, ids = _OUTCOMES.unpack_from(packed, at)
        at += _OUTCOMES.size + ids
        yield place, packed[at - ids : at]


def encode_plan(plan: Plan, *, clustered: bool = False) -> tuple[list[bytes], bytes]:
    """A plan's keys and its argument."""
    if plan.mode == "renew":
        keys = [reset_key(plan.charges[0].key), BIRTH_KEY]
    else:
        keys = [] if plan.retry is None else [retry_key(*plan.retry, clustered=clustered)]
    context = len(plan.context) + 1 if keys else 0
    keys += [charge.key for charge in plan.charges]
    mode = _MODES[plan.mode] + _KEEPS * plan.keeps + _STAMPED * plan.stamped
    if plan.byte_delay_ms:
        mode += _DELAYED
    packed = [_ASK.pack(mode, len(plan.charges), plan.at_ms or 0, context)]
    if plan.byte_delay_ms:
        packed.append(NUMBER.pack(plan.byte_delay_ms))
    for charge in plan.charges:
        packed += (_encode_charge(plan, charge), charge.spreads)
    packed.append(plan.context if context else b"")
    if plan.lease is not None:
        packed.append(_LEASE.pack(*plan.lease))
    return keys, b"".join(packed)


def decode_answer(answer: PackedAnswer) -> Answer:
    """One answer of the script."""
    if answer.unpacked is not None:
        return answer.unpacked
    packed, at_ms, order = answer.packed, answer.at_ms, answer.order
    if packed[0] == 0:
        return Answer(_decode_results(packed[1:]), None, None, at_ms, order, answer.id_outcomes)
    if packed[0] == BRIEF:
        admitted = NUMBERS.iter_unpack(packed[1:])
        results = tuple([ChargeResult("admit", 0, None, 0, of, left, None, 0, 0.0) for of, left in admitted])
        return Answer(results, None, None, at_ms, order, answer.id_outcomes)
    if packed[0] == STAMPED:
        return _stamped_answer(answer)
    if packed[0] == 2:
        return Answer((), error=StoreError("response", packed[1:].decode(errors="replace")))
    if packed[0] == NO_ANSWER:
        reason, _, detail = packed[1:].decode().partition("\0")
        return Answer((), error=StoreError(reason, detail))
    (length,) = _CONTEXT.unpack_from(packed, 1)
    context, results = packed[3 : 3 + length], _decode_results(packed[3 + length :])
    if context[:1] == _IS_SPREAD:
        context, places, others = msgpack.decode(context[1:], type=tuple[bytes, list[int], bytes])
        results = _in_places(results, places, _decode_results(others))
    return Answer(results, context, None, at_ms, order)


def merged_answer(answer: Answer) -> PackedAnswer:
    """An answer that was put together, in the place of one in bytes."""
    return PackedAnswer(_MERGED, answer.at_ms, answer.order, answer.id_outcomes, answer)


def no_answer(error: StoreError) -> PackedAnswer:
    """What there is in the place of an answer, if one ask of a call has none."""
    return PackedAnswer(bytes([NO_ANSWER]) + f"{error.reason}\0{error}".encode())


def spread_context(context: bytes, places: Sequence[int], results: Sequence[ChargeResult]) -> bytes:
    """The context of an answer that is kept in one slot, with the results of the other slots.

    Args:
        places: the indexes of these results among those of the whole answer.
    """
    packed = b"".join(map(_pack_result, results))
    return _IS_SPREAD + msgpack.encode((context, places, packed))


def _in_places(
    own: Sequence[ChargeResult], places: Sequence[int], others: Sequence[ChargeResult]
) -> tuple[ChargeResult, ...]:
    """All results of an answer: the others in their places, its own in the rest."""
    placed, rest = dict(zip(places, others, strict=True)), iter(own)
    return tuple(placed[place] if place in placed else next(rest) for place in range(len(own) + len(others)))


def _pack_result(result: ChargeResult) -> bytes:
    return _RESULT.pack(
        OUTCOMES.index(result.outcome),
        REASONS.index(result.reason),
        result.correction + _LAYER * result.layers,
        result.throttle_ms,
        result.observed,
        result.remaining,
        result.given,
        result.remembered,
        result.fill,
    )


def _stamped_answer(answer: PackedAnswer) -> Answer:
    packed = answer.packed
    quotas = (len(packed) - 1 - HISTORY_BYTES) // (_RESULT.size + _CHARGED.size)
    ends = 1 + quotas * _RESULT.size
    history = packed[-HISTORY_BYTES:]
    charged = _CHARGED.iter_unpack(packed[ends:-HISTORY_BYTES])
    stamps = tuple(Stamp(birth, at_ms, taken, history) for birth, at_ms, taken in charged)
    results = _decode_results(packed[1:ends])
    return Answer(results, None, None, answer.at_ms, answer.order, answer.id_outcomes, stamps)


def undo_plan(charges: Iterable[tuple[Charge, Stamp]], at_ms: int | None) -> Plan | None:
    """The plan that takes back what was charged; None if none of it can be.

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
    """The plan that frees all that a plan holds for its lease."""
    assert plan.lease is not None
    charges = tuple(structs.replace(charge, usage=0) for charge in plan.charges)
    return Plan("settle", charges, at_ms=plan.at_ms, lease=(plan.lease[0], 0))


async def packed_answers_of(store: StoreCalls, plans: Sequence[Plan | PackedPlan]) -> list[PackedAnswer]:
    """The answers of a call, for who can wait for them.

    Raises:
        StoreError: no answer, or an error for one; a late call may still be counted.
    """
    came: asyncio.Future[list[PackedAnswer] | Exception] = asyncio.get_running_loop().create_future()
    store.ask(plans, lambda answers: None if came.done() else came.set_result(answers))
    answers = await came
    if isinstance(answers, Exception):
        raise answers
    return answers


async def answers_of(store: StoreCalls, plans: Sequence[Plan | PackedPlan]) -> list[Answer]:
    """The answers of a call as ``packed_answers_of`` gets them, unpacked."""
    return [decode_answer(answer) for answer in await packed_answers_of(store, plans)]


def admitted_values(packed: bytes, of_units: Sequence[bool]) -> Values | None:
    """The numbers of an answer in which every quota admits; None of any other.

    None too, if there is more to say: the answer was kept, a clock was corrected, debt was forgiven, or a
    lease ended that nobody had settled.

    Args:
        of_units: for each quota of the ask, whether it counts units, not ids.

    """
    if packed[0]:
        return _BRIEF_OF[len(of_units)].unpack(packed) if packed[0] == BRIEF else None
    values: Values = _VALUES_OF[len(of_units)].unpack(packed)
    at, admitted = 1, list[float]()
    for units in of_units:
        after = at + _VALUES
        if values[at] or values[at + 1] or values[at + 2] % _LAYER:
            return None
        if units and (values[after + FILL] or values[after + REMEMBERED]):
            return None
        admitted += values[at + _OBSERVED : at + _REMAINING + 1]
        at = after
    return (*admitted, *values[1 + _VALUES + OPEN_MS : 1 + _VALUES])


def admission_end(packed: bytes | bytearray, at: int, quotas: int) -> int:
    """Where the answer ends that begins at ``at`` and admits an ask; no quotas have no answer."""
    if not quotas:
        return at
    return at + (_BRIEF_OF if packed[at] == BRIEF else _VALUES_OF)[quotas].size


def admission_numbers(packed: bytes, at: int, quotas: int) -> Values:
    """What is observed and what remains of each quota, in order, in an answer that admits an ask."""
    if not quotas:
        return ()
    if packed[at] == BRIEF:
        return _BRIEF_OF[quotas].unpack_from(packed, at)
    values: Values = _VALUES_OF[quotas].unpack_from(packed, at)
    starts = range(1, len(values), _VALUES)
    return tuple([number for its in starts for number in values[its + _OBSERVED : its + _REMAINING + 1]])


def _encode_charge(plan: Plan, charge: Charge) -> bytes:
    """What the argument of a plan says of a charge, without its ids."""
    quota = charge.applied.quota
    flags = (
        _DENY * (charge.enforcement == "deny")
        | _SHADOW * quota.shadow
        | _CONNECTION * (quota.key == CONNECTION_CREATION_RATE)
        | _RECHECK * plan.recheck
        | _BYTES * (quota.key in BYTE_RATES)
        | _REQUESTS * (quota.key in REQUEST_RATES)
        | _CLOSED * (quota.on_store_failure == "throttle" and plan.mode != "record")
    )
    return QUOTA.pack(
        ALGORITHMS[quota.algorithm],
        flags,
        len(charge.spreads) // 32,
        quota.limit,
        charge.usage,
        *parameters(quota),
        quota.longest_delay_ms,
    )


def parameters(quota: Quota) -> tuple[float, float, float]:
    """The three parameters of a quota's algorithm, in addition to the limit, as in ``lua/call.lua``."""
    if quota.algorithm == "sampled_rate":
        return quota.samples, quota.sample_ms, _FIELDS[KEYS[quota.key].usage]
    if quota.algorithm == "token_bucket":
        return quota.burst, quota.max_debt, _FIELDS[KEYS[quota.key].usage]
    return quota.window_ms, quota.layers.interval_ms, quota.layers.ttl_ms


def _decode_results(packed: bytes) -> tuple[ChargeResult, ...]:
    return tuple(_result(*fields) for fields in _RESULT.iter_unpack(packed))


def _result(
    outcome: int,
    reason: int,
    correction_and_layers: int,
    throttle_ms: float,
    observed: float,
    remaining: float,
    largest: float,
    remembered: float,
    fill: float,
) -> ChargeResult:
    word = REASONS[reason]
    layers, correction = divmod(correction_and_layers, _LAYER)
    return ChargeResult(
        OUTCOMES[outcome],
        int(throttle_ms),
        word,
        correction,
        observed,
        remaining,
        largest if word == "too_large" else None,
        _whole(remembered),
        fill,
        layers,
        0 if word == "too_large" else _whole(max(largest, 0.0)),
        largest,
    )


def _whole(number: float) -> int:
    """The number as an int; only those of leases may have a fraction, and keep it."""
    return int(number) if number.is_integer() else cast("int", number)


def pieces_of(plan: Plan) -> tuple[bytes, ...]:
    """Cut the argument of a plan at what differs between the asks that have its quotas.

    Between the pieces belong the caller's time, then of each charge the usage, each packed as a ``NUMBER``. A
    charge of ids has their number as a ``COUNT`` before its usage, and their spreads behind it.
    """
    cuts = [(_TIME_AT, NUMBER.size)]
    at = _ASK.size
    for charge in plan.charges:
        usage = at + _USAGE_AT, NUMBER.size
        if charge.applied.quota.algorithm == "producer_ids":
            cuts += ((at + _IDS_AT, COUNT.size), usage, (at + QUOTA.size, len(charge.spreads)))
        else:
            cuts.append(usage)
        at += QUOTA.size + len(charge.spreads)
    _, argument = encode_plan(plan)
    begins = [0, *(cut + size for cut, size in cuts)]
    ends = [*(cut for cut, _ in cuts), None]
    return tuple(argument[begin:end] for begin, end in zip(begins, ends, strict=True))


def encode_plans(
    plans: Sequence[Plan | PackedPlan], *, clustered: bool = False
) -> tuple[list[bytes], list[bytes]]:
    """The keys and the arguments of a call, in order."""
    keys: list[bytes] = []
    arguments = []
    for plan in plans:
        if isinstance(plan, PackedPlan):
            keys += plan.keys
            arguments.append(plan.argument)
        else:
            plan_keys, argument = encode_plan(plan, clustered=clustered)
            keys += plan_keys
            arguments.append(argument)
    return keys, arguments
