"""Schemathesis finds nothing against the running program, by the OpenAPI document that it serves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from app.http.routes.decisions import BATCH, ONE
from tests.service import running

ROOT = Path(__file__).parents[2]

ONLY: Final[dict[str, tuple[str, ...]]] = {"app.run.cli": (), "tests.handed_over": (ONE, BATCH)}
"""The routes to try with each program; none means all. With handed-over connections, only hot routes differ.

All other routes are served by the same protocol in both programs.
"""


@pytest.mark.timeout(1200)  # thousands of requests, one after the other
@pytest.mark.parametrize("examples", [10, pytest.param(250, marks=pytest.mark.prove)])
@pytest.mark.parametrize("program", ONLY)
def test_schemathesis_finds_nothing(program: str, examples: int):
    paths = ONLY[program]
    with running(program=program) as service:
        ended = subprocess.run(
            [
                *(str(Path(sys.executable).with_name("schemathesis")), "run", f"{service.url}/openapi.json"),
                *("--header", f"Authorization: Bearer {service.admin_key}"),
                *("--max-examples", str(examples), "--seed", "936", "--warnings", "off"),
                *(word for path in paths for word in ("--include-path", path)),
            ],
            cwd=ROOT,  # where schemathesis.toml lies
            env={**os.environ, "SCHEMATHESIS_HOOKS": "tests.schemathesis_hooks", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, f"{ended.stdout[-10_000:]}\n{ended.stderr}"
        assert not paths or f"Selected: {len(paths)}/" in ended.stdout
        assert "failed" not in service.logged()
