"""Plans and answers as the packed bytes of the script; ``lua/call.lua`` describes them."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import Any, Final, cast

from app.domain.ask import MODES
from app.domain.decision import BYTE_RATES, OUTCOMES, REASONS, REQUEST_RATES
from app.domain.quota import CONNECTION_CREATION_RATE, KEYS, Quota
from app.store.keys import reset_key, retry_key
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
_BRIEF_OF: Final = [struct.Struct("<x" + "dd" * quotas) for quotas in range(len(KEYS) + 3)]
"""How a brief answer is read, by the number of quotas; two keys may match twice."""

OBSERVED, REMAINING = 3, 4
VALUES: Final = 8
"""What is read of each quota of a full answer: outcome, reason, clock and layers, then what is observed and
what remains, and three numbers of ids or of forgiven debt."""
VALUES_OF: Final = [struct.Struct("<B" + "BBB8xddddd" * quotas) for quotas in range(len(KEYS) + 3)]
"""How these are read, by the number of quotas; two keys may match twice.

The decision log has answers in these bytes: another layout needs another ``VERSION`` of a batch of it.
"""

ORDER_STEP: Final = 128
"""How far the order advances from call to call: by more than the asks of any call."""
_LAYER: Final = 4
"""One live layer, in the byte that also holds the clock correction: so kept answers keep their length."""

ALGORITHMS: Final = {"sampled_rate": 1, "token_bucket": 2, "producer_ids": 3}
_MODES: Final = {mode: number for number, mode in enumerate((*MODES, "refresh", "renew", "hold", "settle"))}
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
    answers = len(reply) // 2 - 1
    first = reply[answers + 1] * ORDER_STEP
    return [
        PackedAnswer(packed, at_ms, first + place if first else None, id_outcomes)
        for place, (packed, id_outcomes) in enumerate(
            zip(reply[1 : answers + 1], reply[answers + 2 :], strict=True)
        )
    ]


def encode_plan(plan: Plan) -> tuple[list[bytes], bytes]:
    """A plan's keys and its argument."""
    if plan.mode == "renew":
        keys = [reset_key(plan.charges[0].key)]
    else:
        keys = [] if plan.retry is None else [retry_key(*plan.retry)]
    context = len(plan.context) + 1 if keys else 0
    keys += [charge.key for charge in plan.charges]
    packed = [_ASK.pack(_MODES[plan.mode], len(plan.charges), plan.at_ms or 0, context)]
    for charge in plan.charges:
        packed += (_encode_charge(plan, charge), charge.spreads)
    packed.append(plan.context if context else b"")
    if plan.lease is not None:
        packed.append(_LEASE.pack(*plan.lease))
    return keys, b"".join(packed)


def decode_answer(answer: PackedAnswer) -> Answer:
    """One answer of the script."""
    packed, at_ms, order = answer.packed, answer.at_ms, answer.order
    if packed[0] == 0:
        return Answer(_decode_results(packed[1:]), None, None, at_ms, order, answer.id_outcomes)
    if packed[0] == 3:
        admitted = NUMBERS.iter_unpack(packed[1:])
        results = tuple([ChargeResult("admit", 0, None, 0, of, left, None, 0, 0.0) for of, left in admitted])
        return Answer(results, None, None, at_ms, order, answer.id_outcomes)
    if packed[0] == 2:
        return Answer((), error=StoreError("response", packed[1:].decode(errors="replace")))
    (length,) = _CONTEXT.unpack_from(packed, 1)
    context = packed[3 : 3 + length]
    return Answer(_decode_results(packed[3 + length :]), context, None, at_ms, order)


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
        return _BRIEF_OF[len(of_units)].unpack(packed) if packed[0] == 3 else None
    values: Values = VALUES_OF[len(of_units)].unpack(packed)
    at, admitted = 1, list[float]()
    for units in of_units:
        after = at + VALUES
        if values[at] or values[at + 1] or values[at + 2] % _LAYER:
            return None
        if units and (values[after + FILL] or values[after + REMEMBERED]):
            return None
        admitted += values[at + OBSERVED : at + REMAINING + 1]
        at = after
    return (*admitted, *values[1 + VALUES + OPEN_MS : 1 + VALUES])


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
        0 if word == "too_large" else _whole(largest),
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


def encode_plans(plans: Sequence[Plan | PackedPlan]) -> tuple[list[bytes], list[bytes]]:
    """The keys and the arguments of a call, in order."""
    keys: list[bytes] = []
    arguments = []
    for plan in plans:
        if isinstance(plan, PackedPlan):
            keys += plan.keys
            arguments.append(plan.argument)
        else:
            plan_keys, argument = encode_plan(plan)
            keys += plan_keys
            arguments.append(argument)
    return keys, arguments
