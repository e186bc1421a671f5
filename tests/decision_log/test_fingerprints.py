"""Which secret made the digests stands in every file, and stays there when files are merged."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from app.domain.digest import fingerprint
from app.store.decision_log import Batch
from tests.decision_log.batches import Node, packed
from tests.decision_log.test_compact import LATER_MS
from workers.decision_log.compact import Compactor
from workers.decision_log.fingerprints import KEY, secrets_of
from workers.decision_log.flush import Flush
from workers.decision_log.folder import Folder
from workers.decision_log.read import read
from workers.decision_log.schema import VERSION_KEY, BadFile, footer
from workers.decision_log.stream import Entry
from workers.generate.traffic import Traffic
from workers.generate.write_log import Order, write_log

OLD, NEW = (fingerprint(bytes([number]) * 32) for number in (1, 2))


def by(batch: Batch, secret: str | None) -> Batch:
    return msgspec.structs.replace(batch, secret=secret)


def put(folder: Path, *batches: Batch) -> None:
    entries = [Entry(b"1-0", packed(batch), 0) for batch in batches]
    Flush(entries, batches[0].id).write(Folder(folder))


def said(folder: Path) -> dict[str, set[str]]:
    """What each file says, by its name."""
    return {
        file.name: set(secrets_of(str(file), footer(str(file)).metadata))
        for file in sorted(folder.rglob("*.parquet"))
    }


def test_a_file_says_the_secrets_of_its_batches(folder):
    first, second, third, fourth = Node().batches(4)
    put(folder, by(first, OLD), by(second, OLD))
    put(folder, by(third, None))
    assert list(said(folder).values()) == [{OLD}, set()]
    assert Compactor(Folder(folder)).compact(LATER_MS) == 2
    put(folder, by(fourth, NEW))
    [merged] = [file for file in said(folder) if file.startswith("merged-")]
    assert said(folder)[merged] == {OLD}
    for file in folder.rglob("*.parquet"):
        if not file.name.startswith(("merged-", fourth.id)):
            file.unlink()
    assert Compactor(Folder(folder)).compact(LATER_MS) == 2
    assert {OLD, NEW} in said(folder).values()
    assert read(folder).num_rows == 800


def test_a_batch_of_an_older_node_says_none():
    packed_then = msgspec.msgpack.encode(msgspec.msgpack.decode(packed(Node().batch()))[:6])
    assert msgspec.msgpack.decode(packed_then, type=Batch).secret is None


def test_a_generated_log_says_it_too(tmp_path):
    traffic = Traffic(seed=1, events=200, rate=5.0, principals=20)
    write_log(Order(traffic, 1_772_323_200_000, bytes([1]) * 32, 1), tmp_path / "log", tmp_path / "truth")
    found = said(tmp_path / "log")
    assert found.pop("generated-quotas.parquet") == set()
    assert list(found.values()) == [{OLD}]


@pytest.mark.parametrize("text", [b"{", b'"a"', b"[1]"])
def test_what_are_no_fingerprints_is_named(tmp_path, text):
    file = tmp_path / "a.parquet"
    rows = read(tmp_path)
    pq.write_table(rows.replace_schema_metadata({VERSION_KEY: b"1", KEY: text}), file)
    with pytest.raises(BadFile, match=r"a\.parquet: metadata quotagate\.secrets: must be fingerprints"):
        secrets_of(str(file), footer(str(file)).metadata)
