"""Runs Quotagate with a script that skips some charges, which an audit must find."""

from __future__ import annotations

from functools import partial
from typing import Final
from unittest.mock import patch

from app.run import cli, wiring
from app.store.redis import RedisStore
from app.store.script import SCRIPT

RIGHT: Final = "check.charges, check.last = check.charges + n, check.t\n"
WRONG: Final = """
  if check.charges < 3 or check.t % 4 > 0 then check.charges = check.charges + n end
  check.last = check.t
"""
"""Once in four times the ids are remembered without a charge."""


def main() -> None:
    """Run it."""
    if SCRIPT.count(RIGHT) != 1:
        raise ValueError("the fault must be planted in one place")
    forgetful = partial(RedisStore, script=SCRIPT.replace(RIGHT, WRONG))
    with patch.object(wiring, "RedisStore", forgetful):
        cli.main()


if __name__ == "__main__":
    main()
