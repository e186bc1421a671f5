"""The catalog on SQLite and on a real PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
import uvloop
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import select, text, update

from app.catalog import schema, sql
from app.catalog.catalog import Catalog, Conditions
from app.catalog.deployment import adopt_debt
from app.catalog.errors import (
    CatalogUnavailableError,
    DebtMismatchError,
    PreconditionError,
    QuotasNotFoundError,
    SchemaVersionError,
    SecretMismatchError,
)
from app.catalog.serial import POLL_S
from app.catalog.snapshot import Snapshot
from app.catalog.sql import Origin
from app.catalog.tables import CHANGES, STATE
from app.domain.digest import fingerprint
from app.domain.entity import ANY, Entity
from app.domain.errors import QuotaValueError
from app.domain.quota import Defaults, Quota
from app.domain.quota_value import resolve
from tests.postgres import Postgres, started
from tests.waiting import until

ALICE = Entity.of(user="alice")
WHO = Origin(who="admin", at_ms=1_000, reason="because")
Opener = Callable[..., Awaitable[Catalog]]


@pytest.fixture
async def opened(database: str) -> AsyncIterator[Opener]:
    """Opens catalogs, each as a node would, and closes them at the end."""
    async with AsyncExitStack() as stack:

        async def open_catalog(url: str = database, **options: Any) -> Catalog:
            catalog = Catalog(url, options.pop("defaults", Defaults()), **options)
            await catalog.open()
            stack.push_async_callback(catalog.close)
            return catalog

        yield open_catalog


def quota(catalog: Catalog, key: str = "request_rate", entity: Entity = ALICE) -> Quota | None:
    return catalog.snapshot.quotas.get(key, {}).get(entity)


def limit(catalog: Catalog, key: str = "request_rate", entity: Entity = ALICE) -> float | None:
    found = quota(catalog, key, entity)
    return None if found is None else found.limit


async def history(catalog: Catalog) -> list[Any]:
    async with catalog.database.engine.connect() as connection:
        return list(await connection.execute(select(CHANGES).order_by(CHANGES.c.id)))


# Following


async def test_node_decides_by_its_own_change_before_it_answers(opened: Opener):
    node = await opened()
    await node.put(ALICE, {"request_rate": 5}, WHO)
    assert limit(node) == 5
    await node.patch(ALICE, {"request_rate": 6}, WHO)
    assert limit(node) == 6
    await node.delete(ALICE, WHO)
    assert limit(node) is None


async def test_two_nodes_follow_each_other(opened: Opener):
    one, other = await opened(), await opened()
    await one.put(ALICE, {"request_rate": 5, "producer_ids_rate": 7}, WHO)
    await until(lambda: limit(other) == 5 and limit(other, "producer_ids_rate") == 7)
    await other.patch(ALICE, {"request_rate": None, "producer_ids_rate": 8}, WHO)
    await until(lambda: limit(one) is None and limit(one, "producer_ids_rate") == 8)
    await one.delete(ALICE, WHO)
    await until(lambda: limit(other, "producer_ids_rate") is None)
    await until(lambda: one.snapshot == other.snapshot)


async def test_change_is_in_force_at_another_node_after_its_next_poll(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
):
    """That is within a second: two polls take half a second."""
    looks: Counter[Catalog] = Counter()
    look = Catalog._catch_up

    async def counted(node: Catalog) -> None:
        looks[node] += 1
        await look(node)

    monkeypatch.setattr(Catalog, "_catch_up", counted)
    one, other = await opened(), await opened()
    for number in range(5):
        await one.put(ALICE, {"request_rate": number}, WHO)
        before = looks[other]
        await until(lambda number=number: limit(other) == number)  # type: ignore[misc]
        assert looks[other] - before <= 2, "one may have been under way"
    assert 2 * POLL_S <= 0.5


async def test_new_node_loads_all_quotas(opened: Opener):
    one = await opened()
    for number in range(450):
        await one.put(Entity.of(user=f"user-{number}"), {"request_rate": number}, WHO)
    await one.put(ALICE, {"request_rate": 5}, WHO)
    await one.delete(Entity.of(user="user-0"), WHO)
    await until(lambda: one.snapshot.version == 452)
    assert (await opened()).snapshot == one.snapshot


async def test_get_reads_the_database_not_the_snapshot(opened: Opener):
    one, other = await opened(), await opened()
    written = await one.put(ALICE, {"request_rate": {"limit": 5.0, "shadow": True}}, WHO)
    read = await other.get(ALICE)
    assert written.before is None
    assert read == written.after
    assert read is not None
    assert read.definitions == {"request_rate": {"limit": 5, "shadow": True}}
    assert await other.get(Entity.of(user="bob")) is None


async def test_longest_names_fit_every_index(opened: Opener):
    node = await opened()
    longest = Entity.of(user="äöü€" * 56 + "x", client_id="".join(chr(0x4E00 + n * 7) for n in range(170)))
    await node.put(longest, {"request_rate": 5}, WHO)
    assert (await opened()).snapshot.quotas["request_rate"][longest].limit == 5


async def test_row_from_a_newer_version_is_ignored(opened: Opener):
    one, other = await opened(), await opened()
    await one.put(ALICE, {"request_rate": 5}, WHO)
    async with one.database.engine.begin() as connection:
        await connection.execute(update(STATE).values(version=STATE.c.version + 1))
        await connection.execute(text("UPDATE quotas SET quota = 'rate_of_the_future', version = 2"))
    await one.put(Entity.of(user="bob"), {"request_rate": 6}, WHO)
    await until(lambda: limit(other, entity=Entity.of(user="bob")) == 6)
    assert other.reachable


async def test_catalog_restored_from_a_backup_is_followed_back(opened: Opener):
    node = await opened()
    await node.put(ALICE, {"request_rate": 5}, WHO)
    await node.put(ALICE, {"request_rate": 6}, WHO)
    await until(lambda: node.snapshot.version == 2)
    async with node.database.engine.begin() as connection:
        await connection.execute(update(STATE).values(version=1))
        await connection.execute(text("DELETE FROM quotas"))
    await until(lambda: limit(node) is None)


# Writing


async def test_lost_update_is_refused(opened: Opener):
    one, other = await opened(), await opened()
    first = (await one.put(ALICE, {"request_rate": 5}, WHO)).after
    assert first is not None
    seen = Conditions(match=frozenset({first.version}))
    await one.put(ALICE, {"request_rate": 6}, WHO, seen)
    for write in (
        other.put(ALICE, {"request_rate": 7}, WHO, seen),
        other.patch(ALICE, {"request_rate": 7}, WHO, seen),
        other.delete(ALICE, WHO, seen),
        other.put(ALICE, {"request_rate": 7}, WHO, Conditions(none_match="*")),
        other.put(Entity.of(user="bob"), {"request_rate": 7}, WHO, Conditions(match="*")),
    ):
        with pytest.raises(PreconditionError):
            await write
    assert (await other.get(ALICE)).definitions == {"request_rate": {"limit": 6}}  # type: ignore[union-attr]
    assert len(await history(one)) == 2
    await other.put(Entity.of(user="bob"), {"request_rate": 7}, WHO, Conditions(none_match="*"))
    await other.put(ALICE, {"request_rate": 7}, WHO, Conditions(match="*"))


async def test_removed_entity_never_returns_at_an_old_version(opened: Opener):
    node = await opened()
    versions = []
    for _ in range(3):
        written = await node.put(ALICE, {"request_rate": 5}, WHO)
        assert written.before is None
        assert written.after is not None
        versions.append(written.after.version)
        await node.delete(ALICE, WHO)
    assert versions == [1, 3, 5]


async def test_concurrent_writers_lose_and_repeat_nothing(opened: Opener):
    nodes = [await opened(), await opened()]
    entities = [Entity.of(user=f"user-{number}") for number in range(5)]

    async def write(number: int) -> int:
        patch = {"request_rate": number, "consumer_byte_rate": number}
        written = await nodes[number % 2].patch(entities[number % 5], patch, WHO)
        assert written.after is not None
        assert written.after.definitions["request_rate"] == {"limit": number}
        return written.after.version

    versions = await asyncio.gather(*(write(number) for number in range(60)))
    assert sorted(versions) == list(range(1, 61))
    assert len(await history(nodes[0])) == 60
    await until(lambda: nodes[0].snapshot == nodes[1].snapshot and nodes[0].snapshot.version == 60)
    for place, entity in enumerate(entities):
        last = max(range(place, 60, 5), key=versions.__getitem__)
        assert limit(nodes[0], entity=entity) == limit(nodes[0], "consumer_byte_rate", entity) == last


async def test_one_of_many_writers_at_the_same_version_wins(opened: Opener):
    nodes = [await opened(), await opened()]
    await nodes[0].put(ALICE, {"request_rate": 0}, WHO)
    seen = Conditions(match=frozenset({1}))
    results = await asyncio.gather(
        *(nodes[n % 2].put(ALICE, {"request_rate": n}, WHO, seen) for n in range(20)), return_exceptions=True
    )
    assert sum(not isinstance(result, BaseException) for result in results) == 1
    assert sum(isinstance(result, PreconditionError) for result in results) == 19


async def test_refused_change_writes_nothing(opened: Opener):
    node = await opened()
    await node.put(ALICE, {"request_rate": 5}, WHO)
    with pytest.raises(QuotaValueError):
        await node.put(ALICE, {"request_rate": 6, "consumer_byte_rate": 0.5}, WHO)
    with pytest.raises(QuotaValueError):
        await node.patch(ALICE, {"request_rate": 6, "consumer_byte_rate": {"shadow": True}}, WHO)
    with pytest.raises(QuotasNotFoundError):
        await node.patch(Entity.of(user="bob"), {"request_rate": None}, WHO)
    with pytest.raises(QuotasNotFoundError):
        await node.delete(Entity.of(user="bob"), WHO)
    untouched = await node.patch(ALICE, {"consumer_byte_rate": None}, WHO)
    assert untouched.before == untouched.after
    assert untouched.after is not None
    assert untouched.after.version == 1
    assert len(await history(node)) == 1


async def test_history_has_author_time_reason_and_definitions(opened: Opener):
    node = await opened()
    await node.put(ALICE, {"request_rate": 5}, Origin("ann", 1, "launch"))
    await node.patch(ALICE, {"request_rate": 6, "producer_ids_rate": 7}, Origin("bob", 2, None))
    await node.patch(ALICE, {"producer_ids_rate": None}, Origin("bob", 3, "ü"))
    await node.delete(ALICE, Origin("ann", 4, "over"))
    five, six, ids = {"request_rate": {"limit": 5}}, {"request_rate": {"limit": 6}}, {"limit": 7}
    found = [
        (
            row.at_ms,
            row.who,
            row.entity,
            json.loads(row.before or "null"),
            json.loads(row.after or "null"),
            row.reason,
        )
        for row in await history(node)
    ]
    assert found == [
        (1, "ann", "user=alice", None, five, "launch"),
        (2, "bob", "user=alice", five, six | {"producer_ids_rate": ids}, None),
        (3, "bob", "user=alice", six | {"producer_ids_rate": ids}, six, "ü"),
        (4, "ann", "user=alice", six, None, "over"),
    ]


# Epochs


async def test_change_of_identity_resets_buckets_and_other_changes_do_not(opened: Opener):
    node, other = await opened(), await opened()

    async def epoch_after(value: object) -> int | None:
        await node.put(ALICE, {"request_rate": value}, WHO)
        found = quota(node)
        return None if found is None else found.epoch

    assert await epoch_after(5) == 0
    for same in (
        6,
        {"limit": 6, "enforcement": "deny"},
        {"limit": 6, "shadow": True},
        {"limit": 6, "on_store_failure": "throttle"},
        {"limit": 6, "samples": 11, "sample_ms": 1_000, "algorithm": "sampled_rate", "scope": "cluster"},
    ):
        assert await epoch_after(same) == 0
    assert await epoch_after({"limit": 6, "samples": 5}) == 7
    assert await epoch_after({"limit": 7, "samples": 5}) == 7
    assert await epoch_after(6) == 9, "a change back resets the bucket too"
    assert await epoch_after({"limit": 6, "sample_ms": 500}) == 10
    assert await epoch_after({"limit": 6, "scope": "broker"}) == 11
    assert await epoch_after({"limit": 6, "algorithm": "token_bucket"}) == 12
    assert await epoch_after({"limit": 6, "algorithm": "token_bucket", "burst": 3}) == 12
    await until(lambda: other.snapshot == node.snapshot)


async def test_new_quota_takes_over_the_buckets_of_the_default_that_applied(opened: Opener) -> None:
    """Otherwise a user with a new quota would get the limit twice, and their ids would be forgotten."""
    node = await opened()
    bob, everybody = Entity.of(user="bob"), Entity.of(user=ANY)

    async def epoch(entity: Entity, value: object) -> int:
        await node.put(entity, {"producer_ids_rate": value}, WHO)
        return node.snapshot.quotas["producer_ids_rate"][entity].epoch

    assert await epoch(everybody, 5) == 0
    assert await epoch(everybody, {"limit": 5, "scope": "broker"}) == 2
    assert await epoch(everybody, 5) == 3
    assert await epoch(bob, 5) == 3, "bob keeps the buckets that were charged before"
    assert await epoch(bob, {"limit": 5, "scope": "broker"}) == 5
    assert await epoch(bob, 5) == 6, "bob's own change resets them"
    await node.delete(bob, WHO)
    assert await epoch(bob, 6) == 3, "bob had returned to the default's buckets meanwhile"


async def test_pair_takes_over_the_buckets_of_the_nearest_default(opened: Opener) -> None:
    node = await opened()
    pair, near, far = (
        Entity.of(user="a", client_id="c"),
        Entity.of(user="a", client_id=ANY),
        Entity.of(user=ANY, client_id=ANY),
    )
    for entity, samples in ((far, 5), (far, 11), (near, 5), (near, 11), (pair, 11)):
        await node.put(entity, {"request_rate": {"limit": 1, "samples": samples}}, WHO)
    rates = node.snapshot.quotas["request_rate"]
    assert [rates[entity].epoch for entity in (far, near, pair)] == [2, 4, 4]


async def test_removed_quota_remembers_its_buckets(opened: Opener):
    node = await opened()
    await node.put(ALICE, {"request_rate": 5, "producer_ids_rate": 5}, WHO)
    await node.patch(ALICE, {"request_rate": None}, WHO)
    await node.patch(ALICE, {"request_rate": 9}, WHO)
    assert quota(node).epoch == 0  # type: ignore[union-attr]
    await node.delete(ALICE, WHO)
    await node.put(ALICE, {"request_rate": {"limit": 9, "samples": 2}, "producer_ids_rate": 5}, WHO)
    assert quota(node).epoch == 5  # type: ignore[union-attr]
    assert quota(node, "producer_ids_rate").epoch == 0  # type: ignore[union-attr]


async def test_new_layer_policy_or_window_keeps_the_ids(opened: Opener):
    node = await opened()
    await node.put(ALICE, {"producer_ids_rate": 5}, WHO)
    await node.put(ALICE, {"producer_ids_rate": {"limit": 5, "layers": "timed", "window_ms": 5_000}}, WHO)
    assert quota(node, "producer_ids_rate").epoch == 0  # type: ignore[union-attr]


# The hash secret


async def test_nodes_that_start_at_the_same_moment_agree_on_a_secret(opened: Opener):
    nodes = await asyncio.gather(*(opened() for _ in range(8)))
    assert len({node.hash_secret for node in nodes}) == 1
    assert len(nodes[0].hash_secret) == 32
    assert (await opened()).hash_secret == nodes[0].hash_secret


async def test_given_secret_must_match_the_catalogs(opened: Opener):
    secret = b"s" * 32
    node = await opened(hash_secret=secret)
    assert node.hash_secret == secret
    assert (await opened(hash_secret=secret)).hash_secret == secret
    with pytest.raises(SecretMismatchError, match="QUOTAGATE_HASH_SECRET is not the secret"):
        await opened(hash_secret=b"t" * 32)
    with pytest.raises(SecretMismatchError, match="give every node the same one"):
        await opened()
    async with node.database.engine.connect() as connection:
        kept = (await connection.execute(select(STATE.c.hash_secret, STATE.c.hash_secret_fingerprint))).one()
    assert tuple(kept) == (None, fingerprint(secret)), "a given secret is not kept"


async def test_generated_secret_may_be_given_later(opened: Opener):
    made = (await opened()).hash_secret
    assert (await opened(hash_secret=made)).hash_secret == made


# The longest debt


async def test_first_node_sets_the_longest_debt_and_others_must_match(opened: Opener, database: str):
    await opened(defaults=Defaults(max_debt_ms=90_500))
    await opened(defaults=Defaults(max_debt_ms=90_500))
    text = "QUOTAGATE_MAX_DEBT is PT1H here and PT90.5S in this deployment.*`quotagate migrate --max-debt`"
    with pytest.raises(DebtMismatchError, match=text):
        await opened()
    await asyncio.to_thread(adopt_debt, database, 3_600_000)
    await opened()
    with pytest.raises(
        DebtMismatchError, match="QUOTAGATE_MAX_DEBT is PT10M here and PT1H in this deployment"
    ):
        await opened(defaults=Defaults(max_debt_ms=600_000))


async def test_deepest_debt_follows_from_the_limit_and_the_longest_debt(opened: Opener):
    node = await opened(defaults=Defaults(max_debt_ms=60_000))
    await node.put(ALICE, {"controller_mutation_rate": 5}, WHO)
    assert quota(node, "controller_mutation_rate").max_debt == 300  # type: ignore[union-attr]
    await node.put(ALICE, {"controller_mutation_rate": 0}, WHO)
    assert quota(node, "controller_mutation_rate").max_debt == math.inf  # type: ignore[union-attr]


# The database unavailable


async def test_locked_database_fails_the_write_and_keeps_the_snapshot(
    opened: Opener, database: str, monkeypatch: pytest.MonkeyPatch
):
    node = await opened()
    await node.put(ALICE, {"request_rate": 5}, WHO)
    with schema.connect(database) as locking, monkeypatch.context() as impatient:
        locking.execute(update(STATE).values(version=STATE.c.version))
        impatient.setattr(sql, "ANSWER_S", 0.3)
        with pytest.raises(CatalogUnavailableError, match="did not answer within"):
            await node.put(ALICE, {"request_rate": 6}, WHO)
        assert limit(node) == 5
    await node.put(ALICE, {"request_rate": 7}, WHO)
    assert limit(node) == 7


@pytest.fixture
def mortal() -> Iterator[Postgres]:
    """A PostgreSQL server for one test, which may kill it."""
    server = started()
    yield server
    server.remove()


@pytest.mark.parametrize("how", [signal.SIGQUIT, signal.SIGINT])
async def test_killed_database_leaves_the_snapshot_in_force(mortal: Postgres, how: signal.Signals):
    url = mortal.database()
    schema.upgrade(url)
    nodes = [Catalog(url, Defaults()), Catalog(url, Defaults())]
    for node in nodes:
        await node.open()
    await nodes[0].put(ALICE, {"request_rate": 5}, WHO)
    await until(lambda: limit(nodes[1]) == 5)

    mortal.stop(how)
    await until(lambda: not nodes[0].reachable and not nodes[1].reachable)
    assert limit(nodes[0]) == limit(nodes[1]) == 5
    with pytest.raises(CatalogUnavailableError, match="out of reach"):
        await nodes[0].put(ALICE, {"request_rate": 6}, WHO)
    with pytest.raises(CatalogUnavailableError):
        await nodes[0].get(ALICE)
    with pytest.raises(CatalogUnavailableError):
        await Catalog(url, Defaults()).open()
    with pytest.raises(CatalogUnavailableError, match="cannot be migrated"):
        schema.upgrade(url)

    mortal.start()
    await until(lambda: nodes[0].reachable and nodes[1].reachable)
    await nodes[0].put(ALICE, {"request_rate": 7}, WHO)
    await until(lambda: limit(nodes[1]) == 7)
    for node in nodes:
        await node.close()


async def test_frozen_database_is_noticed_and_used_again_later(
    mortal: Postgres, monkeypatch: pytest.MonkeyPatch
):
    url = mortal.database()
    schema.upgrade(url)
    node = Catalog(url, Defaults())
    await node.open()
    await node.put(ALICE, {"request_rate": 5}, WHO)
    with psycopg.connect(url) as watching:
        backends = watching.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ).fetchall()
    frozen = [mortal.pid, *(pid for (pid,) in backends)]
    try:
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        with monkeypatch.context() as impatient:
            impatient.setattr(sql, "ANSWER_S", 0.4)
            await until(lambda: not node.reachable)
            with pytest.raises(CatalogUnavailableError, match="did not answer"):
                await node.put(ALICE, {"request_rate": 6}, WHO)
        assert limit(node) == 5
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    await until(lambda: node.reachable)
    await until(lambda: limit(node) == 5)
    await node.put(ALICE, {"request_rate": 7}, WHO)
    assert limit(node) == 7
    assert len(await history(node)) == 2, "a write that failed is not made later"
    await node.close()


async def test_kernel_closes_connections_to_a_vanished_host(postgres: Postgres):
    """Without these timeouts 25 s of silence cost 22 s more, as retransmissions get rare; with them, 1 s."""
    catalog = sql.Sql(postgres.database())
    async with catalog.engine.connect() as connection:
        driver: Any = (await connection.get_raw_connection()).driver_connection
        parameters = driver.info.get_parameters()
    await catalog.close()
    assert (parameters["tcp_user_timeout"], parameters["keepalives_idle"]) == ("6000", "3")


async def test_unreachable_database_fails_the_start():
    with pytest.raises(CatalogUnavailableError, match="out of reach") as caught:
        await Catalog("postgresql://user:hunter2@127.0.0.1:1/quotas", Defaults()).open()
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ValueError, match="not in mysql://"):
        Catalog("mysql://db/quotas", Defaults())


async def test_missing_sqlite_file_is_not_created(tmp_path: Path):
    with pytest.raises(SchemaVersionError, match="run `quotagate migrate`"):
        await Catalog(f"sqlite:///{tmp_path / 'catalog.db'}", Defaults()).open()
    assert not os.listdir(tmp_path)  # noqa: PTH208 - a Path would block, says another rule


def test_postgresql_works_under_uvloop(postgres: Postgres):
    url = postgres.database()
    schema.upgrade(url)

    async def use() -> None:
        node = Catalog(url, Defaults())
        await node.open()
        await node.put(ALICE, {"request_rate": 5}, WHO)
        await until(lambda: node.snapshot.version == 1)
        await node.close()

    uvloop.run(use())


async def test_shadow_quota_is_dated_by_the_last_change_of_its_definition(opened: Opener):
    one, other = await opened(), await opened()

    async def since(at_ms: int, **values: object) -> int | None:
        await one.put(ALICE, values, Origin("admin", at_ms))
        found = await other.get(ALICE)
        assert found is not None
        await until(lambda: other.snapshot.version == found.version)
        followed = quota(other)
        assert followed is not None
        assert followed.since_ms == found.quotas["request_rate"].since_ms
        return followed.since_ms

    shadow = {"limit": 5, "shadow": True}
    assert await since(1_000, request_rate={"limit": 5}) == 0, "it is not in shadow"
    assert await since(2_000, request_rate=shadow) == 2_000
    assert await since(3_000, request_rate=shadow, producer_ids_rate=7) == 2_000
    assert await since(4_000, request_rate={**shadow, "limit": 6}) == 4_000
    assert await since(3_500, request_rate=shadow) == 4_001, "never the same for two definitions"
    await one.delete(ALICE, Origin("admin", 3_600))
    assert await since(3_700, request_rate=shadow) == 4_002
    await one.change({ALICE: {"request_rate": shadow}}, Origin("admin", 9_000))
    assert await since(9_000, request_rate=shadow) == 4_002


# The schema


def test_migrations_go_up_down_and_up_and_match_the_tables(empty: str):
    schema.upgrade(empty)
    schema.upgrade(empty)
    with schema.connect(empty) as connection:
        command.check(schema.config(connection))
        assert connection.execute(select(STATE.c.version)).scalar_one() == 0
    with schema.connect(empty) as connection:
        command.downgrade(schema.config(connection), "base")
    with schema.connect(empty) as connection:
        assert not connection.dialect.has_table(connection, "quotas")
        command.upgrade(schema.config(connection), "head")
    with schema.connect(empty) as connection:
        command.check(schema.config(connection))


def test_names_of_migrations_tell_their_order():
    """A node that starts reads only the names, without Alembic."""
    steps = list(ScriptDirectory.from_config(schema.config()).walk_revisions())
    assert schema.revisions() == [step.revision for step in reversed(steps)]


async def test_missing_schema_is_refused_with_what_to_do(empty: str):
    with pytest.raises(SchemaVersionError, match="run `quotagate migrate`"):
        await Catalog(empty, Defaults()).open()


async def test_newer_schema_does_not_stop_the_program(opened: Opener, database: str):
    with schema.connect(database) as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    assert (await opened()).reachable


def test_sqlite_uses_a_write_ahead_log(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'catalog.db'}"
    schema.upgrade(url)
    with schema.connect(url) as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"


# The snapshot


def test_change_copies_only_the_quotas_it_touches():
    user_default = Entity.of(user=ANY)
    made = resolve("request_rate", {"limit": 5}, user_default, Defaults(), 0)
    many = [("request_rate", Entity.of(user=f"user-{n}"), made) for n in range(100_000)]
    began_s = time.process_time()
    old = Snapshot().apply(1, [*many, ("producer_ids_rate", ALICE, made)])
    built_s = time.process_time() - began_s
    began_s = time.process_time()
    new = old.apply(2, [("request_rate", ALICE, made), ("request_rate", Entity.of(user="user-7"), None)])
    changed_s = time.process_time() - began_s
    assert changed_s < built_s / 4
    assert len(old.quotas["request_rate"]) == len(new.quotas["request_rate"]) == 100_000
    assert new.quotas["producer_ids_rate"] is old.quotas["producer_ids_rate"]
    assert ALICE not in old.quotas["request_rate"]
