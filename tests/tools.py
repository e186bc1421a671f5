"""Finds the programs that a test needs and that no Python package brings."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

DEBIAN = Path(__file__).parents[1] / ".tools" / "debian"
GO = Path(__file__).parents[1] / ".tools" / "go"
"""Programs that `make test-all` builds."""

# Libraries are found by file; programs by name, in .tools/debian/bin, in .tools/go and on PATH.
LIBRARIES = {"libfaketime": "libfaketimeMT.so.1"}


def need(tool: str, source: str = "tests/tools.sh fetches it where there is apt-get") -> Path:
    """The path of `tool`; if it is missing, skip the test with the reason, or fail under CI=true."""
    found = _library(LIBRARIES[tool]) if tool in LIBRARIES else _program(tool)
    if found is None:
        reason = f"{tool} is not here; {source}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return found


def _program(name: str) -> Path | None:
    debians_nginx = "/usr/sbin"
    places = (str(DEBIAN / "bin"), str(GO), os.environ.get("PATH", ""), debians_nginx)
    found = shutil.which(name, path=os.pathsep.join(places))
    return Path(found) if found else None


def _library(name: str) -> Path | None:
    for root in (DEBIAN / "root" / "usr" / "lib", Path("/usr/lib")):
        for found in root.glob(f"*/faketime/{name}"):
            return found
    return None
