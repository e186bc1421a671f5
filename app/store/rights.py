"""The rights that the user of a store needs, and how a node finds a missing one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from app.store.keys import BIRTH_KEY, ORDER_KEY, PREFIX, RESETS_KEY, shared_key
from app.store.script import text

RIGHTS: Final = text("rights")
"""Finds which commands are not allowed. Unlike ACL DRYRUN it needs no right but EVAL."""

PATTERN: Final = f"~{PREFIX}:*"
"""All keys, even on a cluster."""

_KEY: Final = f"{PREFIX}:rights"
"""No command here is carried out, so there is never such a key."""

_ALWAYS: Final[Mapping[str, str]] = {
    "FCALL": f"FCALL quotagate 1 {_KEY}",
    "FUNCTION LOAD": "FUNCTION LOAD REPLACE x",
    "TIME": "TIME",
    "GET": f"GET {_KEY}",
    "MGET": f"MGET {_KEY}",
    "GETRANGE": f"GETRANGE {_KEY} 0 0",
    "STRLEN": f"STRLEN {_KEY}",
    "SET": f"SET {_KEY} x",
    "SETRANGE": f"SETRANGE {_KEY} 0 x",
    "INCR": f"INCR {_KEY}",
    "PEXPIRE": f"PEXPIRE {_KEY} 1",
    "DEL": f"DEL {_KEY}",
}
_LOGGED: Final[Mapping[str, str]] = {
    "HGETALL": f"HGETALL {_KEY}",
    "HMGET": f"HMGET {_KEY} x",
    "HSET": f"HSET {_KEY} x x",
    "HDEL": f"HDEL {_KEY} x",
    "HINCRBY": f"HINCRBY {_KEY} x 1",
    "XADD": f"XADD {_KEY} * x x",
    "XLEN": f"XLEN {_KEY}",
    "XRANGE": f"XRANGE {_KEY} - +",
    "XGROUP CREATE": f"XGROUP CREATE {_KEY} x 0 MKSTREAM",
    "XREADGROUP": f"XREADGROUP GROUP x x COUNT 1 STREAMS {_KEY} >",
    "XPENDING": f"XPENDING {_KEY} x",
    "XACK": f"XACK {_KEY} x 0-1",
    "XDEL": f"XDEL {_KEY} 0-1",
}
_CLUSTERED: Final[Mapping[str, str]] = {name: name for name in ("CLUSTER SLOTS", "ASKING", "COMMAND")}
_UNCHECKED: Final = ("EVAL", "INFO", "FUNCTION LIST", "FUNCTION DELETE")
"""EVAL makes the check; the lack of the others shows elsewhere, or does no harm."""

ASKED_OF_SENTINELS: Final = ("SENTINEL MASTERS",)

_ON_KEYS: Final = ("GET {}", "SET {} x")
RULE_IS_IN: Final = "; docs/settings.md has the rule that it needs"


def needed(*, logged: bool, clustered: bool) -> dict[str, str]:
    """Return the commands that the store's user needs, each with an example.

    Args:
        logged: decisions are logged.
        clustered: the store is a cluster.
    """
    return {**_ALWAYS, **(_LOGGED if logged else {}), **(_CLUSTERED if clustered else {})}


class Examination:
    """The rights that a node examines: commands, and keys of each kind.

    Args:
        logged, clustered: as for ``needed``.

    Attributes:
        asked: the arguments of ``RIGHTS``.
    """

    def __init__(self, *, logged: bool, clustered: bool) -> None:
        self._commands = needed(logged=logged, clustered=clustered)
        shared = [shared_key(name, clustered=clustered) for name in ("volumes", "log:x")[: 1 + logged]]
        own = [BIRTH_KEY, *(() if clustered else (ORDER_KEY, RESETS_KEY))]
        self._keys = [*(key.decode() for key in own), *shared]
        self.asked = [
            *self._commands.values(),
            *(each.format(key) for key in self._keys for each in _ON_KEYS),
        ]

    def missing(self, places: Iterable[int]) -> str:
        """Name the missing rights of the store's user; empty if none.

        Args:
            places: the reply of ``RIGHTS``.
        """
        lacking = {self.asked[place - 1] for place in places}
        names = [name for name, example in self._commands.items() if example in lacking]
        on_keys = {name for name, example in self._commands.items() if _KEY in example}
        keys = [
            key
            for key in self._keys
            for each in _ON_KEYS
            if each.format(key) in lacking and each.partition(" ")[0] not in names
        ]
        if on_keys <= {*names}:
            names, keys = [name for name in names if name not in on_keys], [f"{PREFIX}:*"]
        said = [f"may not run {', '.join(names)}"] if names else []
        said += [f"may not read and write the keys {', '.join(dict.fromkeys(keys))}"] if keys else []
        return f"the store's user {' and '.join(said)}{RULE_IS_IN}" if said else ""


def rule(*, clustered: bool) -> str:
    """Return the least rule of a user, in the words of ACL SETUSER."""
    commands = [*_UNCHECKED, *needed(logged=True, clustered=clustered)]
    allowed = " ".join(f"+{name.lower().replace(' ', '|')}" for name in sorted(commands))
    return f"{PATTERN} -@all {allowed}"


def rule_of_sentinels() -> str:
    """Return the least rule of the user of the sentinels."""
    return "-@all " + " ".join(f"+{name.lower().replace(' ', '|')}" for name in ASKED_OF_SENTINELS)
