"""Runs the commands of two pages unchanged: measuring by shadow quotas, and holding a connection."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.service import ADMIN_KEY, Service, running
from tests.system.test_readme import Step, steps

DOCS: Final = Path(__file__).parents[2] / "docs"
ASKS: Final = 30


def test_commands_measure_without_limiting_and_then_limit():
    found = steps((DOCS / "quota-keys.md").read_text(encoding="utf-8"))
    sets = [step for step in found if "shadow=true" in step.command]
    assert len(sets) == 3
    assert found[: len(sets)] == sets, "measure first"
    with running() as node:
        for step in found:
            follow(step, node)
            if step is sets[-1]:
                assert [decision(node) for _ in range(ASKS)] == ["admit"] * ASKS
        assert "delay" in [decision(node, 1_000) for _ in range(ASKS)], "the last command limits"


def test_commands_hold_a_connection_and_ask_again():
    found = steps((DOCS / "kafka.md").read_text(encoding="utf-8"))
    assert sum("--recheck" in step.command for step in found) == 1
    with running() as node:
        for step in found:
            follow(step, node)


def follow(step: Step, node: Service) -> None:
    """Run a command as a reader does, and compare its output."""
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("QUOTAGATE_")},
        "PATH": search,
        "QUOTAGATE_URL": node.url,
        "QUOTAGATE_KEY": ADMIN_KEY,
        "COLUMNS": "200",
    }
    ran = subprocess.run(
        ["bash", "-c", step.command], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, f"{step.command}\n{ran.stdout}{ran.stderr}"
    assert step.matches(ran.stdout), f"{step.command}\n{ran.stdout}"


def decision(node: Service, requests: int = 1) -> str:
    usage = {"requests": requests, "produce_bytes": 1e6, "connections": 1}
    names = {
        "principal": "alice",
        "client_id": "etl",
        "ip": "10.0.0.7",
        "listener": "EXTERNAL",
        "broker": "1",
    }
    return str(node.ask(**names, usage=usage)["decision"])
