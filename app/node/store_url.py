"""The URL of a store: one server, a primary behind sentinels, or a cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from app.node.url import (
    PORT,
    Reader,
    any_text,
    check_options,
    one_of,
    read_hosts,
    read_url,
    saying_how,
    seconds,
    whole,
)

SINGLE_SCHEMES: Final = ("redis", "rediss", "unix")
SENTINEL_SCHEMES: Final = ("redis+sentinel", "rediss+sentinel")
CLUSTER_SCHEMES: Final = ("redis+cluster", "rediss+cluster")
SCHEMES: Final = (*SINGLE_SCHEMES, *SENTINEL_SCHEMES, *CLUSTER_SCHEMES)

REDIS_PORT: Final = 6379
SENTINEL_PORT: Final = 26379
OF_SENTINELS: Final = "sentinel_"
"""The prefix of the URL's options for connections to the sentinels."""

_DATABASE: Final = whole(0, 2**31 - 1)
_FLAG: Final = one_of("true", "false", "yes", "no", "True", "False", "Yes", "No", "1", "0")
_COMMON: Final[Mapping[str, Reader]] = {
    "username": any_text,
    "password": any_text,
    "client_name": any_text,
    "protocol": one_of("2", "3"),
    "socket_timeout": seconds,
    "socket_connect_timeout": seconds,
    "socket_read_size": whole(1, 2**30),
    "health_check_interval": whole(0, 2**31 - 1),
    "max_connections": whole(1, 2**31 - 1),
}
"""Options of every connection, by the names of redis-py; others would change how replies are read."""
_SINGLE: Final[Mapping[str, Reader]] = {**_COMMON, "db": _DATABASE, "retry_on_timeout": _FLAG}
_TCP: Final[Mapping[str, Reader]] = {"socket_keepalive": _FLAG}
_TLS: Final[Mapping[str, Reader]] = {
    "ssl_keyfile": any_text,
    "ssl_certfile": any_text,
    "ssl_cert_reqs": one_of("none", "optional", "required"),
    "ssl_ca_certs": any_text,
    "ssl_ca_data": any_text,
    "ssl_check_hostname": _FLAG,
    "ssl_min_version": one_of("771", "772"),
    "ssl_ciphers": any_text,
}
_TLS_OUTSIDE_CLUSTERS: Final[Mapping[str, Reader]] = {"ssl_ca_path": any_text, "ssl_password": any_text}

Options = dict[str, str]
"""Options of a connection, as in the URL, by the names of redis-py."""


class SentinelAddress(NamedTuple):
    """A primary behind sentinels.

    Attributes:
        name: the name of the primary at the sentinels.
        tls: whether all these connections use TLS.
        options: for connections to the primary.
        sentinel_options: for connections to the sentinels. They have credentials of their own, and the TLS
            options of the primary unless the URL has others for them.
    """

    sentinels: tuple[tuple[str, int], ...]
    name: str
    tls: bool
    options: Options
    sentinel_options: Options


@saying_how
def check(text: str) -> str:
    """Return the URL of a store, if it is valid and every client of ours can read it.

    Raises:
        ValueError: the URL is not valid; the message quotes no part of it.
    """
    url = read_url(text, SCHEMES)
    known = _known_options(url.scheme)
    with_tls = "" if url.scheme.startswith(("rediss", "unix")) else "; those of TLS need rediss"
    check_options(url.options, known, f"{', '.join(sorted(known))}{with_tls}")
    named = dict(url.options)
    number = url.path.removeprefix("/")
    if url.scheme in SENTINEL_SCHEMES:
        sentinel_address(text)
        if url.path.count("/") > len(("name", "database")):
            raise ValueError("has more after the name of the primary than a database")
        number = url.path.strip("/").partition("/")[2]
    elif url.scheme == "unix":
        if url.place or (not url.path) == ("path" not in named):
            raise ValueError("must name one socket, as in unix:///PATH")
        number = ""
    elif url.place or "host" not in named:
        read_hosts(url.place, REDIS_PORT)
        if not {"host", "port"}.isdisjoint(named):
            raise ValueError("has the host both before and after the ?")
        if url.scheme not in CLUSTER_SCHEMES and "," in url.place:
            raise ValueError("names several hosts: that is redis+sentinel:// or redis+cluster://")
    if number and not re.fullmatch("[0-9]{1,9}", number):
        raise ValueError("has a path that is not a database number")
    if url.scheme in CLUSTER_SCHEMES and int(number or 0) != 0:
        raise ValueError("has a database number, and a cluster has only database 0")
    if number and int(named.get("db", number)) != int(number):
        raise ValueError("has two database numbers")
    return text


