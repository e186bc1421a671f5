"""The program, but with a script that forgets a charge now and then: what an audit is there to find."""

from __future__ import annotations

from functools import partial
from typing import Final
from unittest.mock import patch

from app.run import cli, wiring
from app.store.redis import RedisStore
from app.store.script import SCRIPT

RIGHT: Final = "part.charges, part.last = part.charges + n, part.t\n"
WRONG: Final = """
  if part.charges < 3 or part.t % 4 > 0 then part.charges = part.charges + n end
  part.last = part.t
"""
"""One time in four the ids are remembered, and nobody is charged for them."""


def main() -> None:
    """Run it."""
    if SCRIPT.count(RIGHT) != 1:
        raise ValueError("the fault must be planted in one place")
    forgetful = partial(RedisStore, script=SCRIPT.replace(RIGHT, WRONG))
    with patch.object(wiring, "RedisStore", forgetful):
        cli.main()


if __name__ == "__main__":
    main()
