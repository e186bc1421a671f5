"""The question of gateways, asked in headers and a query; the answer in a status and in headers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

from starlette.types import Receive, Scope

from app.domain.ask import Ask
from app.domain.decision import Decision, Verdict
from app.domain.entity import EntityError
from app.domain.quota import MAX_EXACT, Quota
from app.domain.quota_value import pointer
from app.http.access import Access
from app.http.decisions import Answer, Decider, PlainRoute
from app.http.problems import FieldError, Problem
from app.http.wire import encode_decision, read_address, wrong_name

PATH: Final = "/v1/check"
FORWARDED_FOR: Final = "X-Forwarded-For"
COUNTS: Final = ("requests", "connections", "mutations")
AMOUNTS: Final = ("produce_bytes", "fetch_bytes", "request_time_ms")
NAMES: Final = ("broker", "listener")
DENY_STATUSES: Final = {"403": 403, "429": 429}
MAX_WHOLE: Final = 999_999_999_999_999
"""The largest integer of a structured field (RFC 9651)."""
MAX_REMEMBERED_QUERY: Final = 1_024

Network = IPv4Network | IPv6Network
Headers = Iterable[tuple[bytes, bytes]]

_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)")
_DECIMAL: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_BAD_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_HOP: Final = re.compile(r"\[([^\]]*:[^\]]*)\](?::[0-9]{1,5})?|([0-9.]+):[0-9]{1,5}")
"""An entry of X-Forwarded-For with a port or in brackets, as some proxies write them."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where it stands who asks: in which headers, and whose word on addresses is believed."""

    principal: str = "X-Quotagate-Principal"
    client: str = "X-Quotagate-Client-Id"
    ip: str = "X-Quotagate-IP"
    trusted: tuple[Network, ...] = ()


class Query(NamedTuple):
    """What a query says, and what is wrong with it."""

    usage: Mapping[str, float]
    broker: str | None
    listener: str | None
    deny_status: int
    at_ms: int | None
    errors: tuple[FieldError, ...]


class Check:
    """Headers and a query to an answer, whatever carries them.

    Args:
        now_ms: the time of an ask that does not say; None under the store's clock.
    """

    def __init__(self, admission: Decider, sources: Sources, now_ms: Callable[[], int] | None) -> None:
        self._admission = admission
        self._callers = Callers(sources)
        self._now_ms = now_ms

    async def answer(self, query: bytes, headers: Headers) -> Answer:
        """Decide what a request asks for, every quota as deny.

        Raises:
            Problem: 400, naming each parameter and header that cannot be understood.
        """
        read = _read_remembered if len(query) <= MAX_REMEMBERED_QUERY else read_query
        asked = read(query, timed=self._now_ms is not None)
        errors = list(asked.errors)
        principal, client_id, ip = self._callers.read(headers, errors)
        if errors:
            raise not_understood(errors)
        at_ms = self._now_ms() if self._now_ms is not None and asked.at_ms is None else asked.at_ms
        ask = Ask(
            usage=asked.usage,
            principal=principal,
            client_id=client_id,
            ip=ip,
            broker=asked.broker,
            listener=asked.listener,
            deny=True,
            detail=True,
            at_ms=at_ms,
        )
        decision, quotas = await self._admission.decide_in_full(ask)
        return _answer(decision, quotas, asked.deny_status)


class CheckRoute(PlainRoute):
    """The path of a check, which takes any method and reads no body."""

    def __init__(self, check: Check, access: Access) -> None:
        self._check = check
        self._access = access

    async def answered(self, scope: Scope, receive: Receive) -> Answer | None:  # noqa: ARG002
        """The answer to the head of a request."""
        self._access.require(scope, "decide")
        answer = await self._check.answer(scope["query_string"], scope["headers"])
        if any(name == b"expect" for name, _ in scope["headers"]):
            # The body may or may not come now (RFC 9110, 10.1.1); only closing ends the doubt.
            answer.headers.append((b"connection", b"close"))
        return answer


