"""The job `backfill`: its assertions equal the oracle's buckets, and restore a lost store."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pyarrow.parquet as pq
import pytest
import redis

from app.backfill.assertions import AssertionFolder
from app.backfill.load import LoadCounts, QuotaResolver, call_batches
from app.domain import sampled_rate, token_bucket
from app.domain.assertion import MANIFEST, Assertion, identity_of
from app.domain.digest import digest, fingerprint, spread
from app.domain.ladder import MatchingRules
from app.domain.oracle import IdsBucket, Oracle, RateBucket, TokensBucket
from app.domain.quota import Defaults, Layers
from app.store.loading import Loader
from app.store.redis import RedisStore
from tests import stores
from tests.charging import decision_on, plan_for
from tests.jobs import backfills
from tests.jobs.backfills import made, of_log
from tests.jobs.logs import SECRET, START_MS, OracleLog, asks
from tests.tiers import ROOT
from workers.decision_log.schema import SCHEMA, with_secrets
from workers.generate.traffic import Traffic
from workers.generate.write_log import Order, write_log
from workers.jobs import command, verdicts
from workers.jobs.__main__ import Processes
from workers.jobs.backfill import job
from workers.jobs.backfill import logged as logged_states
from workers.jobs.backfill.assertions import SUMMARY, TABLE
from workers.jobs.backfill.logged import Log
from workers.jobs.errors import JobError, JobUsageError
from workers.jobs.files import Fingerprints, row_groups
from workers.jobs.period import Period
from workers.jobs.progress import Silent
from workers.jobs.runner import FEW_ROWS, ProcessRunner

FORWARDS: Final = (0, 1, 7, 40, 90, 150, 400)
PRINCIPALS: Final = ("a", "b", "c d", "*")


def logged(count: int = 700, seed: int = 1, gaps: Sequence[int] = FORWARDS) -> OracleLog:
    """A log of random asks, and the oracle that decided them."""
    found = OracleLog(Oracle(SECRET))
    found.run(asks(seed, PRINCIPALS), count, gaps, seed)
    return found


def of(found: Sequence[Assertion], bucket: str, quota: str, identity: str, kind: str) -> list[Assertion]:
    return [one for one in found if one[:4] == (quota, bucket, identity, kind)]


@pytest.mark.parametrize("gaps", [FORWARDS, (*FORWARDS, -30, -5_000, -90_000)])
def test_assertions_are_what_the_oracle_holds(tmp_path: Path, gaps: tuple[int, ...]):
    history = logged(500, gaps=gaps)
    history.now_ms = max(row["at_ms"] for row in history.rows)
    history.run(asks(2, PRINCIPALS), 200, FORWARDS)
    at_ms = history.now_ms
    found, rates = of_log(history.write(tmp_path / "log"), at_ms)
    assert rates
    quotas = {quota.key: quota for entities in history.quotas.values() for quota in entities.values()}
    met = Counter[str]()
    for (key, bucket, _, _), held in history.oracle.buckets.items():
        quota = quotas[str(key)]

        def named(kind: str, quota=quota, bucket=bucket, key=key) -> list[Assertion]:
            return of(found, str(bucket), str(key), identity_of(quota), kind)

        if isinstance(held, RateBucket):
            live = sampled_rate.live_samples(
                held.state, at_ms, sampled_rate.kept_samples(quota.samples), quota.sample_ms
            )
            assert [(a.value, a.at_ms, a.last_ms) for a in named("sample")] == [tuple(s) for s in live]
            met["sample"] += len(live)
        elif isinstance(held, TokensBucket):
            full = token_bucket.tokens_at(held.state, at_ms, quota.limit, quota.burst) >= quota.burst
            wanted = [] if full or held.state is None else [tuple(held.state)]
            assert [(a.value, a.at_ms) for a in named("tokens")] == wanted
            met["tokens"] += len(wanted)
        elif isinstance(held, IdsBucket):
            charged = Counter(at for at in held.state.charges if at_ms - at < quota.window_ms)
            assert {a.at_ms: a.value for a in named("charge")} == charged
            ids = named("id")
            assert len(ids) == held.state.remembered(at_ms, quota.layers)
            for one in ids:
                assert one.digest is not None
                assert one.layer_ms is not None
                place = held.state.find(
                    spread(one.digest.to_bytes(8, "big", signed=True)), at_ms, quota.layers
                )
                assert place is not None
                assert held.state.layers[place.layer] == one.layer_ms
                assert one.layer_ms <= one.at_ms < one.layer_ms + quota.layers.interval_ms
            met["id"] += len(ids)
            met["charge"] += len(charged)
    assert len(found) == sum(met.values()), "there are no other assertions"
    assert min(met[kind] for kind in ("charge", "id", "sample")) > 20


def test_log_of_denied_asks_has_all_ids(tmp_path: Path):
    history = logged()
    at_ms = max(row["at_ms"] for row in history.rows)
    whole, _ = of_log(history.write(tmp_path / "whole"), at_ms)
    found, rates = of_log(history.write(tmp_path / "denied", list(denied(history.rows))), at_ms)
    assert not rates
    assert {one.kind for one in found} == {"charge", "id"}
    assert found == [one for one in whole if one.quota == "producer_ids_rate"]


def denied(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows that a node with QUOTAGATE_LOG=denied would log."""
    for row in rows:
        if row["decision"] != "admit":
            yield row
            continue
        wrote = [each for each in row["verdicts"] if each["charged_ids"] or each["refreshed_ids"]]
        if wrote:
            about = {name: row[name] for name in ("batch", "place", "node", "at_ms", "order", "principal")}
            yield {**row, **dict.fromkeys(("decision", "ids")), **about, "kind": "ids", "verdicts": wrote}


