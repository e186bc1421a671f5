"""Two neighbouring versions side by side under load: nothing is lost in store, log and catalog."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import httpx
import pyarrow.compute as pc
import pytest
import redis

from app.decision_log.batch import STREAM
from tests import logged, postgres, stores
from tests.gateways.rolling import KEPT, Answers, asked_by, charged, is_limited
from tests.programs import end
from tests.prove.neighbours import older
from tests.service import Service, eventually, running
from workers.decision_log.read import read

LASTS_S: Final = 600.0
CALLERS: Final = 3
"""Callers of each node."""
WITHIN_S: Final = 240.0


class Version:
    """A node and its workers of one version; the node restarts at the same address.

    Args:
        environment: the variables of both programs.
    """

    def __init__(self, stack: ExitStack, folder: Path, environment: Mapping[str, str]) -> None:
        self._stack = stack
        self._folder = folder
        self._environment = environment
        self._gates = [threading.Lock() for _ in range(CALLERS)]
        self._next = itertools.count()
        self.node = self._start_node(("127.0.0.1", 0))
        self._workers = self._start_workers()

    def _start_node(self, address: tuple[str, int]) -> Service:
        return self._stack.enter_context(
            running(
                store_url=self._environment["QUOTAGATE_REDIS_URL"],
                database_url=self._environment["QUOTAGATE_DATABASE_URL"],
                environment=self._environment,
                address=address,
            )
        )

    def _start_workers(self) -> subprocess.Popen[bytes]:
        bare = {name: value for name, value in os.environ.items() if not name.startswith("QUOTAGATE_")}
        with (self._folder / "workers.jsonl").open("ab") as output:
            workers = subprocess.Popen(
                [sys.executable, "-P", "-m", "workers"],
                env={**bare, **self._environment},
                cwd=self._folder,
                stdout=output,
                stderr=output,
            )
        self._stack.callback(end, workers)
        return workers

    @contextmanager
    def asking(self) -> Iterator[Callable[[], int]]:
        """A caller that pauses while the node restarts, because the previous version does not drain."""
        gate = self._gates[next(self._next)]
        ask = {"principal": "alice", "usage": {"requests": 1}}

        def one() -> int:
            with gate:
                answer = http.post(f"{self.node.url}/v1/decisions", json=ask)
            assert answer.status_code != 200 or answer.json()["source"] == "store", answer.text
            return answer.status_code

        # A connection for each ask: a persistent one would end with its node.
        limits = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(timeout=60, trust_env=False, limits=limits) as http:
            yield one

    def restart(self) -> None:
        with ExitStack() as quiet:
            for gate in self._gates:
                quiet.enter_context(gate)
            end(self._workers)
            assert self.node.stop() == 0
            self.node = self._start_node(self.node.address)
            self._workers = self._start_workers()

    def is_old(self) -> bool:
        """Whether the node lacks a metric that is new in this version."""
        return "quotagate_draining" not in self.node.http.get("/metrics").text


def applies(node: Service, entity: str, limit: int) -> bool:
    """Whether a node applies a limit to a user."""
    user = entity.removeprefix("user=")
    quotas = node.http.get("/v1/quotas:effective", params={"principal": user}).json()["quotas"]
    return any(each["entity"] == entity and each["limit"] == limit for each in quotas)


@pytest.mark.prove
def test_two_versions_side_by_side_lose_nothing(tmp_path: Path):
    """Each node is restarted in turn, and each changes quotas, which arrive at both."""
    folder = tmp_path / "log"
    with ExitStack() as stack:
        database = postgres.started()
        stack.callback(database.remove)
        same = {
            "QUOTAGATE_REDIS_URL": stack.enter_context(stores.running("valkey")),
            "QUOTAGATE_DATABASE_URL": database.database(),
            **logged.settings(folder),
        }
        before = {**same, "PYTHONPATH": str(older(tmp_path / "before"))}
        old, new = (Version(stack, tmp_path, environment) for environment in (before, same))
        assert (old.is_old(), new.is_old()) == (True, False)
        old.node.put("user=alice", request_rate=KEPT)
        eventually(lambda: all(is_limited(each.node, "alice") for each in (old, new)))

        with asked_by(old.asking, CALLERS) as some, asked_by(new.asking, CALLERS) as others:
            changes = go_on(old, new)
        print(f"{changes} changes and restarts in {LASTS_S:g} s; old: {some}; new: {others}")
        admitted = same_statuses(some) + same_statuses(others)
        assert charged(new.node, "alice") == charged(old.node, "alice") == admitted
        with redis.Redis.from_url(same["QUOTAGATE_REDIS_URL"]) as store:
            eventually(lambda: not store.xlen(STREAM), within_s=WITHIN_S)
        assert rows(folder) == admitted


def go_on(old: Version, new: Version) -> int:
    """Restart both in turn, and change quotas at each, until the time is over; return how often."""
    ends_at = time.monotonic() + LASTS_S
    for n in itertools.count(1):
        old.restart() if n % 2 else new.restart()
        for changing in (old, new):
            entity, limit = f"user=u{n}", 100 * n + (changing is new)
            changing.node.put(entity, request_rate=limit)
            eventually(partial(arrived, (old, new), entity, limit))
        if time.monotonic() >= ends_at:
            return n
    raise AssertionError


def arrived(versions: tuple[Version, Version], entity: str, limit: int) -> bool:
    return all(applies(each.node, entity, limit) for each in versions)


def same_statuses(answers: Answers) -> int:
    assert answers.statuses.keys() == {200}, str(answers)
    return answers.statuses[200]


def rows(folder: Path) -> int:
    """The number of decisions that charged alice, according to the log."""
    table = read(folder)
    wanted = {"kind": "decision", "principal": "alice", "mode": "admit", "decision": "admit"}
    for column, value in wanted.items():
        table = table.filter(pc.equal(table[column], value))
    return int(table.num_rows)
