"""A node of the last version without samples and counts of shadow quotas, next to one of this version."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from tests import stores
from tests.prove.neighbours import older
from tests.service import Service, eventually, running
from tests.system.test_overview import DENY, MANY, ask, follows, overview, until_counted
from tests.system.test_shadow_quotas import SHADOW, asked, counted, shadows

BEFORE = "46343d4"


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Service]]:
    """A node of that version, and one of this, which share the store and the catalog of this version."""
    folder = tmp_path_factory.mktemp("versions")
    with (
        stores.running("valkey") as url,
        running(store_url=url, database_url=f"sqlite:///{folder / 'catalog.db'}") as new,
        running(
            store_url=url,
            database_url=new.database_url,
            environment={"PYTHONPATH": str(older(folder / "before", BEFORE))},
        ) as old,
    ):
        assert old.http.get("/v1/overview").status_code == 404
        yield old, new


def test_asks_of_the_older_node_share_buckets_and_are_not_in_the_overview(
    versions: tuple[Service, Service],
) -> None:
    old, new = versions
    old.put("user=alice", request_rate=DENY)
    eventually(partial(follows, new, "user=alice"))
    others, own = ask(old, *MANY * ["alice"]), ask(new, *MANY * ["alice"])
    assert others["admit"] + own["admit"] == DENY["burst"]
    view = until_counted(new, own)
    assert len(view["nodes"]) == 1
    assert len(overview(new, "?resolution=minute")["nodes"]) == 1


def test_shadow_quota_of_the_older_node_counts_for_an_unknown_time(versions: tuple[Service, Service]) -> None:
    old, new = versions
    old.put("user=shadow", request_rate=SHADOW)
    eventually(partial(follows, new, "user=shadow"))
    asked(old, "shadow")
    verdicts = asked(new, *MANY * ["shadow"])
    eventually(lambda: counted(new, "user=shadow") == verdicts)
    (shadow,) = shadows(new, "user=shadow")["shadows"]
    assert shadow["since_ms"] is None

    new.put("user=shadow", request_rate={**SHADOW, "burst": 5})
    assert counted(new, "user=shadow") == {}, "a change by this version begins a period with a time"
    assert shadows(new, "user=shadow")["shadows"][0]["since_ms"] > 0
    assert (
        old.http.get("/v1/quotas/user=shadow").json()["quotas"]["request_rate"].items()
        > {"burst": 5, "shadow": True}.items()
    )
