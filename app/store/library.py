"""A script as a function library of the store: named by its hash, loaded if missing, removed when unused."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Self

from app.store.port import StoreError

PREFIX_OF_NAMES: Final = "quotagate_"
"""The names of our libraries begin with it, and no others do."""

KEPT_S: Final = 86_400
"""A library that nobody called for this long is removed; a node calls its own at every examination."""

IDLE: Final = "_idle"
"""Suffix of a library's second function, which returns the seconds since the first was last called."""

Run = Callable[..., Awaitable[Any]]
"""Sends one command and gives its reply; raises StoreError."""


class MissingFunctionError(StoreError):
    """The store does not have the function: it was never loaded there, or was lost. Nothing was done."""

    TEXT: Final = "Function not found"


class Library:
    """A script and the function that runs it, both of the same name.

    The script defines a function ``run(keys, args)``. It is built by the first call and not when it is
    loaded: only then does a library have ``math`` and ``struct``.
    """

    def __init__(self, name: str, code: str) -> None:
        self.name = name
        self.code = code

    @classmethod
    def of(cls, script: str, *, beyond_maxmemory: bool = False) -> Self:
        """The library of a script. Its name is a hash of the text, so two versions can be loaded at once.

        Args:
            beyond_maxmemory: it may write even beyond the store's ``maxmemory``; for a script that stops
                creating keys before that limit.
        """
        digest = hashlib.sha256(script.encode()).hexdigest()[:32]
        name = f"{PREFIX_OF_NAMES}{digest}"
        flags = "'allow-oom'" if beyond_maxmemory else ""
        code = f"""#!lua name={name}
local function make()
{script}
return run
end
local run, called, since
local function call(keys, args)
  run, called = run or make(), true
  return run(keys, args)
end
redis.register_function{{ function_name = '{name}', callback = call, flags = {{ {flags} }} }}
local function idle()
  local now = tonumber(redis.call('TIME')[1])
  if called or not since then called, since = false, now end
  return now - since
end
redis.register_function{{ function_name = '{name}{IDLE}', callback = idle, flags = {{ 'no-writes' }} }}
"""
        return cls(name, code)


async def call_function(
    run: Run, library: Library, keys: Sequence[bytes], arguments: Sequence[bytes]
) -> list[Any]:
    """The reply of a library's function; loads the library first if the store does not have it.

    Raises:
        StoreError: no reply, or an error as the reply; a late call may still be carried out.
    """
    call = ("FCALL", library.name, len(keys), *keys, *arguments)
    try:
        reply: list[Any] = await run(*call)
    except MissingFunctionError:
        await run("FUNCTION", "LOAD", "REPLACE", library.code)
        reply = await run(*call)
    return reply


async def keep_only_used(run: Run, library: Library) -> None:
    """Remove our libraries that nobody called for a day, except this one.

    A node that still needs a removed library loads it again, which takes two more commands.

    Raises:
        StoreError: no answer.
    """
    try:
        for name in _names(await run("FUNCTION", "LIST", "LIBRARYNAME", f"{PREFIX_OF_NAMES}*")):
            if name != library.name and await run("FCALL", name + IDLE, 0) >= KEPT_S:
                await run("FUNCTION", "DELETE", name)
    except StoreError as error:
        if error.reason not in {"permission", "response", "scripting"}:
            raise  # the other reasons: another node removed it, or this node has no permission


def _names(listed: Sequence[Any]) -> list[str]:
    """The names in the reply of FUNCTION LIST: pairs in a list, or a map."""
    entries = (
        entry if isinstance(entry, dict) else dict(zip(entry[::2], entry[1::2], strict=True))
        for entry in listed
    )
    return [str(entry[b"library_name"], "ascii") for entry in entries]
