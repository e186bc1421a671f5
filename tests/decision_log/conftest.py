"""Shared by the tests of the decision log: a store, a folder, and functions to fill and read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import redis

from app.decision_log.batch import STREAM, SentBatch
from tests import service, stores
from tests.decision_log.batches import packed
from workers.decision_log.read import read

T = TypeVar("T")


@pytest.fixture(scope="module")
def shared() -> Iterator[str]:
    with stores.running("valkey") as url:
        yield url


@pytest.fixture
def client(shared: str) -> Iterator[redis.Redis]:
    """A client of the store, which is empty."""
    with redis.Redis.from_url(shared) as client:
        client.flushall()
        yield client


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "log"


def eventually(look: Callable[[], T]) -> T:
    """Wait long enough for a child process on a busy machine."""
    return service.eventually(look, within_s=90)


def leave(client: redis.Redis, batches: Iterable[SentBatch]) -> None:
    """Append batches to the stream, as nodes do."""
    for batch in batches:
        client.xadd(STREAM, {"batch": packed(batch), "rows": len(batch.rows)})


def known(batches: Iterable[SentBatch]) -> set[tuple[str, int]]:
    """The rows of batches."""
    return {(batch.id, place) for batch in batches for place in range(len(batch.rows))}


def written(folder: Path) -> set[tuple[str, int]]:
    """The rows that a reader finds; fails if one occurs twice."""
    rows = read(folder)
    found = list(zip(rows["batch"].to_pylist(), rows["place"].to_pylist(), strict=True))
    assert len(found) == len(set(found))
    return set(found)
