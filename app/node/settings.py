"""All settings: read from `QUOTAGATE_*` variables or a `.env` file, checked, with errors that name them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import quote

from dotenv import dotenv_values
from pydantic import (
    AfterValidator,
    BeforeValidator,
    DirectoryPath,
    Field,
    FilePath,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app import storage_location
from app.domain.digest import secret_of
from app.domain.volumes import Source, VolumeLimit, VolumeRules
from app.kafka import configuration as kafka_configuration
from app.node import cores, database_url, store_url, variables
from app.node.errors import SettingsError
from app.node.url import read_hosts, read_url, saying_how

PREFIX: Final = variables.PREFIX
ENV_FILE: Final = Path(".env")

CLIENT_VARIABLES: Final = frozenset({f"{PREFIX}URL", f"{PREFIX}KEY"})
"""Variables that only the commands for a running node read."""

MAX_PROCESSES: Final = 256
SHORTEST_CHECK_INTERVAL: Final = timedelta(milliseconds=100)
SHORTEST_ADMIN_KEY: Final = 16
"""The fewest characters of an admin key: anyone who can guess it may do everything."""

_UNQUOTED: Final = "/ @:=,+~!$&'()*;"
"""Characters that need no encoding in the path of a SQLite file."""

Network = IPv4Network | IPv6Network


def _empty_is_none(value: Any) -> Any:
    return None if value == "" else value


def _auto(value: Any) -> Any:
    return cores.api_processes(MAX_PROCESSES) if value == "auto" else value


def _split(separator: str, read: Callable[[str], object]) -> BeforeValidator:
    """Read `10.0.0.0/8, ::1` as its parts."""

    def split(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return tuple(read(part.strip()) for part in value.split(separator) if part.strip())

    return BeforeValidator(split)


def _iso_duration(value: Any) -> Any:
    """Refuse `60` and `1:00`, which Pydantic accepts although their unit is unclear."""
    if isinstance(value, str) and not re.fullmatch(r"P[0-9DWTHMS.]+", value):
        raise ValueError("must be an ISO 8601 duration, such as PT60S or P30D")
    return value


@saying_how
def _log_place(text: str) -> str:
    """Refuse an invalid URL of a decision log; a path may hold anything."""
    if scheme := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", text):
        if scheme[1] not in storage_location.SCHEMES:
            raise ValueError(storage_location.BEGINNINGS)
        url = read_url(text, storage_location.SCHEMES, files=("file",))
        if url.scheme != "file" and url.place:
            read_hosts(url.place, 0)
    return text


def _broker_places(text: str) -> str:
    kafka_configuration.servers(text)
    return text


def _secret(value: Any) -> Any:
    return secret_of(value) if isinstance(value, str) else value


Networks = Annotated[tuple[Network, ...], NoDecode, _split(",", ip_network)]
"""A single address is a network of one."""
Names = Annotated[tuple[str, ...], NoDecode, _split(";", str)]
"""Kafka's principals contain commas."""
HostName = Annotated[str, Field(pattern=r"^[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?$", max_length=253)]
HostNames = Annotated[tuple[HostName, ...], NoDecode, _split(",", str.lower)]
Header = Annotated[str, Field(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")]
Duration = Annotated[timedelta, BeforeValidator(_iso_duration), Field(ge=timedelta(0))]
HashSecret = Annotated[bytes, BeforeValidator(_secret)]
RedisUrl = Annotated[str, AfterValidator(store_url.check)]
DatabaseUrl = Annotated[str, AfterValidator(database_url.check)]
BrokerPlaces = Annotated[str, AfterValidator(_broker_places)]
LogPlace = Annotated[str, AfterValidator(_log_place)]


class Settings(BaseSettings):
    """The settings of one node, immutable. Times are durations, or have the unit in their name."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        extra="ignore",  # an env file may serve other programs too; unknown names of ours get a warning
        frozen=True,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=1, le=65_535)] = 8080
    """Port to listen on."""
    processes: Annotated[int, BeforeValidator(_auto), Field(ge=1, le=MAX_PROCESSES)] = 1
    """Number of API processes, which share the port; `auto` is one per core, less one for the store."""
    home: Path = Path(".quotagate")
    """Directory for the embedded store and catalog and the admin key; other users get no access."""
    # A URL may hold a password, so it is left out of the representation.
    redis_url: Annotated[RedisUrl | None, BeforeValidator(_empty_is_none), Field(repr=False)] = None
    """The store: `redis://`, `rediss://`, `unix://`, `redis+sentinel://HOST:PORT,HOST:PORT/NAME` or
    `redis+cluster://HOST:PORT,HOST:PORT` (with TLS: `rediss+...`). Without it, `quotagate up` runs an
    embedded store."""
    store_memory: Annotated[Annotated[int, Field(ge=8_388_608)] | None, BeforeValidator(_empty_is_none)] = (
        None
    )
    """Bytes that the embedded store may use (`maxmemory`). Without it, a quarter of the machine's memory."""
    database_url: Annotated[DatabaseUrl | None, BeforeValidator(_empty_is_none), Field(repr=False)] = None
    """The catalog: `sqlite://` or `postgresql://`, also behind PgBouncer that pools transactions or sessions.
    Without it, a SQLite file in the home directory."""

    admin_key: Annotated[SecretStr | None, BeforeValidator(_empty_is_none)] = None
    """The key with all scopes, at least 16 characters. A random default is kept in the home directory."""
    open_to: Networks = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
    """Networks, separated by commas, that may ask for decisions without a key; may be empty."""
    allowed_hosts: HostNames = ("localhost",)
    """Host names, separated by commas, for URLs of loopback callers without a key; addresses always work."""
    hash_secret: Annotated[HashSecret | None, BeforeValidator(_empty_is_none), Field(repr=False)] = None
    """Key for hashing producer ids: 32 bytes in hex. Without it, one is generated and kept in the catalog."""

    clock: Literal["store", "caller"] = "store"
    """Whose clock is used. `caller`: `at_ms` of each ask, for replays; only on a loopback address."""
    store_budget_ms: Annotated[int, Field(ge=1, le=60_000)] = 50
    """How long a store call may take, in milliseconds from when it was sent."""
    queue_ms: Annotated[int, Field(ge=1, le=60_000)] = 2_000
    """How long an ask may wait in a node, in milliseconds; asks that would wait longer are shed."""
    max_connections: Annotated[
        Annotated[int, Field(ge=1, le=1_000_000)] | None, BeforeValidator(_empty_is_none)
    ] = None
    """The most connections of one API process, on all its ports; beyond it an idle one is closed.
    Without it, 8192; with TLS, whose connections take more memory, 3072."""
    max_connections_per_address: Annotated[
        Annotated[int, Field(ge=1, le=1_000_000)] | None, BeforeValidator(_empty_is_none)
    ] = None
    """The most connections from one address (IPv6: one /64) to one API process; further ones are closed.
    Without it, 2048; with TLS, 768."""
    drain_ms: Annotated[int, Field(ge=0, le=600_000)] = 2_000
    """How long a node that gets SIGTERM goes on serving, in milliseconds, not ready and with `Connection:
    close`; longer than the idle timeout of proxies in front of it."""
    combine_delays: Literal["max", "sequential"] = "max"
    """How delays combine: the longest, or the request delay after the byte delay (KIP-124's text)."""
    max_debt: Annotated[Duration, Field(ge=timedelta(seconds=1), le=timedelta(days=24))] = timedelta(hours=1)
    """The longest debt of a token bucket; the rest is forgiven. Equal on all nodes: `migrate --max-debt`."""
    history_retention: Annotated[Duration | None, BeforeValidator(_empty_is_none)] = None
    """How long the history keeps changes of quotas; the newest of each entity stays. Without it, for ever."""
    reports: Annotated[DirectoryPath | None, BeforeValidator(_empty_is_none)] = None
    """A folder whose reports of audits and what-ifs the console may show; not the home, nor above it."""
    inter_broker_listener: Annotated[str | None, BeforeValidator(_empty_is_none)] = None
    """The listener whose connections do not count towards the broker-wide limit."""

    check_principal_header: Header = "X-Quotagate-Principal"
    """Header with the principal, for `/v1/check`."""
    check_client_header: Header = "X-Quotagate-Client-Id"
    """Header with the client-id, for `/v1/check`."""
    check_ip_header: Header = "X-Quotagate-IP"
    """Header with the client's address, for `/v1/check`."""
    trusted_proxies: Networks = ()
    """Networks that `/v1/check` trusts to set `X-Forwarded-For`. If set, the address header is ignored."""
    ipv6_prefix: Annotated[int, Field(ge=1, le=128)] = 64
    """IPv6 addresses with this many leading bits in common share a default quota's bucket."""

    # At least 2: a deny quota with one sample could not be decided.
    samples: Annotated[int, Field(ge=2, le=100)] = 11
    """Default number of samples of a rate."""
    sample_ms: Annotated[int, Field(ge=100, le=3_600_000)] = 1_000
    """Default length of a sample in milliseconds."""
    producer_id_window_ms: Annotated[int, Field(ge=1_000, le=2_073_600_000)] = 3_600_000
    """Default window of the producer-id quota in milliseconds."""
    producer_id_layers: Literal["layered", "kip936", "timed"] = "layered"
    """Default layer policy of the producer-id quota."""
    max_ids_per_principal: Annotated[int, Field(ge=100, le=10_000_000)] = 1_000_000
    """The most producer ids remembered for one principal."""

    tls_cert: Annotated[FilePath | None, BeforeValidator(_empty_is_none)] = None
    """The server's TLS certificate chain, a PEM file."""
    tls_key: Annotated[FilePath | None, BeforeValidator(_empty_is_none)] = None
    """The private key of the TLS certificate, a PEM file."""
    tls_client_ca: Annotated[FilePath | None, BeforeValidator(_empty_is_none)] = None
    """CA certificates, a PEM file. If set, callers need a client certificate; its name is the caller's."""

    envoy_port: Annotated[Annotated[int, Field(ge=1, le=65_535)] | None, BeforeValidator(_empty_is_none)] = (
        None
    )
    """Port of the rate-limit service for Envoy (gRPC), which needs the extra `envoy`. Without it, none."""
    envoy_mapping: Annotated[FilePath | None, BeforeValidator(_empty_is_none)] = None
    """File that says which principal and client-id Envoy's descriptors name (docs/envoy.md)."""

    volume_source: Annotated[Source | None, BeforeValidator(_empty_is_none)] = None
    """Where disk usage comes from. Without it, full volumes throttle nothing."""
    volume_min_available_bytes: Annotated[
        Annotated[int, Field(gt=0)] | None, BeforeValidator(_empty_is_none)
    ] = None
    """A volume violates its limit with this many bytes available, or fewer."""
    volume_min_available_ratio: Annotated[
        Annotated[float, Field(gt=0, lt=1)] | None, BeforeValidator(_empty_is_none)
    ] = None
    """A volume violates its limit with this fraction of its bytes available, or less."""
    volume_check_interval: Duration = timedelta(seconds=60)
    """Time between observations; `PT0S` turns checking off."""
    volume_validity: Duration = timedelta(minutes=5)
    """How long a throttle factor holds when observations fail."""
    volume_fallback_factor: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The throttle factor after that time."""
    volume_excluded_principals: Names = ()
    """Principals, separated by `;`, that the throttle factor does not affect."""

    kafka_bootstrap: Annotated[BrokerPlaces | None, BeforeValidator(_empty_is_none)] = None
    """Brokers to ask for disk usage: `host:port`, separated by commas."""
    kafka: Annotated[dict[str, str], NoDecode, Field(repr=False)] = {}
    """Properties of the Kafka client, such as `QUOTAGATE_KAFKA_SECURITY_PROTOCOL`."""

    log: Literal["all", "denied", "off"] = "denied"
    """Decisions that go to the log. `denied`: refusals, delays, and answers by policy."""
    log_url: Annotated[LogPlace | None, BeforeValidator(_empty_is_none), Field(repr=False)] = None
    """Folder or object store of the decision log. Without it, the folder `log` in the home directory."""
    log_ids: Literal["hashed", "plain"] = "hashed"
    """How producer ids are written to the decision log."""
    log_retention: Duration = timedelta(days=30)
    """How long the decision log is kept."""
    log_max_bytes: Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(_empty_is_none)] = None
    """The most bytes of the decision log; the oldest hours are deleted first. Without it, no limit."""

    _unknown_variables: tuple[str, ...] = PrivateAttr(())

    @field_validator("admin_key")
    @classmethod
    def _is_a_key(cls, key: SecretStr | None) -> SecretStr | None:
        if key is None:
            return None
        if not re.fullmatch(r"[!-~]+", key.get_secret_value()):
            raise ValueError("must be visible ASCII without spaces, as it is sent in a header")
        if len(key.get_secret_value()) < SHORTEST_ADMIN_KEY:
            raise ValueError(f"must be at least {SHORTEST_ADMIN_KEY} characters, or it can be guessed")
        return key

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.clock == "caller" and not _is_loopback(self.host):
            raise ValueError(
                f"{PREFIX}CLOCK: caller lets callers set the time, so {PREFIX}HOST must be a loopback address"
            )
        if self.reports and _holds(self.reports, self.home):
            raise ValueError(
                f"{PREFIX}REPORTS: is or holds {PREFIX}HOME, whose files are secret; use a folder of its own"
            )
        if self.envoy_port == self.port:
            raise ValueError(f"{PREFIX}ENVOY_PORT: must differ from {PREFIX}PORT")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError(f"{PREFIX}TLS_CERT: needs {PREFIX}TLS_KEY, and the other way round")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError(f"{PREFIX}TLS_CLIENT_CA: needs {PREFIX}TLS_CERT and {PREFIX}TLS_KEY")
        limits = (self.volume_min_available_bytes, self.volume_min_available_ratio)
        if limits.count(None) == 0 or (self.volume_source and limits.count(None) != 1):
            raise ValueError(
                f"{PREFIX}VOLUME_MIN_AVAILABLE_BYTES: set exactly one of it and "
                f"{PREFIX}VOLUME_MIN_AVAILABLE_RATIO with a {PREFIX}VOLUME_SOURCE"
            )
        if timedelta(0) < self.volume_check_interval < SHORTEST_CHECK_INTERVAL:
            raise ValueError(
                f"{PREFIX}VOLUME_CHECK_INTERVAL: must be at least PT0.1S, or PT0S to turn checking off"
            )
        if self.volume_source and timedelta(0) < self.volume_check_interval > self.volume_validity:
            raise ValueError(
                f"{PREFIX}VOLUME_VALIDITY: must not be shorter than {PREFIX}VOLUME_CHECK_INTERVAL, "
                "or the factor expires before the next observation"
            )
        if self.volume_source == "kafka":
            if not self.kafka_bootstrap:
                raise ValueError(f"{kafka_configuration.BOOTSTRAP}: is needed by {PREFIX}VOLUME_SOURCE=kafka")
            kafka_configuration.servers(self.kafka_bootstrap)
            kafka_configuration.check(self.kafka)
        return self

    @property
    def unknown_variables(self) -> tuple[str, ...]:
        """The ``QUOTAGATE_`` variables that nothing read when these settings were loaded."""
        return self._unknown_variables

    @property
    def catalog_url(self) -> str:
        """The catalog's URL; by default the embedded catalog's."""
        return (
            self.database_url or f"sqlite:///{quote(str(self.home.resolve() / 'catalog.db'), safe=_UNQUOTED)}"
        )

    @property
    def max_debt_ms(self) -> int:
        """The longest debt of a token bucket in whole milliseconds."""
        return round(self.max_debt / timedelta(milliseconds=1))

    @property
    def history_retention_ms(self) -> int | None:
        """How long changes of quotas are kept, in whole milliseconds; None means for ever."""
        kept = self.history_retention
        return None if kept is None else round(kept / timedelta(milliseconds=1))

    @property
    def volume_rules(self) -> VolumeRules:
        """The rules for volumes, equal for all nodes and observers; an interval of 0 means no source."""
        interval_ms = round(self.volume_check_interval.total_seconds() * 1000)
        return VolumeRules(
            source=self.volume_source if interval_ms else None,
            limit=VolumeLimit(self.volume_min_available_bytes, self.volume_min_available_ratio),
            interval_ms=interval_ms,
            validity_ms=round(self.volume_validity.total_seconds() * 1000),
            fallback=self.volume_fallback_factor,
            excluded=frozenset(self.volume_excluded_principals),
        )

    @property
    def base_url(self) -> str:
        """The API's URL for a caller on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104
        return f"{'https' if self.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{self.port}"


def load(env_file: Path | None = None) -> Settings:
    """Read the settings: the environment overrides `env_file` (default: `.env`, if it exists).

    Raises:
        SettingsError: a setting is invalid, or the file does not exist or cannot be read.
    """
    if env_file is not None and not env_file.is_file():
        raise SettingsError(f"{env_file}: no such file")
    path = env_file or ENV_FILE
    try:
        given = given_variables(path)
        refused = variables.refusals(given, known_variables())
        settings = Settings(_env_file=path, kafka=kafka_properties(given))
    except ValidationError as invalid:
        refused |= {name: line for name, line in _explain(invalid) if name not in refused}
    except (OSError, UnicodeDecodeError) as unreadable:
        raise SettingsError(f"{path}: {_reason(unreadable)}") from None
    if refused:
        raise SettingsError(*refused.values())
    settings._unknown_variables = tuple(unknown_variables(given))  # noqa: SLF001  its own module
    return settings


def given_variables(env_file: Path | None = None) -> dict[str, str]:
    """Return the `QUOTAGATE_*` variables of the file and the environment, which takes precedence."""
    return {**_ours(_file(env_file or ENV_FILE)), **_ours(os.environ)}


def kafka_properties(given: Mapping[str, str]) -> dict[str, str]:
    """Return the Kafka client's properties (`security_protocol` ...) among variables."""
    return {
        name.removeprefix(kafka_configuration.PREFIX).lower(): value
        for name, value in given.items()
        if name.startswith(kafka_configuration.PREFIX)
        and name != kafka_configuration.BOOTSTRAP
        and not variables.is_service_link(name, value)
    }


def unknown_variables(given: Mapping[str, str]) -> list[str]:
    """Return the `QUOTAGATE_*` variables that nothing reads: typos, and the service links of Kubernetes."""
    known = known_variables()
    return sorted(name for name in given if name not in known)


def explained(name: str, given: Mapping[str, str]) -> str:
    """Return the likely reason why nothing reads a variable; empty if there is no hint."""
    return variables.explained(name, given.get(name, ""), known_variables())


def known_variables() -> frozenset[str]:
    """Return the names of all variables that are read, and of Kafka's that are refused with a hint."""
    names = CLIENT_VARIABLES | {PREFIX + name.upper() for name in Settings.model_fields if name != "kafka"}
    return names | {kafka_configuration.PREFIX + name.upper() for name in kafka_configuration.NAMES}


def _file(path: Path) -> Mapping[str, str | None]:
    return dotenv_values(path) if path.is_file() else {}


def _ours(given: Mapping[str, str | None]) -> dict[str, str]:
    return {name.upper(): value or "" for name, value in given.items() if name.upper().startswith(PREFIX)}


def _explain(refused: ValidationError) -> Iterator[tuple[str, str]]:
    """The NAME of each fault, and its text `NAME: ...` without the value, which may be a secret."""
    for fault in refused.errors(include_url=False, include_input=False):
        message = fault["msg"].removeprefix("Value error, ")
        if fault["loc"]:
            name = PREFIX + str(fault["loc"][0]).upper()
            yield name, f"{name}: {message[0].lower() + message[1:]}"
        else:
            yield message.partition(":")[0], message


def _reason(unreadable: OSError | UnicodeDecodeError) -> str:
    if isinstance(unreadable, OSError):
        return f"cannot be read: {unreadable.strerror}"
    return f"is not UTF-8: byte {unreadable.start} is wrong"


def _holds(folder: Path, other: Path) -> bool:
    """Whether two paths lead to one folder, or the first to a folder above the second (may be missing)."""
    there = other.resolve()
    return any(place.exists() and place.samefile(folder) for place in (there, *there.parents))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
