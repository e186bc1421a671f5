"""`QUOTAGATE_KAFKA_*` variables as the configuration of kafka-python, with errors that name the variable."""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

PREFIX: Final = "QUOTAGATE_KAFKA_"
BOOTSTRAP: Final = f"{PREFIX}BOOTSTRAP"
DEFAULT_PORT: Final = 9092
DEFAULT_TIMEOUT_MS: Final = 30_000

PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")

JAVA_NAMES: Final = {
    "ssl_truststore_location": "SSL_CAFILE, a PEM file, holds the trusted certificates",
    "ssl_truststore_certificates": "SSL_CAFILE, a PEM file, holds the trusted certificates",
    "ssl_keystore_location": "SSL_CERTFILE and SSL_KEYFILE, PEM files, hold the certificate and key",
    "ssl_endpoint_identification_algorithm": "SSL_CHECK_HOSTNAME, true or false, checks the host name",
}
"""Properties of the Java client, with their replacements here."""

_JAAS: Final = re.compile(
    r"\s*org\.apache\.kafka\.common\.security\.(?:plain\.Plain|scram\.Scram)LoginModule\s+required\s+"
    r'(?P<options>(?:"(?:[^"\\]|\\.)*"|[^";])*);?\s*'
)
_JAAS_OPTION: Final = re.compile(r'(\w+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|(\S+))')


def check(properties: Mapping[str, str]) -> None:
    """Raise a ValueError for properties that cannot be used; its text begins with the variable's name."""
    configuration(properties)


def configuration(properties: Mapping[str, str]) -> dict[str, object]:
    """Return the arguments for kafka-python from properties such as `security_protocol` and their values.

    Raises:
        ValueError: one of them cannot be used; the text begins with the variable's name.
    """
    # Java's names have dots, which a variable's name cannot have.
    given = {name.lower().replace(".", "_"): value for name, value in properties.items() if value != ""}
    login = _login(given.pop("sasl_jaas_config")) if "sasl_jaas_config" in given else {}
    found: dict[str, object] = {}
    for name, value in {**login, **given}.items():
        if name not in _KINDS:
            known = ", ".join(one.upper() for one in PROPERTIES)
            hint = f"{PREFIX}{JAVA_NAMES[name]}" if name in JAVA_NAMES else f"known are {known}"
            raise ValueError(f"{PREFIX}{name.upper()}: is not a property of the Kafka client here; {hint}")
        try:
            found[name] = _KINDS[name](value)
        except ValueError as refused:
            raise ValueError(f"{PREFIX}{name.upper()}: {refused}") from None
    _check_combinations(found)
    return found


def servers(bootstrap: str) -> list[str]:
    """Return the `host:port` of each bootstrap server.

    Raises:
        ValueError: the value is no such list; the text begins with the variable's name.
    """
    found = []
    for part in filter(None, (piece.strip() for piece in bootstrap.split(","))):
        place = re.fullmatch(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::(?P<port>[0-9]{1,5}))?", part)
        port = int(place["port"] or DEFAULT_PORT) if place else 0
        if place is None or not 1 <= port <= 65_535:
            raise ValueError(f"{BOOTSTRAP}: must be host:port, or several separated by commas")
        found.append(f"{place['host']}:{port}")
    if not found:
        raise ValueError(f"{BOOTSTRAP}: names no broker")
    return found


def address(host: str, port: int) -> str:
    """Return a broker's `host:port`, with an IPv6 address in brackets.

    >>> address("kafka-1", 9092), address("::1", 9092)
    ('kafka-1:9092', '[::1]:9092')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def silence_library() -> None:
    """Keep kafka-python's own log lines out of the log; the caller reports the error."""
    logging.getLogger("kafka").setLevel(logging.CRITICAL)


