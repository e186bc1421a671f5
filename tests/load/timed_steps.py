"""Runs our program on asyncio's own event loop, and writes down each step that took long.

A step is one callback of the loop: nothing else runs in the loop's thread meanwhile. A line of the file in
``QG_STEPS`` has the step's processor time in milliseconds, and the callback.
"""

from __future__ import annotations

import os
from asyncio import events
from pathlib import Path
from time import thread_time
from typing import Any, Final

from app.run import cli, serve

WRITTEN_FROM_S: Final = 0.002


def time_steps(output: Path) -> None:
    """Write a line for each long step of every event loop from now on."""
    lines = output.open("a", encoding="utf-8", buffering=1)
    run = events.Handle._run

    def timed(handle: events.Handle) -> None:
        began = thread_time()
        run(handle)
        took = thread_time() - began
        if took > WRITTEN_FROM_S:
            lines.write(f"{took * 1000:.1f} {handle!r}\n")

    events.Handle._run = timed  # type: ignore[method-assign,assignment]


def _on_asyncio(*arguments: Any) -> dict[str, Any]:
    return {**_options(*arguments), "loop": "asyncio"}  # uvloop's callbacks cannot be wrapped


_options: Final[Any] = serve._options

if __name__ == "__main__":
    serve._options = _on_asyncio  # type: ignore[assignment]
    time_steps(Path(os.environ["QG_STEPS"]))
    cli.main()
