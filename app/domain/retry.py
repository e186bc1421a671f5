"""Retries: when an ask is one that was answered before."""

from __future__ import annotations

from app.domain.ask import Ask

Content = tuple[object, ...]
"""All that two equal asks have in common, made of what any codec can write."""


def content_of(ask: Ask, key: str | None) -> Content | None:
    """Who sends an ask and what it says, but for when it is asked and what is shown; None if none is kept.

    >>> first = content_of(Ask({"requests": 1}, (2, "a", 1, 2), id="x", at_ms=1), "gateway")
    >>> first == content_of(Ask({"requests": 1.0}, (1, 2, "a"), id="x", at_ms=2, detail=True), "gateway")
    True
    >>> first == content_of(Ask({"requests": 1}, (1, 2, "a"), id="x"), None)
    False

    Args:
        key: the name of the caller's key; callers without one are one caller.
    """
    if ask.id is None or ask.mode == "peek":
        return None
    ids = ask.producer_ids
    return (
        key,
        ask.principal,
        ask.id,
        ask.mode,
        (ask.client_id, ask.ip, ask.broker, ask.listener),
        (ask.deny, ask.recheck, ask.cluster_action),
        # The codec may read 1 and 1.0, and 0.0 and -0.0, as two numbers; they are one.
        tuple(sorted((name, amount + 0.0) for name, amount in ask.usage.items())),
        None if ids is None else tuple(sorted(set(ids), key=lambda one: (isinstance(one, str), one))),
    )
