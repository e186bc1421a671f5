"""Runs our program, and makes it short of the resource that a test names in a memory-mapped file."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from app.run import cli
from app.store import redis
from app.store.connection import Connection

THREADS, MEMORY, ENCODING, READING = range(1, 5)
"""Threads do not start; sockets and files cannot be made; asks cannot be encoded; replies cannot be read."""
FILE: Final = "SHORT_OF"
"""The environment variable with the file's name; the file's first byte is one of these, or 0."""


def main() -> None:
    short = _flag(Path(os.environ[FILE]))

    def refuse(event: str, _arguments: tuple[Any, ...]) -> None:
        if event == "_thread.start_new_thread" and short[0] == THREADS:
            raise RuntimeError("can't start new thread")
        if event in {"socket.__new__", "open"} and short[0] == MEMORY:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    def unless(kind: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            if short[0] == kind:
                raise MemoryError
            return call(*arguments, **named)

        return called

    sys.addaudithook(refuse)
    encode_plans = unless(ENCODING, vars(redis)["encode_plans"])
    vars(redis)["encode_plans"] = encode_plans
    Connection.data_received = unless(READING, Connection.data_received)  # type: ignore[method-assign]
    cli.main()


def _flag(file: Path) -> mmap.mmap:
    with file.open("r+b") as opened:
        return mmap.mmap(opened.fileno(), 1)


if __name__ == "__main__":
    main()
