"""The decision log under load while its worker dies, or its stream or disk is full, or the disk is away."""

from __future__ import annotations

import random
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from app.decision_log.batch import STREAM
from app.decision_log.status import STATUS_KEY
from app.decision_log.stream import MAX_BATCHES
from tests import object_store
from tests.decision_log import worker
from tests.decision_log.batches import Node
from tests.decision_log.conftest import leave
from tests.disks import mounted
from tests.logged import Logged, definitions, two_nodes
from tests.service import eventually
from workers.decision_log.asked import with_verdicts
from workers.decision_log.read import read
from workers.generate.traffic import Traffic

pytestmark = pytest.mark.timeout(600)

KILLS = 3
EVENTS = 800
QUICK: dict[str, Any] = {"limits": {"age_s": 0.2}, "times": {"lease": 1.0}}
"""Files are written every fifth of a second, and a new leader follows a second after one died."""

WITHIN_S = 120.0
DROPPED = "quotagate_log_dropped_total"
FAILURES = "quotagate_log_write_failures_total"
LAG = "quotagate_log_lag_seconds"
WAITING = "quotagate_log_waiting_batches"


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Logged]:
    with two_nodes(tmp_path_factory.mktemp("nodes") / "log") as found:
        yield found


@pytest.fixture
def logged(nodes: Logged, tmp_path: Path) -> Logged:
    """The nodes, with a log folder for this test only, and no batches of earlier tests."""
    with redis.Redis.from_url(nodes.nodes[0].store_url) as store:

        def emptied() -> bool:
            # At each look: the nodes may still write their rows of the quotas, which nobody reads here.
            store.delete(STREAM, STATUS_KEY)
            return nodes.metric(LAG) == nodes.metric(FAILURES) == 0

        eventually(emptied)
    return replace(nodes, folder=tmp_path / "log")


def decided(rows: list[dict[str, Any]]) -> Counter[tuple[str | None, str]]:
    return Counter((row["principal"], row["decision"]) for row in rows)


def truly(*runs: dict[str, Any]) -> Counter[tuple[str | None, str]]:
    """The decisions of runs of traffic, from their truth."""
    found: Counter[tuple[str | None, str]] = Counter()
    for totals in runs:
        for name, sums in {**totals["principals"], None: totals["connections"]}.items():
            found.update({(name, o): sums[o] for o in ("admit", "delay", "throttle", "reject") if sums[o]})
    return found


def until_it_writes(logged: Logged) -> None:
    before = logged.counted()
    eventually(lambda: logged.counted() > before, within_s=WITHIN_S)


@contextmanager
def loaded(logged: Logged, truths: Path) -> Iterator[list[dict[str, Any]]]:
    """Send run after run of traffic through both nodes until the end; yields the truth of each."""
    over = threading.Event()
    runs: list[dict[str, Any]] = []

    def load() -> None:
        while not over.is_set():
            traffic = Traffic(seed=100 + len(runs), events=EVENTS, rate=400)
            runs.append(logged.drive(traffic, truths / str(len(runs)), paced=True))

    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load)
        try:
            yield runs
        finally:
            over.set()
            loading.result()


def test_worker_killed_at_random_moments_loses_and_repeats_nothing(logged, tmp_path):
    """The load continues through both nodes; each decision that was answered is in the log once."""
    chance = random.Random(7)
    url, dropped = logged.nodes[0].store_url, logged.metric(DROPPED)
    with loaded(logged, tmp_path / "truths") as runs:
        for _ in range(KILLS):
            with worker.running(url, logged.folder, tmp_path / "output", **QUICK) as program:
                until_it_writes(logged)
                with pytest.raises(subprocess.TimeoutExpired):
                    program.wait(chance.uniform(0.0, 0.5))
                program.kill()
    with worker.running(url, logged.folder, tmp_path / "output", **QUICK):
        rows = logged.until_written(EVENTS * len(runs))
    assert decided(rows) == truly(*runs)
    assert logged.metric(DROPPED) == dropped


