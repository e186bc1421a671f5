"""Which node a command asks, with which key: option, environment, configuration file, defaults."""

from __future__ import annotations

import ipaddress
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from app.run.errors import CannotAsk

DEFAULT_URL: Final = "http://127.0.0.1:8080"
PANEL: Final = "Connection"

Url = Annotated[
    str | None,
    typer.Option(
        envvar="QUOTAGATE_URL", help=f"The node to ask; {DEFAULT_URL} by default.", rich_help_panel=PANEL
    ),
]
Key = Annotated[str | None, typer.Option(envvar="QUOTAGATE_KEY", help="A key of it.", rich_help_panel=PANEL)]
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
"""What a configuration file may say."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """For a node that speaks TLS: whom to trust if not the system's authorities, and what to show it."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def __bool__(self) -> bool:
        return bool(self.ca or self.cert)


@dataclass(frozen=True, slots=True)
class Target:
    """A node to ask; ``key_from`` says where the key was found, for whoever wonders why it is refused."""

    url: str
    key: str | None
    key_from: str | None = None
    certificates: Certificates = Certificates()


@dataclass(frozen=True, slots=True)
class Configured:
    """What a configuration file says."""

    url: str | None = None
    key: str | None = None
    certificates: Certificates = Certificates()


def find(url: str | None, key: str | None, config: Path | None) -> Target:
    """The node and the key; options and environment come as ``url`` and ``key``.

    A key that was not given with the command goes only where it belongs: the file's to the file's node, the
    admin key of this machine to this machine, which no proxy is asked for.
    """
    path = config or _default_file()
    said = _read(path) if path.is_file() else Configured()
    where = (url or said.url or DEFAULT_URL).rstrip("/")
    if key and key.strip():
        return Target(where, key.strip(), None, said.certificates)
    if said.key and (url is None or said.url is None or where == said.url.rstrip("/")):
        return Target(where, said.key, str(path), said.certificates)
    kept = Path(os.environ.get("QUOTAGATE_HOME") or ".quotagate") / "admin.key"
    if is_here(where) and (own := _kept_key(kept)):
        return Target(where, own, str(kept), said.certificates)
    return Target(where, None, None, said.certificates)


def _default_file() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
    return Path(home) / "quotagate" / "config.toml"


def _read(path: Path) -> Configured:
    try:
        said = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CannotAsk(f"{path}: {error}") from None
    wrong = [name for name, value in said.items() if not isinstance(value, str) or not value]
    if unknown := sorted(said.keys() - set(NAMES)):
        raise CannotAsk(f"{path}: {', '.join(unknown)}: unknown; there are {', '.join(NAMES)}")
    if wrong:
        raise CannotAsk(f"{path}: {', '.join(wrong)}: must be text in quotes")
    if {"key", "key_file"} <= said.keys():
        raise CannotAsk(f"{path}: give key or key_file, not both")
    if "cert_key_file" in said and "cert_file" not in said:
        raise CannotAsk(f"{path}: cert_key_file goes with cert_file")
    files = {name: path.parent / Path(said[name]).expanduser() for name in said if name.endswith("_file")}
    key = said.get("key")
    if "key_file" in files:
        try:
            key = files["key_file"].read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise CannotAsk(f"{path}: key_file: {error}") from None
    certificates = Certificates(files.get("ca_file"), files.get("cert_file"), files.get("cert_key_file"))
    return Configured(said.get("url"), key, certificates)


def _kept_key(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):  # there is none, or it is not ours to read
        return None


def is_here(url: str) -> bool:
    """Whether a URL leads to loopback: this machine's own admin key goes there alone, and never by proxy."""
    import httpx  # noqa: PLC0415  the help does without it

    try:
        host = httpx.URL(url).host
        address = ipaddress.ip_address(host)
    except httpx.InvalidURL:
        return False
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