def _login(jaas: str) -> dict[str, str]:
    """The user and password that Java's `sasl.jaas.config` holds, as Strimzi's secrets spell it."""
    module = _JAAS.fullmatch(jaas)
    options = {
        name: re.sub(r"\\(.)", r"\1", quoted) or bare
        for name, quoted, bare in _JAAS_OPTION.findall(module["options"] if module else "")
    }
    if not {"username", "password"} <= options.keys():
        raise ValueError(
            f"{PREFIX}SASL_JAAS_CONFIG: must be a PlainLoginModule or ScramLoginModule, required, with a"
            " username and a password"
        )
    return {"sasl_plain_username": options["username"], "sasl_plain_password": options["password"]}


def _check_combinations(found: Mapping[str, object]) -> None:
    """Refuse properties that would be ignored, or would fail only at the first connection."""
    protocol = str(found.get("security_protocol", "PLAINTEXT"))
    sasl, tls = "SASL" in protocol, protocol in ("SSL", "SASL_SSL")
    for name in found:
        if name.startswith("sasl_") and not sasl:
            raise ValueError(
                f"{PREFIX}{name.upper()}: needs {PREFIX}SECURITY_PROTOCOL=SASL_SSL or SASL_PLAINTEXT"
            )
        if name.startswith("ssl_") and not tls:
            raise ValueError(f"{PREFIX}{name.upper()}: needs {PREFIX}SECURITY_PROTOCOL=SSL or SASL_SSL")
    for name in ("sasl_mechanism", "sasl_plain_username", "sasl_plain_password"):
        if sasl and name not in found:
            raise ValueError(f"{PREFIX}{name.upper()}: is needed by {PREFIX}SECURITY_PROTOCOL={protocol}")
    if "ssl_keyfile" in found and "ssl_certfile" not in found:
        raise ValueError(f"{PREFIX}SSL_KEYFILE: goes with {PREFIX}SSL_CERTFILE")
    _check_files(found)


def _check_files(found: Mapping[str, object]) -> None:
    """Refuse files that TLS cannot use. They are read again at each connection, so they can be replaced."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if cafile := found.get("ssl_cafile"):
        try:
            context.load_verify_locations(str(cafile))
        except OSError:
            raise ValueError(f"{PREFIX}SSL_CAFILE: must hold certificates in PEM") from None
    if certfile := found.get("ssl_certfile"):
        keyfile, password = found.get("ssl_keyfile"), str(found.get("ssl_password", ""))
        try:
            context.load_cert_chain(str(certfile), str(keyfile) if keyfile else None, password)
        except OSError:
            raise ValueError(
                f"{PREFIX}SSL_CERTFILE: must hold a certificate in PEM, with its key there or in"
                f" {PREFIX}SSL_KEYFILE, and {PREFIX}SSL_PASSWORD must open it"
            ) from None


def _one_of(*choices: str) -> Callable[[str], str]:
    def read(value: str) -> str:
        if value.upper() not in choices:
            raise ValueError(f"must be {', '.join(choices[:-1])} or {choices[-1]}")
        return value.upper()

    return read


def _flag(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    return value.lower() == "true"


def _milliseconds(value: str) -> int:
    if not re.fullmatch(r"[1-9][0-9]{0,8}", value):
        raise ValueError("must be a whole number of milliseconds above 0")
    return int(value)


def _file(value: str) -> str:
    if not Path(value).is_file():
        raise ValueError("must name an existing file")
    return value


_KINDS: Final[Mapping[str, Callable[[str], object]]] = {
    "security_protocol": _one_of(*PROTOCOLS),
    "sasl_mechanism": _one_of(*MECHANISMS),
    "sasl_plain_username": str,
    "sasl_plain_password": str,
    "ssl_cafile": _file,
    "ssl_certfile": _file,
    "ssl_keyfile": _file,
    "ssl_password": str,
    "ssl_check_hostname": _flag,
    "client_id": str,
    "request_timeout_ms": _milliseconds,
}

PROPERTIES: Final = (*_KINDS, "sasl_jaas_config")
"""The names of the properties that are read."""
NAMES: Final = frozenset({*PROPERTIES, *JAVA_NAMES})
"""The properties that are read, or refused with a hint."""
