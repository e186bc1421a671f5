"""What the URL of a store says: one server, the name of a primary that sentinels know, or a cluster."""

from __future__ import annotations

from typing import Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

SINGLE_SCHEMES: Final = ("redis", "rediss", "unix")
SENTINEL_SCHEMES: Final = ("redis+sentinel", "rediss+sentinel")
CLUSTER_SCHEMES: Final = ("redis+cluster", "rediss+cluster")
SCHEMES: Final = (*SINGLE_SCHEMES, *SENTINEL_SCHEMES, *CLUSTER_SCHEMES)

REDIS_PORT: Final = 6379
SENTINEL_PORT: Final = 26379
OF_SENTINELS: Final = "sentinel_"
"""Options of the URL that begin with this are those of connections to the sentinels."""

Options = dict[str, str]
"""Options of a connection, as the URL has them, by the names of redis-py."""


class SentinelAddress(NamedTuple):
    """A primary behind sentinels.

    Attributes:
        name: by which the sentinels know the primary.
        tls: whether all these connections use TLS.
        options: of connections to the primary.
        sentinel_options: of connections to the sentinels. They have credentials of their own, and TLS as the
            primary has it, except for what the URL says of them.
    """

    sentinels: tuple[tuple[str, int], ...]
    name: str
    tls: bool
    options: Options
    sentinel_options: Options


def scheme_of(url: str) -> str:
    """The scheme of a URL.

    >>> scheme_of("redis+sentinel://one,two/primary"), scheme_of("nothing")
    ('redis+sentinel', '')
    """
    return urlsplit(url).scheme


def is_cluster(url: str) -> bool:
    """Whether a URL is that of a cluster."""
    return scheme_of(url) in CLUSTER_SCHEMES


def place_of(url: str) -> str:
    """The hosts of a URL, without credentials.

    >>> place_of("redis+cluster://user:secret@one:1,two:2?x=1")
    'one:1,two:2'
    """
    return urlsplit(url).netloc.rpartition("@")[2]


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
    return SentinelAddress(hosts_of(hosts, SENTINEL_PORT), unquote(name), tls, options, sentinel_options)


def hosts_of(text: str, port: int) -> tuple[tuple[str, int], ...]:
    """Read ``HOST:PORT,HOST:PORT``; an IPv6 address has brackets.

    Args:
        port: of hosts without a port.

    Raises:
        ValueError: it names no host, or one that cannot be read.
    """
    hosts = []
    for part in text.split(","):
        try:
            parsed = urlsplit(f"//{part}")
            host, its_port = parsed.hostname, parsed.port
        except ValueError:
            host, its_port = None, None
        if not host:
            raise ValueError("must have HOST:PORT, or several separated by commas")
        hosts.append((host, its_port or port))
    return tuple(hosts)


def single_url(url: str, host: str, port: int) -> str:
    """The URL of one server, with the credentials and options of a URL of several.

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
