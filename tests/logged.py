"""Two nodes that log every decision, their workers, their traffic, and the content of the log."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import redis

from app.decision_log.batch import STREAM
from app.domain.digest import digest
from tests.programs import end
from tests.service import Service, eventually, running
from workers.decision_log.read import read
from workers.generate.drive import Drive, write_truth
from workers.generate.quotas import DEFINITIONS
from workers.generate.traffic import Traffic

SECRET: Final = bytes(range(32))
LIMIT: Final = 40
"""The limit of new ids per principal; only the busiest principals reach it."""
WITHIN_S: Final = 120.0
"""How long to wait for a child program on a busy machine."""


def definitions() -> dict[str, dict[str, dict[str, Any]]]:
    """The quotas of the traffic, with fewer ids and a window longer than any test."""
    found = copy.deepcopy(DEFINITIONS)
    found["user=*"]["producer_ids_rate"] = {"limit": LIMIT, "window_ms": 3_600_000}
    return found


@dataclass(frozen=True, slots=True)
class Logged:
    """Two nodes with one store and one catalog; ``folder`` holds the log."""

    nodes: tuple[Service, Service]
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a command that uses the same store, catalog and log."""
        bare = {name: value for name, value in os.environ.items() if not name.startswith("QUOTAGATE_")}
        return {
            **bare,
            **settings(self.folder),
            "QUOTAGATE_REDIS_URL": self.nodes[0].store_url,
            "QUOTAGATE_DATABASE_URL": self.nodes[0].database_url,
        }

    def run(
        self, *arguments: str, within_s: float = 400, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a Quotagate command to its end; ``environment`` adds variables."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "app.run.cli", *arguments],
            env={**self.environment, **(environment or {})},
            cwd=self.folder.parent,
            capture_output=True,
            text=True,
            check=False,
            timeout=within_s,
        )

    def drive(self, traffic: Traffic, truth: Path, *, paced: bool = False) -> dict[str, Any]:
        """Send traffic to both nodes in turn, and return the totals of its truth file."""
        urls = [node.url for node in self.nodes]
        totals = write_truth(Drive(traffic, urls, batch=10, paced=paced), truth)
        assert totals["failed"] == 0, totals["failures"]
        assert totals["sources"] == {"store": traffic.events}, totals["sources"]
        return totals

    def metric(self, name: str) -> float:
        """A metric without labels, summed over the nodes."""
        found = 0.0
        for node in self.nodes:
            lines = node.http.get("/metrics").text.splitlines()
            found += sum(float(line.split(" ")[1]) for line in lines if line.startswith(f"{name} "))
        return found

    def decisions(self) -> list[dict[str, Any]]:
        """The decisions in the log, in the store's order; no row twice."""
        table = read(self.folder)
        rows: list[dict[str, Any]] = table.filter(pa.compute.equal(table["kind"], "decision")).to_pylist()
        return sorted(rows, key=lambda row: row["order"] or 0)

    def until_written(self, decisions: int) -> list[dict[str, Any]]:
        """Wait until the log holds this many decisions, and the store none."""
        found: list[dict[str, Any]] = []

        def written() -> bool:
            nonlocal found
            if store.xlen(STREAM) or self.counted() < decisions:
                return False
            found = self.decisions()
            return len(found) >= decisions

        with redis.Redis.from_url(self.nodes[0].store_url) as store:
            eventually(written, within_s=WITHIN_S)
        assert len(found) == decisions, (len(found), decisions)
        return found

    def counted(self) -> int:
        """The number of rows by the files' footers; a row that is being merged may count twice."""
        try:
            return sum(pq.read_metadata(path).num_rows for path in self.folder.rglob("[!_.]*.parquet"))
        except FileNotFoundError:  # merged meanwhile
            return 0


@contextmanager
def two_nodes(folder: Path, **how: Any) -> Iterator[Logged]:
    """Run two nodes with the quotas of the traffic in force; ``how`` has further settings of both."""
    with ExitStack() as stack:
        first = stack.enter_context(running(environment=settings(folder), **how))
        same = {"store_url": first.store_url, "database_url": first.database_url}
        second = stack.enter_context(running(environment=settings(folder), **(how | same)))
        quotas = definitions()
        for entity, by_key in quotas.items():
            first.put(entity, **by_key)
        wanted = {(entity, key) for entity, by_key in quotas.items() for key in by_key}
        eventually(lambda: wanted <= in_force(second))
        yield Logged((first, second), folder)
        for node in (first, second):  # both at once; the stack waits for each
            node.process.terminate()


def in_force(node: Service) -> set[tuple[str, str]]:
    """The quotas that a node applies to a principal without quotas of its own."""
    someone = {"principal": "p", "ip": "10.0.0.1", "broker": "1", "listener": "EXTERNAL"}
    answer = node.http.get("/v1/quotas:effective", params=someone)
    return {(each["entity"], each["quota"]) for each in answer.json()["quotas"]}


@contextmanager
def workers(
    logged: Logged, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The workers as a child program; stopped at the end as an operator does.

    ``environment`` adds variables.
    """
    command = [sys.executable, "-P", "-m", "workers"]
    said = logged.folder.with_name("workers.jsonl")
    with said.open("ab") as output:
        program = subprocess.Popen(
            command,
            env={**logged.environment, **(environment or {})},
            cwd=logged.folder.parent,
            stdout=output,
            stderr=output,
        )
    try:
        yield program
    finally:
        end(program)


def logged_id(principal: str, producer_id: int) -> int:
    """An id in the form that the log holds."""
    return int.from_bytes(digest(SECRET, principal, producer_id), "big", signed=True)


def settings(folder: Path) -> dict[str, str]:
    """The settings of nodes, workers and commands whose log is in a folder."""
    return {
        "QUOTAGATE_LOG": "all",
        "QUOTAGATE_LOG_URL": str(folder),
        "QUOTAGATE_HASH_SECRET": SECRET.hex(),
    }
