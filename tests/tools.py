"""Finds the programs that a test needs and that no Python package brings."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

DEBIAN = Path(__file__).parents[1] / ".tools" / "debian"
GO = Path(__file__).parents[1] / ".tools" / "go"
"""Programs that `make test-all` builds."""
DEBIANS_NGINX = "/usr/sbin"


def need(tool: str, source: str = "tests/tools.sh fetches it where there is apt-get") -> Path:
    """The path of `tool`; if it is missing, skip the test with the reason, or fail under CI=true."""
    places = (str(DEBIAN / "bin"), str(GO), os.environ.get("PATH", ""), DEBIANS_NGINX)
    found = shutil.which(tool, path=os.pathsep.join(places))
    if found is None:
        reason = f"{tool} is not here; {source}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return Path(found)
