"""Runs Quotagate with a script that skips some charges, which an audit must find."""

from __future__ import annotations

from typing import Any, Final
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


class ForgetfulStore(RedisStore):
    """A store with the faulty script."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, script=SCRIPT.replace(RIGHT, WRONG), **options)


def main() -> None:
    """Run Quotagate with the faulty script."""
    if SCRIPT.count(RIGHT) != 1:
        raise ValueError("the fault must be planted in one place")
    with patch.object(wiring, "RedisStore", ForgetfulStore):
        cli.main()


if __name__ == "__main__":
    main()
