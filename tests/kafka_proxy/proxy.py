"""The proxy as a child: built once by its Makefile, started from a configuration file of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx
import yaml

from app.node import tether
from tests.built import build
from tests.kafka import maven
from tests.ports import free_row_of_ports
from tests.programs import Program
from tests.service import Service, eventually

PROJECT: Final = Path(__file__).parents[2] / "integrations" / "kafka-proxy"
BUILD_WITHIN_S: Final = 900.0
START_WITHIN_S: Final = 120.0
HOST: Final = "127.0.0.1"
TIMEOUT_MS: Final = 4_000
"""A long timeout, because a decision may come late on a crowded machine."""
NODES: Final = 2
"""The brokers that a proxy has ports for; their ids count from 1."""

# Small and quick to start, on a machine with two cores.
JVM: Final = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")


class Proxy(Program):
    """One proxy before a cluster; `bootstrap` is where clients connect."""

    def __init__(
        self, folder: Path, upstream: str, config: dict[str, object] | None, jvm: Sequence[str]
    ) -> None:
        self._upstream = upstream
        self._jvm = jvm
        self._config = config
        self._file = folder / "proxy.yaml"
        self._log = folder / "proxy.log"
        self.port = free_row_of_ports(1 + NODES)
        self.management = free_row_of_ports(1)

    @property
    def bootstrap(self) -> str:
        return f"{HOST}:{self.port}"

    def start(self) -> None:
        """Start it and wait until it says `ready`."""
        self._file.write_text(yaml.safe_dump(self._configuration()), encoding="utf-8")
        with self._log.open("wb") as log:
            self._running = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", str(Path(tether.__file__)), str(os.getpid())),
                    *(str(maven.JAVA), *self._jvm, "-jar", str(jar()), str(self._file)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        eventually(self._is_ready, within_s=START_WITHIN_S)

    def counted(self, metric: str, **labels: str) -> float:
        """The sum of a counter of the proxy over the series with these labels."""
        page = httpx.get(f"http://{HOST}:{self.management}/metrics", timeout=60, trust_env=False).text
        wanted = [f'{name}="{value}"' for name, value in labels.items()]
        return sum(
            float(line.rpartition(" ")[2])
            for line in page.splitlines()
            if line.startswith(f"{metric}{{") and all(each in line for each in wanted)
        )

    def logged(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _is_ready(self) -> bool:
        assert self.running.poll() is None, f"the proxy ended with {self.running.poll()}:\n{self.logged()}"
        return "ready" in self.logged().splitlines()

    def _configuration(self) -> dict[str, object]:
        brokers = {"name": "brokers", "start": 1, "end": NODES}
        ports = {"bootstrapAddress": self.bootstrap, "nodeIdRanges": [brokers]}
        cluster = {
            "name": "cluster",
            "targetCluster": {"bootstrapServers": self._upstream},
            "gateways": [{"name": "clients", "portIdentifiesNode": ports}],
        }
        configuration: dict[str, object] = {
            "virtualClusters": [cluster],
            "management": {"bindAddress": HOST, "port": self.management, "endpoints": {"prometheus": {}}},
        }
        if self._config is not None:
            filter_ = {"name": "quotas", "type": "Quotagate", "config": self._config}
            configuration |= {"filterDefinitions": [filter_], "defaultFilters": ["quotas"]}
        return configuration


@contextmanager
def running(
    folder: Path, upstream: str, config: dict[str, object] | None, *, jvm: Sequence[str] = JVM
) -> Iterator[Proxy]:
    """A proxy before a cluster with this configuration of the filter; None: without the filter."""
    proxy = Proxy(folder, upstream, config, jvm)
    try:
        proxy.start()
        yield proxy
    finally:
        proxy.kill()


def settings_for(folder: Path, node: Service) -> dict[str, object]:
    """The configuration of the filter for a node."""
    key = folder / "quotagate.key"
    key.write_text(node.admin_key, encoding="utf-8")
    # On a crowded machine a decision may come late; then nothing is to go through uncounted.
    return {"url": node.url, "keyFile": str(key), "timeoutMs": TIMEOUT_MS, "onFailure": "throttle"}


def jar() -> Path:
    """The program, rebuilt if sources are newer."""
    build(["make", "--no-print-directory"], PROJECT, PROJECT / "target" / ".lock", BUILD_WITHIN_S)
    return PROJECT / "target" / "proxy.jar"
