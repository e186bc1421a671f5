"""The checked-in messages equal the output of `make protos`."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.internal import api_implementation

ROOT = Path(__file__).parents[2]
PROTOS = "app/envoy/protos"


def test_messages_are_current(tmp_path: Path):
    pytest.importorskip("grpc_tools")
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^\t\$\(BIN\)/python (-m grpc_tools.protoc .*)$", makefile, re.MULTILINE)
    assert recipe is not None
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / PROTOS).glob("*.proto"))
    *options, pattern = shlex.split(recipe[1])
    assert pattern == f"{PROTOS}/*.proto"
    here = [option.replace("_out=.", f"_out={tmp_path}") for option in options]
    subprocess.run([sys.executable, *here, *sources], cwd=ROOT, check=True)
    made = sorted((tmp_path / PROTOS).iterdir())
    assert [path.name for path in made] == sorted(path.name for path in (ROOT / PROTOS).glob("*_pb2.*"))
    for path in made:
        assert path.read_text() == (ROOT / PROTOS / path.name).read_text(), f"{path.name}: run make protos"


def test_messages_are_those_of_upb():
    """Messages of pure Python take many times as long."""
    assert api_implementation.Type() == "upb"
