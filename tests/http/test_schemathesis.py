"""Schemathesis finds nothing against the running program, by the OpenAPI document that it serves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service import Service, running

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=["app.run.cli", "tests.long_way"])
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """A node with the express lane, and one without it."""
    with running(program=request.param) as node:
        yield node


@pytest.mark.timeout(1200)  # thousands of requests, one after the other
@pytest.mark.parametrize("examples", [25, pytest.param(250, marks=pytest.mark.prove)])
def test_schemathesis_finds_nothing(service: Service, examples: int):
    ended = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("schemathesis")), "run", f"{service.url}/openapi.json"),
            *("--header", f"Authorization: Bearer {service.admin_key}"),
            *("--max-examples", str(examples), "--seed", "936", "--warnings", "off"),
        ],
        cwd=ROOT,  # where schemathesis.toml lies
        env={**os.environ, "SCHEMATHESIS_HOOKS": "tests.schemathesis_hooks", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout[-10_000:]}\n{ended.stderr}"
    assert "failed" not in service.logged()