def test_reset_empties_the_bucket(tmp_path: Path):
    history = logged(200)
    after = history.order
    history.order += 128
    emptied = ["producer_ids_rate", "request_rate"]
    history.add(
        kind="reset",
        order=after,
        change={
            "what": "user=a",
            "before": json.dumps({"quotas": emptied}),
            "after": None,
            "who": "me",
            "version": None,
        },
    )
    found, _ = of_log(history.write(tmp_path / "one"), history.now_ms)
    assert not [a for a in found if a.bucket == "user=a" and a.quota in emptied]
    assert [a for a in found if a.bucket == "user=b" and a.quota == "producer_ids_rate"]

    ask = next(asks(5, ["a"]))
    history.now_ms += 10
    history.ask(replace(ask, mode="record", usage={"requests": 2}, producer_ids=(991, 992)))
    found, _ = of_log(history.write(tmp_path / "two"), history.now_ms)
    new = [int.from_bytes(digest(SECRET, "a", id_), "big", signed=True) for id_ in (991, 992)]
    mine = [a for a in found if a.bucket == "user=a" and a.quota == "producer_ids_rate"]
    assert {a.digest for a in mine if a.kind == "id"} == set(new)
    assert [(a.at_ms, a.value) for a in mine if a.kind == "charge"] == [(history.now_ms, 2)]


def test_late_decisions_count_but_loads_and_dropped_rows_do_not(tmp_path: Path):
    """`late` is a decision of the store; `load` and `dropped` have no charges, and no time that counts."""
    history = logged(300)
    plain, _ = of_log(history.write(tmp_path / "plain"), history.now_ms)
    for row in history.rows[1::3]:
        if row["order"] is not None and not row["replayed"]:
            row["kind"] = "late"
    about = dict.fromkeys(("before", "after", "who", "version"))
    quotas = json.dumps({"quotas": ["producer_ids_rate", "request_rate"]})
    history.add(kind="load", order=history.order, change=about | {"what": "user=a", "after": quotas})
    history.add(kind="dropped", change=about | {"what": "full", "after": '{"rows": 3}'})
    history.rows[-1]["at_ms"] += 86_400_000  # the node's clock is a day ahead
    folder = made(tmp_path / "out", log=str(history.write(tmp_path / "late")))
    assert folder.at_ms == history.now_ms
    assert backfills.assertions(folder) == plain


def test_order_of_rows_and_files_does_not_matter(tmp_path: Path):
    """Only the store's order counts, also where times go back."""
    history = logged(400, gaps=(*FORWARDS, -30, -90_000))
    at_ms = max(row["at_ms"] for row in history.rows)
    straight = of_log(history.write(tmp_path / "straight"), at_ms)
    mixed = random.Random(1).sample(history.rows, len(history.rows))
    for part in range(3):
        history.write(tmp_path / "mixed", mixed[part::3], f"part-{part}")
    assert of_log(tmp_path / "mixed", at_ms) == straight


@pytest.mark.parametrize("seed", range(4))
def test_replay_leaves_out_only_writes_that_no_longer_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
):
    """Rates are replayed from the first write that counts: the same as from the first one.

    In small pieces, so that the shortcut and what forbids it (clocks set back, refunds) meet in one bucket.
    """
    monkeypatch.setattr(verdicts, "ROWS_OF_A_CHUNK", 16)
    history = logged(400, seed, gaps=(*FORWARDS, 1_500, 4_000, *([-700] if seed % 2 else [])))
    at_ms = max(row["at_ms"] for row in history.rows)
    begins = Counter[bool]()
    first_that_counts = logged_states._first_that_counts

    def noted(*given: Any) -> int:
        begin = first_that_counts(*given)
        begins[begin > 0] += 1
        return begin

    monkeypatch.setattr(logged_states, "_first_that_counts", noted)
    found = of_log(history.write(tmp_path / "log"), at_ms)
    assert begins[True] > 5
    monkeypatch.setattr(logged_states, "_first_that_counts", lambda *_: 0)
    assert of_log(tmp_path / "log", at_ms) == found
    assert sum(one.kind == "sample" for one in found[0]) > 10


