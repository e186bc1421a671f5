"""Reading of a gateway's request: the caller from its headers, the usage from its query."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network
from typing import Any, Final

from msgspec import Struct

from app.domain.ask import AMOUNTS, COUNTS
from app.domain.errors import EntityError
from app.domain.quota import MAX_EXACT
from app.domain.quota_value import pointer
from app.http.access.access import is_in
from app.http.head import HeadFields
from app.http.problems import FieldError, ProblemError
from app.http.query import parameters
from app.http.wire import read_address, read_name, wrong_name

Network = IPv4Network | IPv6Network

FORWARDED_FOR: Final = "X-Forwarded-For"
NAMES: Final = ("broker", "listener")
DENY_STATUSES: Final = (403, 429)

MAX_HOPS: Final = 64
"""The most entries of a list of forwarding proxies."""
_BLANKS: Final = " \t"
_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WITH_PORT: Final = re.compile(r"\[([^\]]*:[^\]]*)\](?::[0-9]{1,5})?|([0-9.]+):[0-9]{1,5}")
"""An entry of X-Forwarded-For with a port, as some proxies write it."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The headers that name the caller, and the proxies that are trusted."""

    principal: str = "X-Quotagate-Principal"
    client: str = "X-Quotagate-Client-Id"
    ip: str = "X-Quotagate-IP"
    trusted: tuple[Network, ...] = ()


class CallerIdentity(Struct, frozen=True, gc=False):
    """The caller that a request names."""

    principal: str | None
    client_id: str | None
    ip: str | None


class Callers:
    """Reads the caller from headers."""

    def __init__(self, sources: Sources) -> None:
        address = FORWARDED_FOR if sources.trusted else sources.ip
        spelled = (sources.principal, sources.client, address)
        self._spelled = {name.lower().encode(): name for name in spelled}
        self._principal, self._client, self._ip = (name.lower().encode() for name in spelled)
        self._trusted = sources.trusted
        self._is_trusted = lru_cache(4096)(lambda sent: is_in(sent, sources.trusted))

    def of(self, headers: HeadFields, errors: list[FieldError]) -> CallerIdentity:
        """Return the caller that these headers give; adds errors to ``errors``."""
        return CallerIdentity(
            self._name(self._principal, headers, errors) or None,
            self._name(self._client, headers, errors),
            self._address(headers, errors) if self._ip in headers else None,
        )

    def _name(self, header: bytes, headers: HeadFields, errors: list[FieldError]) -> str | None:
        values = headers.get(header)
        if not values:
            return None
        if len(values) > 1:
            errors.append(self._wrong(header, "is duplicated"))
        try:
            name = values[0].decode().strip(_BLANKS)
        except UnicodeDecodeError:
            errors.append(self._wrong(header, "must be UTF-8"))
            return None
        if name and (why := wrong_name(name)):
            errors.append(self._wrong(header, why))
        return name

    def _address(self, headers: HeadFields, errors: list[FieldError]) -> str | None:
        values = headers[self._ip]
        try:
            if self._trusted:
                return rightmost_untrusted(b",".join(values).decode("latin-1"), self._is_trusted)
            if len(values) > 1:
                errors.append(self._wrong(self._ip, "is duplicated"))
            text = values[0].decode("latin-1").strip(_BLANKS)
            return read_address(text) if text else None
        except EntityError as error:
            errors.append(self._wrong(self._ip, str(error)))
            return None

    def _wrong(self, header: bytes, message: str) -> FieldError:
        return FieldError(pointer(self._spelled[header]), message)


def rightmost_untrusted(forwarded_for: str, is_trusted: Callable[[str], bool]) -> str | None:
    """Return the nearest address that is not a trusted proxy's; addresses before it may be forged.

    >>> rightmost_untrusted("forged, 203.0.113.9:4711, 10.0.0.2", lambda address: address.startswith("10."))
    '203.0.113.9'

    Raises:
        EntityError: an entry on the way to it is not an address, or there are too many entries, so the caller
            is unknown.
    """
    rest = forwarded_for
    for _ in range(MAX_HOPS):
        rest, _, entry = rest.rpartition(",")
        entry = entry.strip(_BLANKS)
        if not entry:  # lists of RFC 9110 may have empty entries
            continue
        with_port = _WITH_PORT.fullmatch(entry)
        try:
            address = read_address(with_port[1] or with_port[2] if with_port else entry)
        except EntityError as error:
            raise EntityError(f"entry {entry[:64]!r} {error}") from None
        if not is_trusted(address):
            return address
    if rest:
        raise EntityError(f"has more than {MAX_HOPS} trusted proxies")
    return None


class CheckQuery(Struct, frozen=True, gc=False):
    """A parsed query, and its errors.

    Attributes:
        at_ms: None without it.
    """

    usage: Mapping[str, float]
    broker: str | None
    listener: str | None
    deny_status: int
    at_ms: int | None
    errors: tuple[FieldError, ...]


ONE_REQUEST: Final = CheckQuery({"requests": 1}, None, None, 429, None, ())
"""An empty query."""


def read_query(query: bytes, *, timed: bool) -> CheckQuery:
    """Read a query; if ``timed``, it may have ``at_ms``."""
    if not query:  # as most gateways ask
        return ONE_REQUEST
    values: dict[str, Any] = {}
    errors: list[FieldError] = []
    for name, text in _each_once(query, errors):
        try:
            values[name] = _value(name, text, timed=timed)
        except ValueError as wrong:
            errors.append(FieldError(pointer(name), str(wrong)))
    return CheckQuery(
        {field: values[field] for field in (*COUNTS, *AMOUNTS) if field in values} or {"requests": 1},
        values.get("broker"),
        values.get("listener"),
        values.get("deny_status", 429),
        values.get("at_ms"),
        tuple(errors),
    )


def _each_once(query: bytes, errors: list[FieldError]) -> Iterable[tuple[str, str]]:
    """Return names and values; a duplicated name is an error."""
    found: dict[str, str] = {}
    for name, value in parameters(query, errors):
        if name in found:
            errors.append(FieldError(pointer(name), "is duplicated"))
        else:
            found[name] = value
    return found.items()


def _value(name: str, text: str, *, timed: bool) -> int | float | str:
    """Return the value of a parameter.

    Raises:
        ValueError: names the valid values.
    """
    if name in COUNTS or (timed and name == "at_ms"):
        return int(_bounded(text, _INTEGER, "an integer"))
    if name in AMOUNTS:
        return _bounded(text, _NUMBER, "a number")
    if name in NAMES:
        return read_name(text)
    if name == "deny_status":
        if text not in map(str, DENY_STATUSES):
            raise ValueError(f"must be {' or '.join(map(str, DENY_STATUSES))}")
        return int(text)
    raise ValueError("is unknown")


def _bounded(text: str, syntax: re.Pattern[str], kind: str) -> float:
    """Return a JSON number within the bounds of usage, where integers are exact doubles."""
    if not syntax.fullmatch(text):
        raise ValueError(f"must be {kind}")
    number = float(text)
    if number < 0:
        raise ValueError("must be at least 0")
    if number > MAX_EXACT:
        raise ValueError(f"must be at most {MAX_EXACT}")
    return number


def invalid(errors: Sequence[FieldError]) -> ProblemError:
    """Return the 400 that names these parameters and headers."""
    headers = {"X-Throttle-Ms": "0", "Cache-Control": "no-store"}
    return ProblemError(400, "The request is invalid: see errors.", errors, headers)
