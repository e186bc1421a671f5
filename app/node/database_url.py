"""The URL of a catalog: a SQLite file, or a PostgreSQL server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from app.node.url import (
    Reader,
    Url,
    any_text,
    check_options,
    one_of,
    read_hosts,
    read_url,
    saying_how,
    seconds,
    whole,
)

POSTGRESQL_PORT: Final = 5432

_SOCKET: Final = "for a socket: postgresql:///NAME?host=/var/run/postgresql"
_SECONDS: Final = whole(0, 2**31 - 1)
_SWITCH: Final = one_of("0", "1")
_TLS_VERSION: Final = one_of("TLSv1", "TLSv1.1", "TLSv1.2", "TLSv1.3")
_PROTOCOL_VERSION: Final = one_of("3.0", "3.2", "latest")
_TEXTS: Final = (
    *("service", "user", "password", "passfile", "dbname", "client_encoding", "options", "application_name"),
    *("fallback_application_name", "sslcert", "sslkey", "sslpassword", "sslrootcert", "sslcrl", "sslcrldir"),
    *("requirepeer", "require_auth", "krbsrvname", "scram_client_key", "scram_server_key", "sslkeylogfile"),
    *("oauth_issuer", "oauth_client_id", "oauth_client_secret", "oauth_scope", "hostaddr"),
)
LIBPQ: Final[Mapping[str, Reader]] = {
    **dict.fromkeys(_TEXTS, any_text),
    "connect_timeout": _SECONDS,
    "keepalives": _SWITCH,
    "keepalives_idle": _SECONDS,
    "keepalives_interval": _SECONDS,
    "keepalives_count": _SECONDS,
    "tcp_user_timeout": _SECONDS,
    "channel_binding": one_of("disable", "prefer", "require"),
    "sslmode": one_of("disable", "allow", "prefer", "require", "verify-ca", "verify-full"),
    "sslnegotiation": one_of("postgres", "direct"),
    "sslcompression": _SWITCH,
    "sslcertmode": one_of("disable", "allow", "require"),
    "sslsni": _SWITCH,
    "ssl_min_protocol_version": _TLS_VERSION,
    "ssl_max_protocol_version": _TLS_VERSION,
    "min_protocol_version": _PROTOCOL_VERSION,
    "max_protocol_version": _PROTOCOL_VERSION,
    "gssencmode": one_of("disable", "prefer", "require"),
    "gsslib": one_of("gssapi", "sspi"),
    "gssdelegation": _SWITCH,
    "target_session_attrs": one_of("any", "read-write", "read-only", "primary", "standby", "prefer-standby"),
    "load_balance_hosts": one_of("disable", "random"),
}
"""The options of libpq, except for hosts and ports; not `replication`: such a connection takes no SQL."""


SQLITE: Final[Mapping[str, Reader]] = {"timeout": seconds}


@saying_how
def check(text: str) -> str:
    """Return the URL of a catalog, if it is valid.

    Raises:
        ValueError: the URL is not valid; the message quotes no part of it.
    """
    url = read_url(text, ("sqlite", "postgresql"), files=("sqlite",))
    if url.scheme == "sqlite":
        check_options(url.options, SQLITE)
        if url.path in {"", "/", "/:memory:"}:
            raise ValueError("must name a file, as in sqlite:///FILE")
    else:
        _check_postgresql(url)
    return text


def _check_postgresql(url: Url) -> None:
    hosts = [value for name, value in url.options if name == "host"]
    ports = [value for name, value in url.options if name == "port"]
    others = [option for option in url.options if option[0] not in {"host", "port"}]
    check_options(others, LIBPQ, "host, port, sslmode and the others of libpq")
    if url.place:
        if hosts or ports:
            raise ValueError("has the host both before and after the ?")
        if url.place[:3].upper() == "%2F":
            raise ValueError(f"has a path for a host; {_SOCKET}")
        read_hosts(url.place, POSTGRESQL_PORT)
        if "," in url.place:
            raise ValueError("has several hosts, which go after the ?: postgresql:///NAME?host=ONE&host=TWO")
    elif not hosts and not {"hostaddr", "service"} & {name for name, _ in others}:
        raise ValueError(f"has no host; {_SOCKET}")
    for each in ",".join(hosts).split(",") if hosts else ():
        if not each.startswith("/"):
            read_hosts(each, POSTGRESQL_PORT)
    for each in ",".join(ports).split(",") if ports else ():
        read_hosts(f"host:{each}", POSTGRESQL_PORT)
    if not re.fullmatch(r"(/[^/]*)?", url.path):
        raise ValueError("has more after the host than the name of a database")