def _known_options(scheme: str) -> Mapping[str, Reader]:
    """The options that a URL of a scheme may have."""
    tls = _TLS if scheme.startswith("rediss") else {}
    if scheme == "unix":
        return {**_SINGLE, "path": any_text}
    if scheme in CLUSTER_SCHEMES:
        return {**_COMMON, **_TCP, **tls, "db": whole(0, 0)}
    tls = {**tls, **_TLS_OUTSIDE_CLUSTERS} if tls else {}
    if scheme in SENTINEL_SCHEMES:
        readers = {**_SINGLE, **_TCP, **tls}
        return {
            **readers,
            **{f"{OF_SENTINELS}{name}": reader for name, reader in readers.items() if name != "db"},
        }
    return {**_SINGLE, **_TCP, **tls, "host": any_text, "port": PORT}


def scheme_of(url: str) -> str:
    """The scheme of a URL.

    >>> scheme_of("redis+sentinel://one,two/primary"), scheme_of("nothing")
    ('redis+sentinel', '')
    """
    return urlsplit(url).scheme


def is_cluster(url: str) -> bool:
    """Whether a URL names a cluster."""
    return scheme_of(url) in CLUSTER_SCHEMES


def place_of(url: str) -> str:
    """The hosts of a URL, without credentials.

    >>> place_of("redis+cluster://user:secret@one:1,two:2?x=1")
    'one:1,two:2'
    """
    return urlsplit(url).netloc.rpartition("@")[2]


def primary_of(url: str) -> str:
    """The primary of a URL as people are shown it: its address, socket, or name at its sentinels.

    >>> primary_of("redis://:secret@10.0.0.7"), primary_of("unix:///run/store.sock")
    ('10.0.0.7:6379', '/run/store.sock')
    >>> primary_of("redis+sentinel://:secret@one:1,two:2/main/2")
    'main'
    """
    if scheme_of(url) in SENTINEL_SCHEMES:
        return sentinel_address(url).name
    parts = urlsplit(url)
    named = dict(parse_qsl(parts.query))
    if parts.scheme == "unix":
        return unquote(parts.path) or named.get("path", "")
    place = place_of(url)
    return place if re.search(r":[0-9]+$", place) else f"{place or named.get('host', '')}:{REDIS_PORT}"


def sentinel_address(url: str) -> SentinelAddress:
    """Read ``redis+sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/NAME/DATABASE?OPTION=VALUE``.

    >>> sentinel_address("redis+sentinel://:secret@one:1,[::1]/primary/2").sentinels
    (('one', 1), ('::1', 26379))
    >>> sentinel_address("redis+sentinel://:secret@one/primary/2?sentinel_password=other").sentinel_options
    {'password': 'other'}

    Raises:
        ValueError: it has no sentinels or no name, or something in it cannot be read.
    """
    scheme, place, path, query, _ = urlsplit(url)
    credentials, _, hosts = place.rpartition("@")
    name, _, database = path.strip("/").partition("/")
    if not name:
        raise ValueError("must end in the name of the primary, as in redis+sentinel://HOST:PORT/NAME")
    options, sentinel_options = _credentials(credentials), Options()
    for option, text in parse_qsl(query):
        if option.startswith(OF_SENTINELS):
            sentinel_options[option.removeprefix(OF_SENTINELS)] = text
        else:
            options[option] = text
            if option.startswith("ssl_"):
                sentinel_options.setdefault(option, text)
    if database:
        if not database.isdigit():
            raise ValueError("the database after the name of the primary must be a number")
        options["db"] = database
    tls = scheme.startswith("rediss")
    return SentinelAddress(read_hosts(hosts, SENTINEL_PORT), unquote(name), tls, options, sentinel_options)


def single_url(url: str, host: str, port: int) -> str:
    """The URL of one server, with the credentials and options of a URL of several servers.

    >>> single_url("rediss+cluster://user:secret@one:1,two:2?ssl_ca_certs=ca.pem", "::1", 7)
    'rediss://user:secret@[::1]:7?ssl_ca_certs=ca.pem'
    """
    scheme, place, _, query, _ = urlsplit(url)
    credentials, at, _ = place.rpartition("@")
    bracketed = f"[{host}]" if ":" in host else host
    options = urlencode([pair for pair in parse_qsl(query) if not pair[0].startswith(OF_SENTINELS)])
    return urlunsplit((scheme.partition("+")[0], f"{credentials}{at}{bracketed}:{port}", "", options, ""))


def _credentials(text: str) -> Options:
    user, _, password = text.partition(":")
    named = {"username": unquote(user), "password": unquote(password)}
    return {option: value for option, value in named.items() if value}
