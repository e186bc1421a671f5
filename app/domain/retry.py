"""Retries: asks that equal an ask answered before."""

from __future__ import annotations

from typing import Final

from app.domain.ask import Ask

RETRY_MS: Final = 60_000
"""How long an answer is kept for a retry with the same id."""

Content = tuple[object, ...]
"""A key that is equal for equal asks, in types that any codec can write."""


def content_of(ask: Ask, key: str | None) -> Content | None:
    """The sender and content of an ask, except ``at_ms`` and ``detail``; None if its answer is not kept.

    >>> first = content_of(Ask({"requests": 1}, (2, "a", 1, 2), id="x", at_ms=1), "gateway")
    >>> first == content_of(Ask({"requests": 1.0}, (1, 2, "a"), id="x", at_ms=2, detail=True), "gateway")
    True
    >>> first == content_of(Ask({"requests": 1}, (1, 2, "a"), id="x"), None)
    False

    Args:
        key: the name of the caller's API key; all callers without one count as one.
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
        # A codec may take 1 and 1.0, or 0.0 and -0.0, for different numbers; they are equal here.
        tuple(sorted((name, amount + 0.0) for name, amount in ask.usage.items())),
        None if ids is None else tuple(sorted(set(ids), key=lambda one: (isinstance(one, str), one))),
    )
