"""Replays of buckets as bytes, so that a later audit goes on where this one ended."""

from __future__ import annotations

from collections import deque
from dataclasses import fields
from functools import cache
from typing import Any, Final, get_args, get_type_hints

import msgspec

from app.domain.sampled_rate import Samples
from app.domain.token_bucket import Tokens
from workers.jobs.audit.ids import IdsJudge
from workers.jobs.audit.judge import Replay
from workers.jobs.audit.levels import LevelJudge

STATES: Final = ("state", "before")
"""The fields of a level's judge that hold samples or tokens."""


class _Saved(msgspec.Struct, array_like=True):
    last_order: int
    events: int
    noted: dict[str, int]
    ids: IdsJudge | None
    level: dict[str, Any] | None


def encode(replay: Replay) -> bytes:
    """A replay as bytes."""
    judge, ids, level = replay.judge, None, None
    if isinstance(judge, IdsJudge):
        ids = judge
    elif judge is not None:
        level = {field.name: getattr(judge, field.name) for field in fields(judge)}
        for name in STATES:
            is_tokens = isinstance(level[name], Tokens)
            level[name] = {"tokens" if is_tokens else "samples": level[name]}
    saved = _Saved(replay.last_order, replay.events, replay.noted, ids, level)
    return msgspec.msgpack.encode(saved, enc_hook=_as_list)


def decode(content: bytes) -> Replay:
    """The replay that ``encode`` was given.

    Raises:
        msgspec.MsgspecError: the bytes are not a replay.
    """
    saved = msgspec.msgpack.decode(content, type=_Saved, dec_hook=_as_deque)
    judge = saved.ids if saved.level is None else _level(saved.level)
    return Replay(judge, saved.last_order, saved.events, saved.noted)


def _level(said: dict[str, Any]) -> LevelJudge:
    found: dict[str, Any] = {
        name: msgspec.convert(said[name], type_, dec_hook=_as_deque) for name, type_ in _level_types().items()
    }
    found |= {name: _state(**said[name]) for name in STATES}
    return LevelJudge(**found)


@cache
def _level_types() -> dict[str, Any]:
    hints = get_type_hints(LevelJudge)
    return {field.name: hints[field.name] for field in fields(LevelJudge) if field.name not in STATES}


def _state(samples: Any = None, tokens: Any = None) -> Samples | Tokens | None:
    if tokens is not None:
        return msgspec.convert(tokens, Tokens)
    return None if samples is None else msgspec.convert(samples, Samples)


def _as_list(value: Any) -> Any:
    if isinstance(value, deque):
        return list(value)
    raise NotImplementedError(type(value))


def _as_deque(type_: Any, value: Any) -> Any:
    return deque(msgspec.convert(value, list[get_args(type_)[0]]))  # type: ignore[misc]  # a type at run time
