"""Strict decoding of asks and encoding of decisions, independent of the transport."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import lru_cache
from socket import AF_INET, inet_pton
from typing import Final, Literal, NamedTuple, NoReturn, TypeVar

import msgspec
from msgspec import UNSET, Struct

from app.admission.answers import ADMITTED, ADMITTED_ALONE
from app.admission.gathering.slices import Stride
from app.domain.ask import Ask
from app.domain.decision import Decision, LimitedBy, Verdict
from app.domain.digest import as_id
from app.domain.entity import check_name, normalise_ip
from app.domain.errors import EntityError
from app.domain.quota_value import pointer
from app.http import bodies
from app.http.bodies import MAX_ID_BYTES, MAX_IDS_IN_BATCH, MAX_PRODUCER_ID_BYTES
from app.http.faults import faults_in
from app.http.problems import FieldError, ProblemError, unprocessable

Clock = Literal["store", "caller"]
Body = TypeVar("Body", bound=Struct)

MAX_BODY: Final = 1024 * 1024
"""The largest body in bytes."""
MAX_VALUES: Final = 64 * 1024
"""The most values in a body of a caller, by ``require_few_values``; a full batch has half as many."""
READ_IN_FULL: Final = 16 * 1024
"""The largest invalid body, in bytes, whose numbers may have any size."""

NAMES: Final = ("principal", "client_id", "broker", "listener")
SHORT: Final = 128
"""A printable text of up to this length is valid: at most 512 bytes, and no control characters."""
_ASK: Final = msgspec.json.Decoder(bodies.AskBody)
_RAW_BATCH: Final = msgspec.json.Decoder(bodies.RawBatchBody)
_ENCODER: Final = msgspec.json.Encoder()
_DIGITS_AS_0: Final = bytes.maketrans(b"123456789", b"0" * 9)
MANY_DIGITS: Final = b"0" * 400
_ESCAPES: Final = re.compile(r"\\(?:u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|(u[dD][89a-fA-F]\w\w)|.)")


class SentLease(NamedTuple):
    """A wish, the duration of the lease, and the leases to settle before, each with its spent usage."""

    wish: Ask
    lease_ms: int
    settle: list[tuple[str, dict[str, float]]]


def read_address(text: str) -> str:
    """Spell an address as RFC 5952 says.

    Raises:
        EntityError: it is not an address.
    """
    try:
        inet_pton(AF_INET, text)  # ten times as fast, and it takes no other spelling of an IPv4 address
    except (OSError, ValueError):
        return _normalised(text)
    return text


_normalised: Final = lru_cache(4096)(normalise_ip)


def wrong_name(name: str) -> str | None:
    """Return the error of a name, or None."""
    return None if 0 < len(name) <= SHORT and name.isprintable() else check_name(name)


def read_name(name: str) -> str:
    """Return a name of a query, if it is valid.

    Raises:
        ValueError: names the fault.
    """
    if why := wrong_name(name):
        raise ValueError(why)
    return name


def require_few_values(body: bytes, most: int = MAX_VALUES, marks: bytes = b",[{") -> None:
    """Require that a body can be decoded in a few milliseconds, by a bound on the number of its values.

    Each value but the first of an array or object follows a comma. Marks inside of strings count too, since
    finding the strings would take as long as decoding the body.

    Raises:
        ProblemError: 422 for a body with more than ``most`` of these marks; 400 if it begins with deep
            nesting.
    """
    if len(body) > most and len(body) - len(body.translate(None, marks)) > most:
        try:
            msgspec.json.decode(body[:READ_IN_FULL])
        except RecursionError as error:
            raise _not_json(error) from None
        except ValueError:
            pass  # as the end of the body is cut off
        named = " ".join(marks.decode())
        raise unprocessable(FieldError("", f"has more than {most:,} of the characters {named}: split it"))


def decode_ask(body: bytes, clock: Clock) -> Generator[None, None, Ask]:
    """Read one ask: in one step if it is valid, in several to find its faults.

    Raises:
        ProblemError: 400 if it is not JSON, 422 for invalid content.
    """
    sent = yield from _decoded(body, bodies.AskBody)
    errors: list[FieldError] = []
    ask = _ask(sent, clock, (), errors)
    if errors:
        raise unprocessable(*errors)
    return ask


def decode_batch(body: bytes, clock: Clock) -> Generator[None, None, list[Ask]]:
    """Read a batch, one ask per step; an invalid ask fails all of it.

    Raises:
        ProblemError: 400 if it is not JSON, 422 for invalid content.
    """
    sent = yield from _decoded(body, bodies.BatchBody)
    errors: list[FieldError] = []
    asks = []
    for at, ask in enumerate(sent.asks):
        asks.append(_ask(ask, clock, ("asks", at), errors))
        yield
    if sum([len(ask.usage.producer_ids) for ask in sent.asks if ask.usage.producer_ids]) > MAX_IDS_IN_BATCH:
        errors.append(FieldError("/asks", f"must hold at most {MAX_IDS_IN_BATCH} producer ids together"))
    if errors:
        raise unprocessable(*errors)
    return asks


def split_batch(body: bytes) -> list[bytes] | None:
    """Return the asks of a batch, each as it was sent; None if the body is no batch.

    The asks themselves are not read: ``decode_batch`` names their faults.
    """
    try:
        if not body.isascii():
            body.decode()  # the decoder does not check the UTF-8 of unread asks
        return [bytes(ask) for ask in _RAW_BATCH.decode(body).asks]
    except (ValueError, RecursionError):
        return None


def read_ask(body: bytes, clock: Clock) -> tuple[Ask, int] | None:
    """Read one ordinary ask; None for any other, which ``decode_ask`` reads or refuses.

    Returns:
        the ask, and how many producer ids were sent with it, duplicates included.
    """
    try:
        sent = _ASK.decode(body)
        ip = None if sent.ip is None else read_address(sent.ip)
    except (ValueError, RecursionError, EntityError):
        return None
    principal, client_id, broker, listener = sent.principal, sent.client_id, sent.broker, sent.listener
    names = f"{principal}{client_id}{broker}{listener}"
    if (len(names) > SHORT or not names.isprintable()) and any(
        name and check_name(name) for name in (principal, client_id, broker, listener)
    ):
        return None
    usage, at_ms, key = msgspec.to_builtins(sent.usage), sent.at_ms, sent.id
    if not usage or (at_ms is UNSET) is (clock == "caller") or (key and len(key.encode()) > MAX_ID_BYTES):
        return None
    ids, many = None, 0
    if "producer_ids" in usage:
        errors: list[object] = []
        named = usage.pop("producer_ids")
        ids, many = _producer_ids(named, lambda *wrong: errors.append(wrong)), len(named)
        if errors or sent.mode == "refund":
            return None
    ask = Ask(
        usage,
        ids,
        principal,
        client_id,
        ip,
        broker,
        listener,
        sent.mode,
        sent.enforcement is not UNSET,
        sent.recheck,
        sent.cluster_action,
        sent.detail,
        key or None,
        None if at_ms is UNSET else at_ms,
    )
    return ask, many


def encode_decision(decision: Decision | None) -> bytes:
    """Encode one decision, once it is made."""
    assert decision is not None
    return READY.get(id(decision)) or _ENCODER.encode(_decision(decision))


def encode_decisions(decisions: Iterable[Decision | None]) -> Generator[None, None, bytes]:
    """Encode the decisions of a batch, some per step."""
    written = []
    stride = Stride()
    for decision in decisions:
        written.append(encode_decision(decision))
        if stride.is_full():
            yield
    return b'{"decisions":[' + b",".join(written) + b"]}"


def decode_lease(body: bytes, clock: Clock) -> Generator[None, None, SentLease]:
    """Read a request for a lease, in steps as an ask.

    Raises:
        ProblemError: 400 if it is not JSON, 422 for invalid content.
    """
    sent = yield from _decoded(body, bodies.LeaseRequestBody)
    wish, errors = sent.ask, list[FieldError]()
    usage = bodies.UsageBody(**msgspec.to_builtins(wish.usage))
    names = (wish.principal, wish.client_id, wish.ip, wish.broker, wish.listener)
    ask = _ask(bodies.AskBody(usage, *names, enforcement="deny", at_ms=wish.at_ms), clock, ("ask",), errors)
    if errors:
        raise unprocessable(*errors)
    settle = [(each.lease, msgspec.to_builtins(each.usage)) for each in sent.settle]
    return SentLease(ask, sent.lease_ms, settle)


def decode_spent(body: bytes) -> Generator[None, None, dict[str, float]]:
    """Read the usage spent of a lease, by field, in steps as an ask.

    Raises:
        ProblemError: 400 if it is not JSON, 422 for invalid content.
    """
    sent = yield from _decoded(body, bodies.SpentBody)
    spent: dict[str, float] = msgspec.to_builtins(sent.usage)
    return spent


def encode_lease(leased: bodies.LeaseBody | bodies.SettledBody) -> bytes:
    """Encode the answer about a lease."""
    return _ENCODER.encode(leased)


def lease_body(
    decision: Decision, lease: str | None, granted: Mapping[str, float], lease_ms: int, renew_ms: int
) -> bodies.LeaseBody:
    """Return the answer to an ask for a lease, without the settled leases."""
    by = decision.limited_by
    return bodies.LeaseBody(
        lease,
        {field: _number(amount) for field, amount in granted.items()},
        lease_ms,
        renew_ms,
        decision.decision,
        decision.throttle_ms,
        None if by is None else _limited_by(by),
        decision.source,
        [],
    )


def _decoded(body: bytes, type_: type[Body]) -> Generator[None, None, Body]:
    """Read a body of a type, in several steps if there is a fault.

    Raises:
        ProblemError: 400 if it is not JSON, 422 for invalid content.
    """
    try:
        return msgspec.json.decode(body, type=type_)
    except (ValueError, RecursionError) as error:
        yield
        return (yield from _read_slowly(body, type_, error))


def _ask(sent: bodies.AskBody, clock: Clock, at: tuple[str | int, ...], errors: list[FieldError]) -> Ask:
    """Return the ask that was sent; adds the errors that its types cannot find to ``errors``."""

    def wrong(message: str, *field: str | int) -> None:
        errors.append(FieldError(pointer(*at, *field), message))

    for field in NAMES:
        name = getattr(sent, field)
        if name and (why := wrong_name(name)):
            wrong(why, field)
    ip = sent.ip
    if ip is not None:
        try:
            ip = read_address(ip)
        except EntityError as error:
            wrong(str(error), "ip")
    usage = msgspec.to_builtins(sent.usage)
    ids: tuple[int | str, ...] | None = None
    if not usage:
        wrong("must not be empty", "usage")
    elif "producer_ids" in usage:
        ids = _producer_ids(usage.pop("producer_ids"), wrong)
        if sent.mode == "refund":
            wrong("cannot be refunded", "usage", "producer_ids")
    key = sent.id or None
    if key is not None and len(key) > 16 and len(key.encode()) > MAX_ID_BYTES:
        wrong(f"must be at most {MAX_ID_BYTES} bytes of UTF-8", "id")
    if (sent.at_ms is UNSET) is (clock == "caller"):
        wrong(f"is {'required' if clock == 'caller' else 'only for use'} under the caller's clock", "at_ms")
    return Ask(
        usage,
        ids,
        sent.principal,
        sent.client_id,
        ip,
        sent.broker,
        sent.listener,
        sent.mode,
        sent.enforcement is not UNSET,
        sent.recheck,
        sent.cluster_action,
        sent.detail,
        key,
        None if sent.at_ms is UNSET else sent.at_ms,
    )


def _producer_ids(sent: Sequence[int | str], wrong: Callable[..., None]) -> tuple[int | str, ...]:
    """Return the distinct ids in order; the canonical decimal of a 64-bit integer becomes the integer."""
    ids: dict[int | str, None] = {}
    for at, id_ in enumerate(sent):
        if isinstance(id_, str):
            if len(id_) > 64 and len(id_.encode()) > MAX_PRODUCER_ID_BYTES:
                wrong(f"must be at most {MAX_PRODUCER_ID_BYTES} bytes of UTF-8", "usage", "producer_ids", at)
            else:
                id_ = as_id(id_)  # noqa: PLW2901 - the same id, in the form that counts
        ids[id_] = None
    return tuple(ids)


def _decision(decision: Decision) -> bodies.DecisionBody:
    by = decision.limited_by
    return bodies.DecisionBody(
        decision.decision,
        decision.throttle_ms,
        decision.charged,
        decision.applied,
        decision.source,
        None if by is None else _limited_by(by),
        UNSET if decision.quotas is None else [_verdict(verdict) for verdict in decision.quotas],
    )


def _limited_by(by: LimitedBy) -> bodies.LimitedByBody:
    largest = UNSET if by.reason != "too_large" or by.largest is None else _number(by.largest)
    return bodies.LimitedByBody(by.quota, by.entity, by.bucket, by.reason or UNSET, largest)


def _verdict(verdict: Verdict) -> bodies.VerdictBody:
    return bodies.VerdictBody(
        verdict.quota,
        verdict.entity,
        verdict.bucket,
        _number(verdict.limit),
        verdict.outcome,
        verdict.throttle_ms,
        _known(verdict.observed),
        _known(verdict.remaining),
        verdict.enforcement,
        verdict.shadow,
    )


def _number(value: float) -> float:
    """Return a whole float as an integer, so that 1000.0 is encoded as 1000."""
    return value if value % 1 else int(value)


def _known(value: float | None) -> float | None:
    return None if value is None else _number(value)


def _read_slowly(body: bytes, type_: type[Body], error: Exception) -> Generator[None, None, Body]:
    """Read a body that the fast decoder refused, to find out why: first whether it is JSON at all.

    It may be valid: the fast decoder also refuses an invalid value that a later duplicate key replaces.
    """
    if not isinstance(error, msgspec.ValidationError | RecursionError):
        raise _not_json(error)
    sent = _json(body) if len(body) <= READ_IN_FULL else (yield from _large_json(body))
    try:
        errors = yield from faults_in(body, type_)
    except (ValueError, RecursionError) as odd:
        raise _not_json(odd) from None
    if sent is None:
        errors = errors or [FieldError("", "has a key twice: send each key once")]
    if errors:
        raise unprocessable(*errors)
    return msgspec.convert(sent, type_)


def _large_json(body: bytes) -> Generator[None, None, object]:
    """Return the JSON value of a large body, ten times as fast as ``_json``.

    It is None for a body that may hold a number outside every range, which takes long to convert.
    """
    try:
        if MANY_DIGITS not in body.translate(_DIGITS_AS_0):
            yield
            sent: object = msgspec.json.decode(body)
            yield
            return sent
    except msgspec.ValidationError:  # such as 1e999
        pass
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from None
    return None


def _json(body: bytes) -> object:
    """Return the JSON value of a body, with numbers of any size; the last duplicate of a key counts."""
    try:
        text = body.decode()
        value: object = json.loads(text, parse_int=_integer, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _not_json(error) from None
    if has_lone_surrogate(text):
        raise _not_json(ValueError("a lone surrogate"))
    return value


def has_lone_surrogate(text: str) -> bool:
    r"""Whether JSON text escapes half of a surrogate pair, which is no character.

    >>> has_lone_surrogate(r'["\ud83d\ude00", "\\ud83d"]'), has_lone_surrogate(r'["\ud83d"]')
    (False, True)
    """
    return any(escape[1] for escape in _ESCAPES.finditer(text))


def _integer(digits: str) -> float:
    return int(digits) if len(digits) < 300 else float(digits)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _not_json(error: Exception) -> ProblemError:
    why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return ProblemError(400, f"The body is not JSON: {why}.")


READY: Final = {
    id(decision): _ENCODER.encode(_decision(decision)) for decision in (*ADMITTED, ADMITTED_ALONE)
}
"""The JSON of the constant decisions that admit an ordinary ask, by Python's ``id`` of the decision. These
objects live as long as the process, so no other object gets such an id."""
