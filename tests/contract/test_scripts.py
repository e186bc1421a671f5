"""Every script file opens with an example, and a script refuses a wrong number of keys or arguments."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import redis

from app.store.client import client_of
from app.store.encoding import encode_call, encode_plans
from app.store.library import Library, call_function
from app.store.port import Plan, StoreError
from app.store.redis import run
from app.store.script import FOLDER, FORGET, READ_LAYERS, SCRIPT, text
from tests.stores import running

NAMES = sorted(file.name.removesuffix(".lua") for file in FOLDER.iterdir())

TAKES = {
    "leader_acquire": (2, 2),
    "leader_release": (1, 1),
    "log_acknowledge": (2, 2),
    "log_append": (2, 6),
    "log_heartbeat": (1, 3),
    "log_status": (3, 1),
    "mark": (2, 1),
    "probe": (1, 0),
    "volumes_read": (2, 0),
    "volumes_replace": (2, 3),
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running("valkey") as url:
        yield url


@pytest.mark.parametrize("name", NAMES)
def test_script_file_opens_with_an_example(name: str):
    header, separator, _ = text(name).partition("\n]]\n")
    assert separator
    assert "--[[ " in header
    assert "\nExample" in header


@pytest.mark.parametrize(("name", "keys", "arguments"), [(name, *takes) for name, takes in TAKES.items()])
def test_script_refuses_another_number_of_keys_or_arguments(url: str, name: str, keys: int, arguments: int):
    with redis.Redis.from_url(url) as client:
        for more_keys, more_arguments in ((1, 0), (0, 1), (-1, 0)):
            given = [*map(str, range(keys + more_keys)), *("1" for _ in range(arguments + more_arguments))]
            with pytest.raises(redis.ResponseError, match=f"{name} takes"):
                client.eval(text(name), keys + more_keys, *given)
        assert client.keys() == []


def test_forget_refuses_arguments(url: str):
    with redis.Redis.from_url(url) as client:
        with pytest.raises(redis.ResponseError, match="forget takes"):
            client.eval(FORGET, 1, "order")
        for keys, arguments in ((("resets", "order", "more"), ("0",)), (("resets",), ("1",))):
            with pytest.raises(redis.ResponseError, match="forget takes"):
                client.eval(FORGET, len(keys), *keys, *arguments)
        assert client.keys() == []


def test_look_at_layers_refuses_arguments(url: str):
    with redis.Redis.from_url(url) as client:
        for keys, arguments in ((1, 1), (1, 3), (0, 2), (2, 2)):
            with pytest.raises(redis.ResponseError, match="layers_read takes"):
                client.eval(READ_LAYERS, keys, *("1" for _ in range(keys + arguments)))


@pytest.mark.parametrize("keys", [[], [b"one", b"more"]])
async def test_call_refuses_another_number_of_keys_than_its_asks_need(url: str, keys: list[bytes]):
    call = encode_call(caller_clock=False, sequential=False, logged=False, max_ids=1_000)
    _, arguments = encode_plans([Plan("admit", (), retry=(None, b"ask"))])
    client = client_of(url, 5)
    with pytest.raises(StoreError, match="one key for each quota"):
        await call_function(partial(run, client), Library.of(SCRIPT), keys, [call, *arguments])
    assert await client.keys() == []
    await client.aclose()
