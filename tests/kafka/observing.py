"""Nodes and observers of one Kafka cluster, with one store and one catalog."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.node import tether
from tests.programs import Program, end
from tests.service import Service, eventually
from tests.service import running as node


class Observer(Program):
    """A running `quotagate workers`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._running = process
        self.log = log

    def logged(self) -> str:
        """Everything it has logged."""
        return self.log.read_text(encoding="utf-8")


def settings(bootstrap: str, **more: str) -> dict[str, str]:
    """Settings for nodes and observers alike; names are without `QUOTAGATE_`."""
    given = {
        "VOLUME_SOURCE": "kafka",
        "KAFKA_BOOTSTRAP": bootstrap,
        "VOLUME_CHECK_INTERVAL": "PT1S",
        "VOLUME_VALIDITY": "PT60S",
        **more,
    }
    return {f"QUOTAGATE_{name}": value for name, value in given.items()}


@contextmanager
def observer(node: Service, environment: Mapping[str, str]) -> Iterator[Observer]:
    """An observer at the store of a node."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("QUOTAGATE_")}
    own = {"QUOTAGATE_REDIS_URL": node.store_url, "QUOTAGATE_DATABASE_URL": node.database_url}
    with tempfile.TemporaryDirectory(prefix="qg-workers-") as home:
        log = Path(home) / "log.jsonl"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", str(Path(tether.__file__)), str(os.getpid())),
                    *(sys.executable, "-P", "-m", "workers"),
                ],
                env={**bare, **own, "QUOTAGATE_HOME": home, **environment},
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        started = Observer(process, log)
        try:
            eventually(
                lambda: '"event": "workers started"' in started.logged() or process.poll() is not None,
                within_s=60,
            )
            assert process.poll() is None, started.logged()
            yield started
        finally:
            if process.poll() is None:
                started.go_on()
            end(process)


@contextmanager
def nodes(count: int, environment: Mapping[str, str]) -> Iterator[list[Service]]:
    """So many nodes with one store and one catalog."""
    with ExitStack() as stack:
        first = stack.enter_context(node(environment=environment))
        store, catalog = first.store_url, first.database_url
        rest = [
            stack.enter_context(node(store_url=store, database_url=catalog, environment=environment))
            for _ in range(count - 1)
        ]
        yield [first, *rest]


def volumes(of: Service) -> dict[str, Any]:
    """The volumes and the factor, as a node shows them."""
    answer = of.http.get("/v1/volumes")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def volume(of: Service, broker: str) -> dict[str, Any]:
    """A broker's only volume, as a node shows it; empty if it knows none."""
    return next((found for found in volumes(of)["volumes"] if found["broker"] == broker), {})


def until_observed(of: Service, factor: float, brokers: int = 2) -> None:
    """Wait until all volumes are known and the factor has this value."""

    def so() -> bool:
        now = volumes(of)
        known = [found for found in now["volumes"] if found["observed_ms"] is not None]
        return now["factor"] == factor and len(known) == brokers and now["reason"].startswith(("obs", "viol"))

    eventually(so, within_s=60)


@dataclass(slots=True)
class Sampling:
    """Factors that nodes held, looked up all the while in a thread."""

    services: list[Service]
    found: list[set[float]] = field(default_factory=list)
    looks: int = 0
    trouble: str = ""


@contextmanager
def sampling(services: list[Service]) -> Iterator[Sampling]:
    """Sample the factor in each node's readiness, until the end of the block."""
    samples = Sampling(services, [set() for _ in services])
    over = threading.Event()

    def look() -> None:
        try:
            while not over.wait(0.02):
                for number, service in enumerate(services):
                    answer = service.http.get("/health/ready")
                    samples.found[number].add(answer.json()["throttle_factor"])
                samples.looks += 1
        except Exception as error:  # noqa: BLE001  it is asserted on
            samples.trouble = repr(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()
    assert not samples.trouble


def pid_of(owner: bytes | str | None) -> int | None:
    """The process that holds a lease, by the lease's value."""
    found = re.fullmatch(rb".*-(\d+)-[0-9a-f]+", owner if isinstance(owner, bytes) else b"")
    return int(found[1]) if found else None
