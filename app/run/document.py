"""Writes the OpenAPI document of the wired program: `python -m app.run.document [FILE]`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pydantic import SecretStr

from app.http.app import Front
from app.node.settings import Settings
from app.run.wiring import build


def wired() -> Front:
    """The program under the default settings, independent of the environment; it is never opened."""
    return build(Settings.model_construct(redis_url="redis://", admin_key=SecretStr("never used")))


def text() -> str:
    """The document of the program."""
    return json.dumps(wired().document(), indent=2) + "\n"


if __name__ == "__main__":
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(text(), encoding="utf-8")
    else:
        sys.stdout.write(text())