def test_row_that_is_there_twice_counts_once(tmp_path: Path):
    """A writer may repeat a batch after a crash."""
    history = logged(300)
    once = of_log(history.write(tmp_path / "log"), history.now_ms)
    history.write(tmp_path / "log", history.rows[100:250], "again")
    assert of_log(tmp_path / "log", history.now_ms) == once


def test_several_processes_and_partitions_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    history = logged(300)
    folder = str(history.write(tmp_path / "log"))
    wanted, _ = of_log(tmp_path / "log", history.now_ms)
    monkeypatch.setattr(logged_states, "partitions_for", lambda _: 3)
    with ProcessRunner(Silent(), FEW_ROWS + 1, 2) as runner:
        states = Log(folder, row_groups(folder, Period()), Period()).states(runner, None, backfills.MAX_IDS)
        assert backfills.said(states.parts) == wanted


@pytest.mark.parametrize("version", [1, 2, 3])
def test_logs_of_earlier_versions_are_read(version: int):
    """They lack some columns and fields of verdicts."""
    found, rates = of_log(ROOT / f"tests/decision_log/version-{version}")
    assert {"charge", "id"} <= {one.kind for one in found}
    assert rates == any(one.kind in {"sample", "tokens"} for one in found)


def test_period_without_rows_is_refused(tmp_path: Path):
    history = logged(50)
    period = Period(history.now_ms + 1, None)
    with pytest.raises(JobError, match="log: no row in the period from 2026-11-21 10:00:"):
        of_log(history.write(tmp_path / "log"), None, period)


OURS, THEIRS = (fingerprint(bytes([number]) * 32) for number in (1, 2))


def footer_of(*secrets: str) -> Any:
    return SimpleNamespace(metadata=with_secrets(SCHEMA, secrets).metadata)


@pytest.mark.parametrize(
    ("deployment", "files", "whose"),
    [
        (OURS, [footer_of(THEIRS)], "file-0: .* than that of this deployment"),
        (OURS, [footer_of(), footer_of(OURS), footer_of(OURS, THEIRS)], "file-2: .* this deployment"),
        (None, [footer_of(OURS), footer_of(THEIRS)], "file-1: .* than that of file-0"),
        (None, [footer_of(OURS, THEIRS)], "file-0: .* than that of file-0"),
    ],
)
def test_log_of_another_secret_is_refused_with_its_file_name(
    deployment: str | None, files: list[Any], whose: str
):
    found = Fingerprints(deployment)
    *before, last = [(f"file-{number}", file) for number, file in enumerate(files)]
    for each in before:
        found.check(*each)
    with pytest.raises(JobError, match=rf"{whose} .*set QUOTAGATE_HASH_SECRET"):
        found.check(*last)


def test_secret_of_log_is_its_own_or_the_deployments():
    for deployment, files, known in (
        (OURS, [footer_of(), footer_of(OURS)], OURS),
        (None, [footer_of(), footer_of(THEIRS), footer_of(THEIRS)], THEIRS),
        (OURS, [footer_of()], OURS),
        (None, [footer_of()], None),
    ):
        found = Fingerprints(deployment)
        for file in files:
            found.check("file", file)
        assert found.known == known