def test_full_stream_is_counted_and_delays_nothing(logged, tmp_path):
    """Batches without room are dropped and counted; once the stream is read again, all are logged again."""
    waiting = list(Node().batches(MAX_BATCHES, rows=1))
    unread = sum(row.kind == "decision" for batch in waiting for row in with_verdicts(batch).rows)
    with redis.Redis.from_url(logged.nodes[0].store_url) as client:
        leave(client, waiting)
        full, before = client.xlen(STREAM), logged.metric(DROPPED)
        traffic = Traffic(seed=22, events=600)
        logged.drive(traffic, tmp_path / "unheard")
        eventually(lambda: logged.metric(DROPPED) - before >= traffic.events)
        dropped = logged.metric(DROPPED) - before
        assert dropped - traffic.events <= len(definitions()), "some may be changes of quotas"
        assert client.xlen(STREAM) == full, "nothing was added or removed"
        eventually(lambda: logged.metric(WAITING) >= MAX_BATCHES)
        assert logged.metric(LAG) > 0
        with worker.inside(logged.nodes[0].store_url, logged.folder, **QUICK):
            eventually(lambda: client.xlen(STREAM) == 0, within_s=WITHIN_S)
            totals = logged.drive(Traffic(seed=23, events=600), tmp_path / "heard")
            rows = logged.until_written(unread + 600)
            eventually(lambda: logged.metric(WAITING) == 0)
    assert logged.metric(DROPPED) - before == dropped
    heard = [row for row in rows if not row["batch"].startswith("n1-")]
    assert decided(heard) == truly(totals)


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """A disk without room for the log until the end."""
    with (folder / "ballast").open("wb") as ballast:
        while True:
            try:
                ballast.write(bytes(65_536))
                ballast.flush()
            except OSError:
                break
    try:
        yield
    finally:
        (folder / "ballast").unlink()


@contextmanager
def away(folder: Path) -> Iterator[None]:
    """A missing place: until the end, a file is in the way of its folder."""
    aside = folder.with_name("aside")
    folder.rename(aside)
    folder.write_text("not here")
    try:
        yield
    finally:
        folder.unlink()
        aside.rename(folder)


@pytest.mark.parametrize("trouble", [full_disk, away])
def test_unwritable_place_is_counted_and_writing_resumes(logged, tmp_path, trouble):
    dropped = logged.metric(DROPPED)
    with ExitStack() as stack:
        disk = tmp_path / "disk"
        if trouble is full_disk:
            stack.enter_context(mounted(disk, 16 * 1024 * 1024))
        else:
            disk.mkdir()
        logged = replace(logged, folder=disk / "log")
        stack.enter_context(
            worker.running(logged.nodes[0].store_url, logged.folder, tmp_path / "output", **QUICK)
        )
        before = logged.drive(Traffic(seed=24, events=300), tmp_path / "before")
        logged.until_written(300)
        with trouble(disk):
            meanwhile = logged.drive(Traffic(seed=25, events=900), tmp_path / "meanwhile")
            eventually(lambda: logged.metric(FAILURES) > 0, within_s=WITHIN_S)
            assert logged.metric(LAG) > 0
            assert logged.metric(WAITING) > 0
        rows = logged.until_written(1_200)
        assert decided(rows) == truly(before, meanwhile), "nothing was lost"
        assert logged.metric(DROPPED) == dropped
        eventually(lambda: logged.metric(LAG) == 0)
        after = logged.drive(Traffic(seed=26, events=300), tmp_path / "after")
        assert decided(logged.until_written(1_500)) == truly(before, meanwhile, after)
    output = (tmp_path / "output").read_text()
    assert output.count("the decision log cannot be written; its batches wait in the store") == 1
    assert "the decision log is written again" in output


def test_unreachable_object_store_is_counted_and_writing_resumes(logged, tmp_path, monkeypatch):
    dropped = logged.metric(DROPPED)
    for name, value in object_store.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with object_store.running() as objects:
        url = objects.url("log")

        def rows() -> list[dict[str, Any]]:
            return [row for row in read(url).to_pylist() if row["kind"] == "decision"]

        with worker.running(logged.nodes[0].store_url, url, tmp_path / "output", **QUICK):
            before = logged.drive(Traffic(seed=27, events=300), tmp_path / "before")
            eventually(lambda: len(rows()) == 300, within_s=WITHIN_S)
            objects.away = True
            meanwhile = logged.drive(Traffic(seed=28, events=900), tmp_path / "meanwhile")
            eventually(lambda: logged.metric(FAILURES) > 0, within_s=WITHIN_S)
            assert objects.refused > 0
            assert logged.metric(LAG) > 0
            objects.away = False
            eventually(lambda: len(rows()) == 1_200, within_s=WITHIN_S)
            eventually(lambda: logged.metric(LAG) == 0)
        assert decided(rows()) == truly(before, meanwhile), "nothing was lost"
        assert logged.metric(DROPPED) == dropped
        left = [key for key in objects.objects if "/_" in key and not key.endswith("/")]
        assert not left, "no partial file is left behind"
    assert "the decision log is written again" in (tmp_path / "output").read_text()
