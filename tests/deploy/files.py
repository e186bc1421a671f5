"""Reads docker-compose.yml and the Dockerfile as Compose and Docker do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

import yaml

from tests.service import ADMIN_KEY

ROOT: Final = Path(__file__).parents[2]
COMPOSE: Final = ROOT / "docker-compose.yml"
DOCKERFILE: Final = ROOT / "Dockerfile"

SECRETS: Final = {
    "POSTGRES_PASSWORD": "f" * 64,
    "VALKEY_PASSWORD": "e" * 64,
    "QUOTAGATE_ADMIN_KEY": ADMIN_KEY,
    "QUOTAGATE_HASH_SECRET": "d" * 64,
}

_VARIABLE: Final = re.compile(r"\$(?:(?P<dollar>\$)|\{(?P<name>\w+)(?:(?P<must>:\?)|:-(?P<default>\w*))?\})")


class MissingVariableError(Exception):
    """A required variable is not set."""


def compose(environment: Mapping[str, str] = SECRETS, text: str | None = None) -> dict[str, Any]:
    """The compose file with its variables filled in and its merges resolved."""

    def value(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        found = environment.get(match["name"]) or match["default"] or ""
        if match["must"] and not found:
            raise MissingVariableError(match["name"])
        return found

    text = COMPOSE.read_text(encoding="utf-8") if text is None else text
    lines = [_VARIABLE.sub(value, line) for line in text.splitlines() if not line.lstrip().startswith("#")]
    found: dict[str, Any] = yaml.safe_load("\n".join(lines))
    return found


class Step(NamedTuple):
    """One instruction of the Dockerfile."""

    name: str
    rest: str


def dockerfile() -> list[Step]:
    """The instructions in order, with continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [Step(*line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def last_stage() -> dict[str, str]:
    """The last stage by instruction name; of repeated instructions, the last one."""
    stages: list[dict[str, str]] = []
    for step in dockerfile():
        if step.name == "FROM":
            stages.append({})
        if stages:  # before the first FROM there are only its arguments
            stages[-1][step.name] = step.rest
    return stages[-1]


def image_environment() -> dict[str, str]:
    """The variables that the image sets."""
    return dict(part.split("=", 1) for part in last_stage()["ENV"].split())


def image_command() -> list[str]:
    """The default command of a container."""
    found: list[str] = json.loads(last_stage()["CMD"])
    return found


def image_health_check() -> list[str]:
    """The command that checks whether a container is healthy."""
    found: list[str] = json.loads(last_stage()["HEALTHCHECK"].partition(" CMD ")[2])
    return found


def copied() -> Iterator[str]:
    """The paths that the Dockerfile copies from this folder."""
    for step in dockerfile():
        if step.name == "COPY" and not step.rest.startswith("--from="):
            yield from step.rest.split()[:-1]


def is_sent(path: str) -> bool:
    """Whether the builder is sent a path, by the last line of .dockerignore that matches it or its folder."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = True
    for line in lines:
        pattern = line.removeprefix("!")
        if not line or line.startswith("#"):
            continue
        names = [path, *map(str, PurePosixPath(path).parents)]
        if any(fnmatch(name, pattern) or fnmatch(f"/{name}", pattern.replace("**", "*")) for name in names):
            sent = line.startswith("!")
    return sent
