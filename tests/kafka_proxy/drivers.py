"""Kafka's clients of other languages, each behind the same commands: `clients/` has a program for each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

from tests.built import build
from tests.kafka.brokers import PASSWORDS
from tests.kafka_proxy import driven
from tests.kafka_proxy.driven import DrivenClient
from tests.tools import GO, need

HERE: Final = Path(__file__).parent / "clients"
BUILD_WITHIN_S: Final = 600.0
LOCK: Final = GO / ".kafka-clients"
TOOLCHAIN: Final = "its toolchain is the machine's own"


@contextmanager
def running(client: str, folder: Path, bootstrap: str, user: str) -> Iterator[DrivenClient]:
    """Producers of one of the `CLIENTS`, all with one user."""
    command = [*CLIENTS[client](), bootstrap, user, PASSWORDS[user]]
    with driven.running(folder, command) as started:
        yield started


def _go(library: str) -> list[str | Path]:
    return [_go_program(), library]


@cache
def _go_program() -> Path:
    """The program with the libraries of Go, rebuilt if its sources changed."""
    built = GO / "kafka-clients"
    # Independent of the machine's settings: no C compiler is needed, and go.sum gives the modules.
    plain = {"GOFLAGS": "-mod=readonly", "CGO_ENABLED": "0"}
    build(
        [need("go", TOOLCHAIN), "build", "-trimpath", "-o", built, "."],
        HERE / "go",
        LOCK,
        BUILD_WITHIN_S,
        plain,
    )
    return built


def _node() -> list[str | Path]:
    return [need("node", TOOLCHAIN), _node_program()]


@cache
def _node_program() -> Path:
    """The program with kafkajs, in the version of its lock file."""
    folder = HERE / "node"
    installed = folder / "node_modules" / ".package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < (folder / "package-lock.json").stat().st_mtime:
        build(
            [need("npm", TOOLCHAIN), "ci", "--no-audit", "--no-fund", "--ignore-scripts"],
            folder,
            LOCK,
            BUILD_WITHIN_S,
        )
        installed.touch()
    return folder / "main.mjs"


CLIENTS: Final[Mapping[str, Callable[[], list[str | Path]]]] = {
    "franz-go": lambda: _go("franz-go"),
    "sarama": lambda: _go("sarama"),
    "kafka-go": lambda: _go("kafka-go"),
    "kafkajs": _node,
    "aiokafka": lambda: [sys.executable, HERE / "aio.py"],
}
"""How to call each, once it is built."""
IDEMPOTENT: Final = tuple(client for client in CLIENTS if client != "kafka-go")
"""The clients whose producers have ids."""
