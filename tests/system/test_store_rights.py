"""A node under the least rights that docs/settings.md states, and without one of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import redis

from app.domain.assertion import Assertion
from app.domain.digest import fingerprint
from app.store import rights
from app.store.script import FOLDER
from tests import assertions, clusters, sentinels, stores
from tests.decision_log import worker
from tests.pushing import WELL, push, volumes_of
from tests.service import Service, eventually, running
from tests.system.test_backfill_load import loading

ROOT: Final = Path(__file__).parents[2]
SINGLE, CLUSTER, SENTINELS = re.findall(
    r"```text\n(.*)\n```", (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
)
"""The rules, as somebody copies them."""

PASSWORD: Final = "57#W/c@?:[9]%"
"""With characters that must be encoded in a URL."""
ENCODED: Final = "57%23W%2Fc%40%3F%3A%5B9%5D%25"
SECRET: Final = bytes(range(32))
EVERYTHING: Final = {
    "QUOTAGATE_LOG": "all",
    "QUOTAGATE_HASH_SECRET": SECRET.hex(),
    "QUOTAGATE_VOLUME_SOURCE": "push",
    "QUOTAGATE_VOLUME_MIN_AVAILABLE_RATIO": "0.1",
}


SELDOM: Final = {"function|delete", "hdel", "strlen", "xpending"}
"""Commands for libraries that are a day old, nodes that were silent for ten minutes, buckets of many ids, and
a writer that looks for unfinished batches now and then."""


def allow(store: Any, rule: str) -> None:
    """Make a user of exactly these rights, or give it these in place of others."""
    store.execute_command("ACL", "SETUSER", "node", "reset", "on", f">{PASSWORD}", *rule.split())


def state_of(node: Service) -> str:
    state: str = node.http.get("/health/ready").json()["store"]
    return state


def denials(store: redis.Redis) -> list[str]:
    """The commands that the store refused to the user, except optional ones."""
    log: list[dict[str, Any]] = store.acl_log()
    found = [text_of(entry["object"]) for entry in log if text_of(entry["username"]) == "node"]
    return [each for each in found if not each.lower().startswith(("client", "config"))]


def text_of(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def use_everything(node: Service, folder: Path) -> None:
    """Use each part of the node and of its workers once."""
    eventually(lambda: state_of(node) == "ok")
    log = folder / "log"
    with worker.running(node.store_url, log, folder / "output", limits={"age_s": 0.2}):
        decide(node)
        reset(node)
        push_volumes(node)
        load(node, folder)
        eventually(lambda: [*log.rglob("*.parquet")])
        eventually(lambda: lag(node) == 0)
    assert state_of(node) == "ok"
    assert "may not" not in node.logged() + (folder / "output").read_text(encoding="utf-8")


def decide(node: Service) -> None:
    node.put("user=*", request_rate={"limit": 1, "enforcement": "deny"}, producer_ids_rate=3)
    node.put("user=alice,client-id=*", controller_mutation_rate=5)
    node.put("ip=*", connection_creation_rate=5)
    node.put("client-id=*", consumer_byte_rate=1_000)
    for usage in ({"requests": 1}, {"producer_ids": [1, 2]}, {"mutations": 1}, {"fetch_bytes": 1}):
        ask = {"principal": "alice", "client_id": "etl", "ip": "10.0.0.1", "usage": usage}
        assert node.ask(**ask, detail=True)["source"] == "store", node.logged()
    once = {"principal": "bob", "usage": {"requests": 1, "connections": 1}, "ip": "10.0.0.2", "id": "once"}
    assert node.ask(**once) == node.ask(**once)
    many = node.batch([{**once, "id": str(place)} for place in range(30)])
    assert {each["decision"] for each in many[20:]} == {"throttle"}
    assert node.ask(principal="bob", usage={"requests": 1}, mode="refund")["source"] == "store"
    wanted = {"principal": "carol", "usage": {"requests": 5}}
    lease = node.lease({"ask": wanted, "lease_ms": 5_000})["lease"]
    assert lease
    given = node.http.request("DELETE", f"/v1/leases/{lease}", json={"usage": {"requests": 1}})
    assert given.is_success, given.text


def reset(node: Service) -> None:
    for bucket in ("user=alice", "user=bob"):
        shown = node.http.get("/v1/buckets", params={"bucket": bucket})
        assert shown.json()["buckets"], shown.text
        emptied = node.http.post("/v1/buckets:reset", json={"bucket": bucket})
        assert emptied.is_success, emptied.text


def push_volumes(node: Service) -> None:
    push(node, WELL)
    drill = node.http.post("/v1/volumes:drill", json={"factor": 0.5, "for_ms": 60_000})
    assert drill.is_success, drill.text
    assert node.http.delete("/v1/volumes:drill").is_success
    assert volumes_of(node)["volumes"]


def load(node: Service, folder: Path) -> None:
    at = 1_000
    rows = [Assertion("producer_ids_rate", "user=dora", None, "charge", at, value=1.0)]
    folder_of_rows = assertions.write(folder / "rows", rows, at, secret=fingerprint(SECRET))
    backfill = loading(node, folder)
    backfill.environment |= EVERYTHING
    assert backfill.run(folder_of_rows)["assertions"] == 1


def lag(node: Service) -> float:
    page = node.http.get("/metrics").text
    found = re.search(r"^quotagate_log_lag_seconds (\S+)", page, re.MULTILINE)
    return float(found[1]) if found else 1.0


def used(store: redis.Redis) -> set[str]:
    """The commands that were carried out, as a rule spells them."""
    return {name.removeprefix("cmdstat_") for name in store.info("commandstats")}


@pytest.mark.parametrize("kind", stores.KINDS)
def test_single_store_needs_the_stated_rights_alone(kind: str, tmp_path: Path) -> None:
    with stores.server(kind) as server, redis.Redis.from_url(server.url) as store:
        allow(store, SINGLE)
        with running(store_url=f"unix://node:{ENCODED}@{server.socket}", environment=EVERYTHING) as node:
            use_everything(node, tmp_path)
        assert denials(store) == []
        rule = {word[1:] for word in SINGLE.split() if word.startswith("+")}
        assert rule - used(store) <= SELDOM


def test_cluster_needs_the_stated_rights_alone(tmp_path: Path) -> None:
    with clusters.running(replicas=False) as own:
        for each in own.nodes:
            allow(each.client(), CLUSTER)
        url = own.url.replace("://", f"://node:{ENCODED}@")
        with running(store_url=url, environment=EVERYTHING) as node:
            use_everything(node, tmp_path)
            slot = own.owner(0)
            clusters.move_slot(own, 0)
            assert own.owner(0) is not slot
            decide(node)
        for each in own.nodes:
            assert denials(each.client()) == []


def test_sentinels_and_their_primary_need_the_stated_rights_alone(tmp_path: Path) -> None:
    with sentinels.watched() as servers:
        for each in servers.stores:
            allow(each.client(), SINGLE)
        for each in servers.sentinels:
            allow(each.client(), SENTINELS)
        places = servers.url.rpartition("@")[2].partition("?")[0]
        asking = f"sentinel_username=node&sentinel_password={ENCODED}"
        url = f"redis+sentinel://node:{ENCODED}@{places}?{asking}"
        with running(store_url=url, environment=EVERYTHING) as node:
            use_everything(node, tmp_path)
        for each in (*servers.stores, *servers.sentinels):
            assert denials(each.client()) == []


@contextmanager
def node_of(store: stores.Server, log: str = "all") -> Iterator[Service]:
    """A node whose user has the stated rights, or those that it was given before."""
    url = f"unix://node:{ENCODED}@{store.socket}"
    with running(store_url=url, environment={**EVERYTHING, "QUOTAGATE_LOG": log}) as node:
        yield node


@pytest.mark.parametrize("kind", stores.KINDS)
def test_missing_right_is_named_at_start(kind: str) -> None:
    with stores.server(kind) as server, redis.Redis.from_url(server.url) as store:
        allow(store, f"{SINGLE} -time")
        with node_of(server) as node:
            assert state_of(node) == "missing_right"
            assert "the store's user may not run TIME;" in node.logged()
            allow(store, SINGLE)
            eventually(lambda: state_of(node) == "ok")
            node.put("user=a", request_rate=10)
            assert node.ask(principal="a", usage={"requests": 1})["source"] == "store"


def test_each_missing_right_is_named_while_the_node_runs() -> None:
    lost = {
        "-fcall": "may not run FCALL;",
        "-eval": "may not run EVAL;",
        "-set -pexpire": "may not run SET, PEXPIRE;",
        "-@write": "SET, SETRANGE, INCR, PEXPIRE, DEL,",
        "-function|load": "may not run FUNCTION LOAD;",
        "-xadd": "may not run XADD;",
        "-xreadgroup -hset": "may not run HSET, XREADGROUP;",
        "resetkeys": "may not read and write the keys qg1:*;",
        "resetkeys ~other:*": "may not read and write the keys qg1:*;",
        "resetkeys ~qg1:{* ~qg1:order ~qg1:r* ~qg1:p* ~qg1:birth": "the keys qg1:volumes, qg1:log:x;",
    }
    with stores.server("valkey") as server, redis.Redis.from_url(server.url) as store:
        allow(store, SINGLE)
        with node_of(server) as node:
            for change, named in lost.items():
                allow(store, f"{SINGLE} {change}")
                eventually(lambda: named in node.logged())  # noqa: B023
                assert state_of(node) == "missing_right"
            allow(store, SINGLE)
            eventually(lambda: state_of(node) == "ok")


def test_right_to_something_optional_is_no_fault() -> None:
    optional = ("-function|list", "-function|delete", "-client", "-config")
    with stores.server("valkey") as server, redis.Redis.from_url(server.url) as store:
        allow(store, f"{SINGLE} {' '.join(optional)} -xadd -xreadgroup -hgetall")
        with node_of(server, log="off") as node:
            assert state_of(node) == "ok"
            assert "may not" not in node.logged()
            node.put("user=a", request_rate=10)
            assert node.ask(principal="a", usage={"requests": 1})["source"] == "store"
            eventually(lambda: "the store does not take samples: permission" in node.logged())


def test_every_command_of_a_script_is_examined() -> None:
    scripts = [each.read_text(encoding="utf-8") for each in FOLDER.iterdir() if each.name.endswith(".lua")]
    called = {name for text in scripts for name in re.findall(r"\bp?call\('([A-Z]+)'", text)}
    assert called - {"INFO"} <= rights.needed(logged=True, clustered=False).keys()


def test_missing_right_of_one_node_of_a_cluster_is_named() -> None:
    with clusters.running(replicas=False) as own:
        for each in own.nodes:
            allow(each.client(), CLUSTER)
        url = own.url.replace("://", f"://node:{ENCODED}@")
        with running(store_url=url, environment=EVERYTHING) as node:
            eventually(lambda: state_of(node) == "ok")
            allow(own.nodes[1].client(), f"{CLUSTER} -xadd")
            eventually(lambda: "missing_right" in state_of(node))
            assert "may not run XADD;" in node.logged()
