"""The node of a command, and the key for it: from options, environment, configuration file or defaults."""

from __future__ import annotations

import ipaddress
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from app.node.errors import NodeRequestError
from app.node.url import read_hosts, read_url, saying_how
from app.node.variables import QUOTED, is_quoted

DEFAULT_URL: Final = "http://127.0.0.1:8080"
PANEL: Final = "Connection"

Url = Annotated[
    str | None,
    typer.Option(
        envvar="QUOTAGATE_URL", help=f"The node to ask; {DEFAULT_URL} by default.", rich_help_panel=PANEL
    ),
]
Key = Annotated[
    str | None, typer.Option(envvar="QUOTAGATE_KEY", help="A key of the node.", rich_help_panel=PANEL)
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        exists=True,
        dir_okay=False,
        help="TOML with url, key or key_file, ca_file, cert_file and cert_key_file; "
        "~/.config/quotagate/config.toml by default.",
        rich_help_panel=PANEL,
    ),
]


NAMES: Final = ("url", "key", "key_file", "ca_file", "cert_file", "cert_key_file")
"""The names in a configuration file."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """The files for a node with TLS: the CA, if not the system's, and the client's certificate and key."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def __bool__(self) -> bool:
        return bool(self.ca or self.cert)


@dataclass(frozen=True, slots=True)
class Target:
    """A node, and the key for it; ``key_from`` is the file of the key, for error messages."""

    url: str
    key: str | None
    key_from: str | None = None
    certificates: Certificates = Certificates()


@dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """The content of a configuration file."""

    url: str | None = None
    key: str | None = None
    certificates: Certificates = Certificates()


def find(url: str | None, key: str | None, config: Path | None) -> Target:
    """Return the node and its key; ``url`` and ``key`` come from options or the environment.

    Without a key there, the node decides: the configuration file's key is sent only to the file's node, and
    this machine's admin key only to this machine, never through a proxy.

    Raises:
        NodeRequestError: the URL or the configuration file cannot be used.
    """
    path = config or _default_file()
    configured = _read(path) if path.is_file() else ConnectionConfig()
    where = (url or configured.url or DEFAULT_URL).rstrip("/")
    try:
        check_url(where)
    except ValueError as wrong:
        raise NodeRequestError(f"{'--url or QUOTAGATE_URL' if url else path}: the URL {wrong}") from None
    if key and is_quoted(key):
        raise NodeRequestError(f"--key or QUOTAGATE_KEY: {QUOTED}")
    if key and key.strip():
        return Target(where, key.strip(), None, configured.certificates)
    if configured.key and (url is None or configured.url is None or where == configured.url.rstrip("/")):
        return Target(where, configured.key, str(path), configured.certificates)
    kept = Path(os.environ.get("QUOTAGATE_HOME") or ".quotagate") / "admin.key"
    if is_loopback(where) and (own := _kept_key(kept)):
        return Target(where, own, str(kept), configured.certificates)
    return Target(where, None, None, configured.certificates)


@saying_how
def check_url(url: str) -> str:
    """Return the URL of a node, if it is valid.

    Raises:
        ValueError: the URL is not valid; the message quotes no part of it, as it may have a password.
    """
    if is_quoted(url):
        raise ValueError(QUOTED)
    parts = read_url(url, ("http", "https"))
    if parts.credentials:
        raise ValueError("has a user name or password; a node takes a key: --key or QUOTAGATE_KEY")
    if parts.options:
        raise ValueError("has options after a ?")
    read_hosts(parts.place, 1)
    return url


def _default_file() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
    return Path(home) / "quotagate" / "config.toml"


def _read(path: Path) -> ConnectionConfig:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NodeRequestError(f"{path}: {error}") from None
    wrong = [name for name, value in values.items() if not isinstance(value, str) or not value]
    if unknown := sorted(values.keys() - set(NAMES)):
        raise NodeRequestError(f"{path}: {', '.join(unknown)}: unknown; there are {', '.join(NAMES)}")
    if wrong:
        raise NodeRequestError(f"{path}: {', '.join(wrong)}: must be text in quotes")
    if {"key", "key_file"} <= values.keys():
        raise NodeRequestError(f"{path}: give key or key_file, not both")
    if "cert_key_file" in values and "cert_file" not in values:
        raise NodeRequestError(f"{path}: cert_key_file goes with cert_file")
    files = {name: path.parent / Path(values[name]).expanduser() for name in values if name.endswith("_file")}
    key = values.get("key")
    if "key_file" in files:
        try:
            key = files["key_file"].read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise NodeRequestError(f"{path}: key_file: {error}") from None
    certificates = Certificates(files.get("ca_file"), files.get("cert_file"), files.get("cert_key_file"))
    return ConnectionConfig(values.get("url"), key, certificates)


def _kept_key(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):  # missing, or not readable for us
        return None


def is_loopback(url: str) -> bool:
    """Whether a URL leads to loopback: a node there gets this machine's admin key, and no proxy is used."""
    import httpx

    try:
        host = httpx.URL(url).host
        address = ipaddress.ip_address(host)
    except httpx.InvalidURL:
        return False
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
