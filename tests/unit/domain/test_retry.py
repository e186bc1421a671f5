"""When an ask equals an earlier one, and the key by which the store recognises it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Final

import pytest

from app.admission.plan import plan_of
from app.domain.ask import Ask
from app.domain.retry import content_of
from app.store.keys import retry_key

ASK: Final = Ask({"requests": 1, "produce_bytes": 0.5}, (1, "x"), "alice", id="once")
OTHER: Final[dict[str, Any]] = {
    "usage": {"requests": 1},
    "producer_ids": (1, 2),
    "principal": "bob",
    "client_id": "",
    "ip": "10.0.0.7",
    "broker": "1",
    "listener": "L",
    "mode": "record",
    "deny": True,
    "recheck": True,
    "cluster_action": True,
    "id": "twice",
}
SAME: Final[dict[str, Any]] = {
    "at_ms": 5,
    "detail": True,
    "producer_ids": ("x", 1, 1),
    "usage": {"produce_bytes": 0.5, "requests": 1.0},
}


def kept_under(ask: Ask, key: str | None = None, secret: bytes = b"s" * 32) -> bytes:
    plan = plan_of(ask, (), secret, key)
    assert plan is not None
    assert plan.retry is not None
    return retry_key(*plan.retry)


def test_asks_differ_by_every_field_except_time_and_detail():
    assert {field.name for field in fields(Ask)} == OTHER.keys() | {"at_ms", "detail"}
    others = [kept_under(replace(ASK, **{name: value})) for name, value in OTHER.items()]
    callers = [kept_under(ASK, key) for key in (None, "gateway", "etl")]
    assert len({*others, *callers}) == len(OTHER) + 3


@pytest.mark.parametrize("name", SAME)
def test_equal_asks_have_equal_content(name: str):
    assert kept_under(replace(ASK, **{name: SAME[name]})) == kept_under(ASK)


def test_empty_ids_and_no_ids_are_different_asks():
    assert content_of(replace(ASK, producer_ids=()), None) != content_of(
        replace(ASK, producer_ids=None), None
    )


def test_peek_and_ask_without_id_are_never_kept():
    assert content_of(replace(ASK, mode="peek"), None) is None
    assert content_of(replace(ASK, id=None), "gateway") is None


def test_store_key_reveals_neither_id_nor_caller_nor_content():
    key = kept_under(replace(ASK, id="secret-id"), "gateway")
    assert key.startswith(b"qg1:{user=alice}:ask:")
    assert b"secret-id" not in key
    assert b"gateway" not in key
    assert kept_under(ASK, secret=b"t" * 32) != kept_under(ASK), "nobody tries what it may have been"
