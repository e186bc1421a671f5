"""Which tests run in which tier: `make test` runs the first, `make test-all` everything.

A test is in the first tier unless `FULL` names it. The longest path of either table that leads to the test
decides, so a file can be kept in the first tier although its folder is not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
OF_DEBIAN: Final = frozenset({"redis", "pgbouncer"})
"""Parameters of tests that need a program from Debian; other parameters run the same tests without it."""

FULL: Final = {
    "tests/bench": "measurements: `make bench`",
    "tests/bounds/test_leases.py": "plays thousands of plans of adversaries",
    "tests/clients": "generates and compiles clients in four languages",
    "tests/connections": "runs proxies and storms of connections",
    "tests/console": "needs a browser",
    "tests/contract/test_cluster_traffic.py": "reshards clusters and kills their primaries",
    "tests/contract/test_filter_memory.py": "fills filters to their cap",
    "tests/contract/test_large_keys.py": "grows keys to many megabytes",
    "tests/contract/test_leases.py": "plays plans of adversaries against a store",
    "tests/contract/test_load.py": "compares many loads with the oracle",
    "tests/contract/test_pgbouncer.py": "needs PgBouncer from Debian",
    "tests/contract/test_machine.py": "3,000 steps on Redis, and every planted fault",
    "tests/contract/test_undo.py": "1,500 steps on Redis, and every planted fault",
    "tests/decision_log": "kills and stops the writer, fills its disk",
    "tests/deploy": "needs nginx and Prometheus from Debian",
    "tests/envoy/test_protos.py": "needs grpcio-tools",
    "tests/fuzz": "sends 20,000 requests",
    "tests/gateways": "needs nginx, Envoy and Caddy",
    "tests/generate": "writes logs and drives nodes",
    "tests/http/test_schemathesis.py": "sends thousands of requests, one after the other",
    "tests/jobs/test_audit_size.py": "generates large logs and needs DuckDB",
    "tests/jobs/test_leases.py": "drives a node on a primary and on a cluster",
    "tests/kafka": "needs Java, Maven and brokers",
    "tests/kafka_proxy": "needs Java, Maven and brokers",
    "tests/kafka_plugin": "needs Java, Maven and a broker",
    "tests/load": "attacks for minutes",
    "tests/prove": "long proofs: `make prove`",
    "tests/schemathesis_hooks.py": "belongs to tests/http/test_schemathesis.py",
    "tests/spark": "needs Java and Spark",
    "tests/system": "runs whole deployments through outages, floods and restarts",
    "workers/spark": "needs Java and Spark",
}
"""The reasons why `make test` leaves tests to `make test-all`, by path."""

FIRST: Final = frozenset(
    {
        "tests/contract/test_machine.py::test_store_and_oracle_agree",
        "tests/contract/test_undo.py::test_store_and_oracle_agree",
        "tests/load/test_minute.py",
        "tests/system/test_cli.py",
        "tests/system/test_vectors.py",
    }
)
"""Tests that stay in the first tier although their folder or file is in `FULL`."""


def is_full(test: str, parameters: Iterable[object] = ()) -> bool:
    """Whether only `make test-all` runs a test, given by its pytest id and its parameters."""
    return not OF_DEBIAN.isdisjoint(parameters) or _longest(test, FULL) > _longest(test, FIRST)


def is_full_throughout(path: str) -> bool:
    """Whether a file, folder or test, relative to the repository, has no test of the first tier."""
    return is_full(path) and not any(_leads_to(path, kept) for kept in FIRST)


def refusal(path: str) -> str:
    """Why `make test T=path` would run nothing, and what to run instead; empty if it runs something."""
    path = path.rstrip("/")
    if not is_full_throughout(path):
        return ""
    reason = max((each for each in FULL.items() if _leads_to(each[0], path)), key=lambda each: len(each[0]))
    return f"{reason[0]} is in the full tier ({reason[1]}): make test-all T={path}"


def _longest(test: str, paths: Iterable[str]) -> int:
    return max((len(path) for path in paths if _leads_to(path, test)), default=0)


def _leads_to(path: str, test: str) -> bool:
    return test == path or test.startswith((f"{path}/", f"{path}::", f"{path}["))


if __name__ == "__main__":
    sys.exit("\n".join(filter(None, map(refusal, sys.argv[1:]))) or 0)
