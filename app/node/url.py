"""The parts of a URL of the settings; an error never quotes any part of it, since any may be a secret."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from ipaddress import ip_address
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

ENCODE: Final = "percent-encode special characters, such as / by %2F, # by %23, @ by %40 and % by %25"

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*)://")
_STRAY_PERCENT: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_HOST: Final = re.compile(r"(?P<name>[\w.-]+|\[(?P<address>[^\[\]]+)\])(?P<rest>.*)", re.DOTALL)
_PORT: Final = re.compile(r"[0-9]{1,5}")
_HIGHEST_PORT: Final = 65_535

Reader = Callable[[str], object]
"""Takes the text of an option; raises a ValueError with the correct form."""


class Url(NamedTuple):
    """The parts of a URL, still percent-encoded.

    Attributes:
        credentials: ``USER:PASSWORD``; empty without them.
        place: one host or several, with their ports; empty for a file.
        options: names and values of the query, decoded.
    """

    scheme: str
    credentials: str
    place: str
    path: str
    options: tuple[tuple[str, str], ...]


def saying_how(check: Callable[[str], str]) -> Callable[[str], str]:
    """Add to the errors of a URL check how special characters are written: they cause most errors."""

    @wraps(check)
    def checked(text: str) -> str:
        try:
            return check(text)
        except ValueError as wrong:
            raise ValueError(f"{wrong}; {ENCODE}") from None

    return checked


def read_url(text: str, schemes: Collection[str], *, files: Collection[str] = ()) -> Url:
    """Split a URL, and refuse an invalid one.

    Args:
        schemes: the accepted schemes.
        files: the schemes of files, whose paths may hold blanks and ``@``, and which have no host.

    Raises:
        ValueError: the value is no such URL.
    """
    scheme = _SCHEME.match(text)
    if scheme is None or scheme[1] not in schemes:
        raise ValueError(f"must begin with {' or '.join(f'{each}://' for each in schemes)}")
    is_file = scheme[1] in files
    _check_characters(text, blanks=is_file)
    rest, question_mark, query = text[scheme.end() :].partition("?")
    place, slash, path = rest.partition("/")
    credentials, at, hosts = place.rpartition("@")
    if place.count("@") > 1:
        raise ValueError("has more than one @ before the path")
    if "@" in query or ("@" in path and not is_file):
        raise ValueError("has an @ after the host")
    if not {"[", "]"}.isdisjoint(credentials):
        raise ValueError("has a bracket in the user name or password")
    if is_file and (hosts or at):
        raise ValueError(f"names a file, so three slashes go before its path: {scheme[1]}:///PATH")
    try:
        _ = urlsplit(text).hostname  # as libraries read it; its errors quote the URL
    except ValueError:
        raise ValueError("cannot be read") from None
    return Url(scheme[1], credentials, hosts, slash + path, _options(query) if question_mark else ())


def read_hosts(text: str, port: int) -> tuple[tuple[str, int], ...]:
    """Read ``HOST:PORT,HOST:PORT``; an IPv6 address has brackets.

    Args:
        port: the port of hosts without one.

    Raises:
        ValueError: it names no host, or one that cannot be read.
    """
    return tuple(_host(part, port) for part in text.split(","))


def check_options(
    options: Collection[tuple[str, str]], known: Mapping[str, Reader], there_are: str | None = None
) -> None:
    """Refuse options that are unknown, wrong or given twice.

    Args:
        known: how to read the value of each option.
        there_are: the options that the message names; by default all known ones.

    Raises:
        ValueError: one of them cannot be used.
    """
    names = [name for name, _ in options]
    if not set(names) <= known.keys():
        raise ValueError(f"has an unknown option after ?; there are {there_are or ', '.join(sorted(known))}")
    for name, value in options:
        if names.count(name) > 1:
            raise ValueError(f"has the option {name} more than once")
        try:
            known[name](value)
        except ValueError as wrong:
            raise ValueError(f"has a wrong value of the option {name}: {wrong}") from None


def any_text(value: str) -> None:
    """Read an option whose value may be any text except the empty one.

    Raises:
        ValueError: the value is empty.
    """
    if not value:
        raise ValueError("it has none")


def one_of(*choices: str) -> Reader:
    """Return a reader of an option with these values."""

    def read(value: str) -> None:
        if value not in choices:
            raise ValueError(f"must be {', '.join(choices[:-1])} or {choices[-1]}")

    return read


def whole(least: int, most: int | None = None) -> Reader:
    """Return a reader of a whole number within bounds."""

    def read(value: str) -> None:
        number = int(value) if re.fullmatch(r"-?[0-9]{1,19}", value) else None
        if number is None or number < least or (most is not None and number > most):
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ValueError(f"must be a whole number, {bounds}")

    return read


def seconds(value: str) -> None:
    """Read an option that is a time in seconds, perhaps with a fraction.

    Raises:
        ValueError: the value is no such number, or 0.
    """
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value) or not float(value):
        raise ValueError("must be a number of seconds above 0")


PORT: Final = whole(1, _HIGHEST_PORT)


def _check_characters(text: str, *, blanks: bool) -> None:
    if text != text.strip():
        raise ValueError("begins or ends with a blank or a line break")
    if not text.isprintable() or (" " in text and not blanks):
        raise ValueError("has a blank, a line break or another control character")
    if "\\" in text:
        raise ValueError("has a backslash")
    if "#" in text:
        raise ValueError("has a #")
    if _STRAY_PERCENT.search(text):
        raise ValueError("has a % that begins no percent-encoded character")
    try:
        unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise ValueError("has percent-encoded characters that are not UTF-8") from None


def _options(query: str) -> tuple[tuple[str, str], ...]:
    if not query:
        return ()
    if not all("=" in part for part in query.split("&")):
        raise ValueError("has an option after ? without a value")
    return tuple(parse_qsl(query, keep_blank_values=True))


def _host(text: str, port: int) -> tuple[str, int]:
    found = _HOST.fullmatch(text)
    if found is None or (found["rest"] and not found["rest"].startswith(":")):
        raise ValueError("must have HOST:PORT, or several separated by commas")
    if found["address"] is not None:
        try:
            ip_address(unquote(found["address"]))
        except ValueError:
            raise ValueError("has brackets without an IPv6 address in them") from None
    port_text = found["rest"][1:]
    if found["rest"] and not (_PORT.fullmatch(port_text) and 1 <= int(port_text) <= _HIGHEST_PORT):
        raise ValueError(
            f"has a port that is not a number from 1 to {_HIGHEST_PORT}; an IPv6 address has brackets"
        )
    return found["address"] or found["name"], int(port_text or port)