class Callers:
    """Reads who asks from the headers of a request."""

    def __init__(self, sources: Sources) -> None:
        self._principal, self._client = _lower(sources.principal), _lower(sources.client)
        self._believes = bool(sources.trusted)
        self._ip = _lower(FORWARDED_FOR if self._believes else sources.ip)
        self._wanted = frozenset({self._principal, self._client, self._ip})
        self._names = {_lower(name): name for name in (sources.principal, sources.client, sources.ip)}
        self._trusted = sources.trusted
        self._is_trusted = lru_cache(4096)(self._in_trusted_network)

    def read(self, headers: Headers, errors: list[FieldError]) -> tuple[str | None, str | None, str | None]:
        """Principal, client-id and address; adds to ``errors`` what is wrong with them."""
        sent: dict[bytes, bytes] = {}
        for name, value in headers:
            if name in self._wanted:
                if name not in sent:
                    sent[name] = value
                elif name == self._ip and self._believes:
                    sent[name] += b"," + value
                else:
                    errors.append(self._wrong(name, "stands twice"))
        return (
            self._name(self._principal, sent, errors) or None,
            self._name(self._client, sent, errors),
            self._address(sent, errors),
        )

    def _name(self, header: bytes, sent: Mapping[bytes, bytes], errors: list[FieldError]) -> str | None:
        value = sent.get(header)
        if value is None:
            return None
        try:
            name = value.strip(b" \t").decode()
        except UnicodeDecodeError:
            errors.append(self._wrong(header, "must be UTF-8"))
            return None
        if name and (why := wrong_name(name)):
            errors.append(self._wrong(header, why))
        return name

    def _address(self, sent: Mapping[bytes, bytes], errors: list[FieldError]) -> str | None:
        value = sent.get(self._ip)
        if value is None:
            return None
        text = value.decode("latin-1").strip(" \t")
        try:
            if self._believes:
                return rightmost_untrusted(text, self._is_trusted)
            return read_address(text) if text else None
        except EntityError as error:
            header = FORWARDED_FOR if self._believes else self._names[self._ip]
            errors.append(FieldError(pointer(header), str(error)))
            return None

    def _wrong(self, header: bytes, message: str) -> FieldError:
        return FieldError(pointer(self._names[header]), message)

    def _in_trusted_network(self, address: str) -> bool:
        parsed = ip_address(address)
        return any(parsed in network for network in self._trusted)


def rightmost_untrusted(forwarded_for: str, is_trusted: Callable[[str], bool]) -> str | None:
    """The address nearest to us that no trusted proxy has; what stands left of it anyone may have written.

    >>> rightmost_untrusted("forged, 203.0.113.9, 10.0.0.2", lambda address: address.startswith("10."))
    '203.0.113.9'

    Raises:
        EntityError: an entry on the way there is no address.
    """
    rest = forwarded_for
    while rest:
        rest, _, entry = rest.rpartition(",")
        entry = entry.strip(" \t")
        if entry:
            address = _hop(entry)
            if not is_trusted(address):
                return address
    return None


def read_query(query: bytes, *, timed: bool) -> Query:
    """Read a query; ``timed``: it may say when it is asked."""
    errors: list[FieldError] = []
    sent = _parameters(query, errors)
    usage: dict[str, float] = {}
    names: dict[str, str] = {}
    deny_status, at_ms = 429, None
    for name, value in sent.items():
        wrong: str | None = None
        if name in COUNTS or name in AMOUNTS:
            wrong = _take_number(name, value, usage, whole=name in COUNTS)
        elif name in NAMES:
            wrong = wrong_name(value)
            names[name] = value
        elif name == "deny_status":
            wrong = None if value in DENY_STATUSES else "must be 403 or 429"
            deny_status = DENY_STATUSES.get(value, 429)
        elif name == "at_ms" and timed:
            times: dict[str, float] = {}
            wrong = _take_number(name, value, times, whole=True)
            at_ms = None if wrong else int(times[name])
        else:
            wrong = "is unknown"
        if wrong:
            errors.append(FieldError(pointer(name), wrong))
    usage = usage or {"requests": 1}
    return Query(usage, names.get("broker"), names.get("listener"), deny_status, at_ms, tuple(errors))


_read_remembered: Final = lru_cache(256)(read_query)


