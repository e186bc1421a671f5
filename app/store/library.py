"""A script as a function library of the store: named by its hash, loaded where missing, removed when old."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Self

from app.store.port import StoreError

PREFIX_OF_NAMES: Final = "quotagate_"
"""Every library of ours begins with it, and nobody else's does."""

KEPT_S: Final = 86_400
"""A library that was not called for so long is removed; a node calls its own with every examination."""

IDLE: Final = "_idle"
"""Ends the name of a library's other function, which says for how many seconds nobody called the first."""

Run = Callable[..., Awaitable[Any]]
"""Sends one command and gives its reply; raises StoreError."""


class MissingFunctionError(StoreError):
    """The store does not know the function: it was never loaded there, or was lost. Nothing was done."""

    TEXT: Final = "Function not found"


class Library:
    """A script and the function that runs it, both by the same name.

    The script, which defines a function ``run(keys, args)``, is built by the first call and not when it is
    loaded: only then does a library have ``math`` and ``struct``.
    """

    def __init__(self, name: str, code: str) -> None:
        self.name = name
        self.code = code

    @classmethod
    def of(cls, script: str, *, beyond_maxmemory: bool = False) -> Self:
        """The library of a script: another text has another name, so two versions stand side by side.

        Args:
            beyond_maxmemory: it may go on writing where the store uses more memory than it may: a script that
                itself stops to make anything new before that.
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
) -> list[bytes]:
    """The reply of a library's function, which is loaded first into a store that does not know it.

    Raises:
        StoreError: no reply, or an error for one; a late call may still be carried out.
    """
    call = ("FCALL", library.name, len(keys), *keys, *arguments)
    try:
        reply: list[bytes] = await run(*call)
    except MissingFunctionError:
        await run("FUNCTION", "LOAD", "REPLACE", library.code)
        reply = await run(*call)
    return reply


async def keep_only_used(run: Run, library: Library) -> None:
    """Remove the libraries of ours that nobody has called for a day, but never this one.

    To remove one too many costs its user two more commands: it is loaded again.

    Raises:
        StoreError: no answer.
    """
    try:
        for name in _names(await run("FUNCTION", "LIST", "LIBRARYNAME", f"{PREFIX_OF_NAMES}*")):
            if name != library.name and await run("FCALL", name + IDLE, 0) >= KEPT_S:
                await run("FUNCTION", "DELETE", name)
    except StoreError as error:
        if error.reason not in {"permission", "response", "scripting"}:
            raise  # the others: another node has removed it, or this one may not


def _names(listed: Sequence[Any]) -> list[str]:
    """The names in the reply of FUNCTION LIST: pairs in a list, or a map."""
    found = []
    for entry in listed:
        pairs = entry if isinstance(entry, dict) else dict(zip(entry[::2], entry[1::2], strict=True))
        found.append(str(pairs[b"library_name"], "ascii"))
    return found
