"""Recommended limits for traffic of many shapes: they refuse abusers, and hardly anybody else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

from tests.jobs.abuse import drawn
from tests.jobs.test_recommend import Command, check_bounds, write
from workers.jobs import folder as output

SHAPES: Final = int(os.environ.get("QUOTAGATE_PROVE_SHAPES", "200"))
FIRST: Final = 10_000
"""The job was built on earlier seeds."""


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(FIRST, FIRST + SHAPES))
def test_bounds_hold_for_traffic_of_any_shape(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(output, "SETTLED_S", 0.0)
    traffic = drawn(seed)
    check_bounds(traffic, Command(tmp_path, capsys)(write(traffic, tmp_path)))