def not_understood(errors: Sequence[FieldError]) -> Problem:
    """400 for these parameters and headers."""
    headers = {"X-Throttle-Ms": "0", "Cache-Control": "no-store"}
    return Problem(400, "The request cannot be understood: see errors.", errors, headers)


def rate_limits(decision: Decision, quotas: Sequence[Quota]) -> list[tuple[bytes, bytes]]:
    """What applied and what is left of it, as IETF draft-ietf-httpapi-ratelimit-headers has it."""
    policies, limits, last = [], [], ""
    for verdict, quota in zip(decision.quotas or (), quotas, strict=True):
        name = verdict.quota if verdict.quota != last else f"{verdict.quota}_{_type(verdict)}"
        last = verdict.quota
        units, span_s = policy(quota)
        policies.append(f'"{name}";q={units};w={span_s}')
        if verdict.remaining is not None:
            wait_s = _seconds(decision.throttle_ms) if decision.decision == "throttle" else span_s
            limits.append(f'"{name}";r={_whole(max(verdict.remaining, 0))};t={wait_s}')
    headers = ((b"ratelimit-policy", policies), (b"ratelimit", limits))
    return [(name, ", ".join(items).encode()) for name, items in headers if items]


def policy(quota: Quota) -> tuple[int, int]:
    """How many units a quota admits at most, and over how many seconds."""
    if quota.algorithm == "token_bucket":
        return _whole(quota.burst), max(_whole(quota.burst / quota.limit) if quota.limit else 0, 1)
    span_s = (max(quota.samples, 2) - 1) * quota.sample_ms / 1000
    return _whole(quota.limit * span_s), max(_whole(span_s), 1)


def _answer(decision: Decision, quotas: Sequence[Quota], deny_status: int) -> Answer:
    body = encode_decision(replace(decision, quotas=None))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"cache-control", b"no-store"),
        (b"x-throttle-ms", b"%d" % decision.throttle_ms),
        *rate_limits(decision, quotas),
    ]
    if decision.decision == "throttle":
        headers.append((b"retry-after", b"%d" % _seconds(decision.throttle_ms)))
    return Answer(200 if decision.decision == "admit" else deny_status, headers, body)


def _seconds(throttle_ms: int) -> int:
    return -(-throttle_ms // 1000)


def _whole(amount: float) -> int:
    """Rounded down, but for what doubles lose: 100 s of 0.29 a second are 29."""
    return math.floor(round(min(amount, MAX_WHOLE), 9))


def _type(verdict: Verdict) -> str:
    return verdict.entity.partition("=")[0]


def _hop(entry: str) -> str:
    with_port = _HOP.fullmatch(entry)
    return read_address(with_port[1] or with_port[2] if with_port else entry)


def _parameters(query: bytes, errors: list[FieldError]) -> dict[str, str]:
    sent: dict[str, str] = {}
    for part in query.decode("latin-1").split("&"):
        if not part:
            continue
        spelled, _, value = part.replace("+", " ").partition("=")
        name = _unescaped(spelled)
        text = _unescaped(value)
        shown = spelled if name is None else name
        if name is None or text is None:
            errors.append(FieldError(pointer(shown), "must be percent-encoded UTF-8"))
        elif name in sent:
            errors.append(FieldError(pointer(shown), "stands twice"))
        else:
            sent[name] = text
    return sent


def _unescaped(text: str) -> str | None:
    if _BAD_ESCAPE.search(text):
        return None
    try:
        return unquote_to_bytes(text.encode("latin-1")).decode()
    except UnicodeDecodeError:
        return None


def _take_number(name: str, text: str, into: dict[str, float], *, whole: bool) -> str | None:
    """Read a number as JSON writes it; what is wrong with it, or None."""
    if not (_INTEGER if whole else _DECIMAL).fullmatch(text):
        return f"must be {'an integer' if whole else 'a number'}"
    number = float(text)
    if number < 0:
        return "must be at least 0"
    if number > MAX_EXACT:
        return f"must be at most {MAX_EXACT}"
    into[name] = int(text) if whole else number
    return None


def _lower(name: str) -> bytes:
    return name.lower().encode()