def test_output_folder_names_the_secret_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A log of another secret leads to no folder."""
    traffic = Traffic(seed=2, events=100, rate=5.0, principals=9)
    write_log(Order(traffic, START_MS, bytes([1]) * 32, 1), tmp_path / "log", tmp_path / "truth")
    assert made(tmp_path / "1", log=str(tmp_path / "log")).secret == OURS
    monkeypatch.setenv("QUOTAGATE_HASH_SECRET", "02" * 32)
    with pytest.raises(
        JobError, match=r"generated-0\.parquet: metadata quotagate\.secrets: its ids were hashed"
    ):
        made(tmp_path / "2", log=str(tmp_path / "log"))
    assert not (tmp_path / "2").exists()


async def test_lost_store_is_restored(tmp_path: Path):
    """A store that was filled from the log decides like one that was never lost."""
    history = logged(900)
    folder = made(tmp_path / "assertions", log=str(history.write(tmp_path / "log")))
    assert folder.at_ms == history.now_ms
    with stores.running("valkey") as url:
        loader = Loader(url, folder.name, at_ms=folder.at_ms)
        counts = LoadCounts()
        resolver = QuotaResolver(lambda: history.quotas, MatchingRules(), counts)
        for loads, done in call_batches(folder.read(), 0, resolver):
            for loaded in await loader.load(loads, done):
                counts.add(loaded)
        await loader.close()
        assert (counts.skipped, counts.loaded.there, counts.loaded.no_room) == ({}, 0, 0)
        with redis.Redis.from_url(url) as keys:
            assert len(keys.keys("qg1:{*")) > 10
        await same_decisions(history, url)


async def same_decisions(history: OracleLog, url: str, count: int = 400) -> None:
    """The store decides the next asks like the oracle, which has seen everything."""
    store = RedisStore(url, caller_clock=True)
    await store.connect()
    met = Counter[str]()
    for ask in islice(asks(1, PRINCIPALS), 900, 900 + count):
        history.now_ms += FORWARDS[len(str(ask)) % len(FORWARDS)]
        timed = replace(ask, at_ms=history.now_ms)
        if ask.principal is None:
            timed = replace(timed, producer_ids=None)
        plan = plan_for(timed, history.quotas, MatchingRules(), SECRET)
        if plan is None:
            continue
        (answer,) = await store.decide([plan])
        got = decision_on(timed, plan, answer)
        assert got == history.oracle.decide(timed, history.quotas, MatchingRules(), history.now_ms), timed
        met[got.decision] += 1
    await store.close()
    assert met["admit"] > 50
    assert met["throttle"] + met["delay"] > 50


@pytest.mark.parametrize(
    ("layers", "window_ms", "why"),
    [
        ("layred", 60_000, "--layers: 'layred' must be one of layered, kip936, timed, or INTERVAL_MS/TTL_MS"),
        ("100/500", 60_000, "one to four intervals"),
        ("layered", 10, "--window-ms: must be from 1000"),
    ],
)
def test_invalid_layers_are_wrong_use(layers: str, window_ms: int, why: str):
    with pytest.raises(JobUsageError, match=why.replace("/", "/")):
        job.layers_of(layers, window_ms)


def test_layers_are_a_policy_or_two_numbers():
    assert job.layers_of("layered", 60_000) == Layers.named("layered", 60_000)
    assert job.layers_of("100/400", 60_000) == Layers(100, 400)
    assert Defaults().layers in ("layered", "kip936", "timed")


def test_command_leaves_a_complete_folder_or_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Once as a program; the failing runs are in this process."""
    history = logged(50)
    folder = history.write(tmp_path / "log")
    out = str(tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "workers.jobs", "backfill", "--out", out, "--log", str(folder)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={"PATH": "/usr/bin:/bin", "QUOTAGATE_HASH_SECRET": SECRET.hex(), "PYTHONPATH": str(Path.cwd())},
    )
    assert done.returncode == 0, done.stderr
    assert f"next: quotagate backfill load {out}" in done.stdout
    assert SECRET.hex() not in done.stdout + done.stderr
    assert {each.name for each in (tmp_path / "out").iterdir()} == {MANIFEST, SUMMARY, TABLE}
    found = backfills.assertions(AssertionFolder.open(out))
    assert json.loads((tmp_path / "out" / SUMMARY).read_text()) == {
        "buckets": len({(one.quota, one.bucket) for one in found}),
        "ids": sum(one.kind == "id" for one in found),
        "as_of_ms": history.now_ms,
    }
    held = (tmp_path / "out" / MANIFEST).read_text()
    (bad,) = (each for each in (tmp_path / "log").rglob("*.parquet"))
    bad.write_bytes(bad.read_bytes()[:2_000])
    run = partial(command.main, Processes())
    assert run(["backfill", "--out", out, "--log", str(folder), "--overwrite"]) == 1
    assert f"{bad}: cannot be read as Parquet" in capsys.readouterr().err
    assert (tmp_path / "out" / MANIFEST).read_text() == held, "the old folder stays"
    assert {each.name for each in tmp_path.iterdir()} == {"log", "out"}
    assert run(["backfill", "--out", out, "--history", str(bad), "--at", "soon"]) == 2


def test_assertions_of_a_long_log_equal_the_truth(tmp_path: Path):
    traffic = Traffic(seed=11, events=60_000, rate=120.0)
    write_log(Order(traffic, START_MS, SECRET, 2), tmp_path / "log", tmp_path / "truth")
    at_ms = START_MS + 400_000
    found, _ = of_log(tmp_path / "log", at_ms, Period(None, at_ms + 1))
    sums = Counter[str]()
    for one in found:
        if (one.quota, one.kind) == ("producer_ids_rate", "charge"):
            sums[one.bucket] += int(one.value or 0)
    files = (tmp_path / "truth").glob("*.parquet")
    truth = [row for file in files for row in pq.read_table(file).to_pylist()]
    charged = Counter(
        f"user={row['principal']}" for row in truth if row["charged"] and 0 <= at_ms - row["at_ms"] < 600_000
    )
    assert len(charged) > 100
    assert sums == charged
