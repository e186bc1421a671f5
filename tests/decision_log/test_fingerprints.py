"""Every file names the secret that made its digests by fingerprint, also after files are merged."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from app.decision_log.batch import SentBatch
from app.decision_log.stream import StreamEntry
from app.domain.digest import fingerprint
from tests.decision_log.batches import Node, packed
from tests.decision_log.test_compact import LATER_MS
from workers.decision_log.compact import Compactor
from workers.decision_log.flush import Flush
from workers.decision_log.folder import Folder
from workers.decision_log.read import read
from workers.decision_log.schema import SECRETS_KEY, VERSION_KEY, BadFileError, footer, secrets_of
from workers.generate.traffic import Traffic
from workers.generate.write_log import Order, write_log

OLD, NEW = (fingerprint(bytes([number]) * 32) for number in (1, 2))


def by(batch: SentBatch, secret: str | None) -> SentBatch:
    return msgspec.structs.replace(batch, secret=secret)


def put(folder: Path, *batches: SentBatch) -> None:
    entries = [StreamEntry(b"1-0", packed(batch), 0) for batch in batches]
    Flush(entries, batches[0].id).write(Folder(folder))


def fingerprints(folder: Path) -> dict[str, set[str]]:
    """The fingerprints in each file, by file name."""
    return {
        file.name: set(secrets_of(str(file), footer(str(file)).metadata))
        for file in sorted(folder.rglob("*.parquet"))
    }


def test_file_names_the_secrets_of_its_batches(folder):
    first, second, third, fourth = Node().batches(4)
    put(folder, by(first, OLD), by(second, OLD))
    put(folder, by(third, None))
    assert list(fingerprints(folder).values()) == [{OLD}, set()]
    assert Compactor(Folder(folder)).compact(LATER_MS) == 2
    put(folder, by(fourth, NEW))
    [merged] = [file for file in fingerprints(folder) if file.startswith("merged-")]
    assert fingerprints(folder)[merged] == {OLD}
    for file in folder.rglob("*.parquet"):
        if not file.name.startswith(("merged-", fourth.id)):
            file.unlink()
    assert Compactor(Folder(folder)).compact(LATER_MS) == 2
    assert {OLD, NEW} in fingerprints(folder).values()
    assert read(folder).num_rows == 800


def test_batch_of_an_older_node_names_no_secret():
    packed_then = msgspec.msgpack.encode(msgspec.msgpack.decode(packed(Node().batch()))[:6])
    assert msgspec.msgpack.decode(packed_then, type=SentBatch).secret is None


def test_generated_log_names_its_secret(tmp_path):
    traffic = Traffic(seed=1, events=200, rate=5.0, principals=20)
    write_log(Order(traffic, 1_772_323_200_000, bytes([1]) * 32, 1), tmp_path / "log", tmp_path / "truth")
    found = fingerprints(tmp_path / "log")
    assert found.pop("generated-quotas.parquet") == set()
    assert list(found.values()) == [{OLD}]


@pytest.mark.parametrize("text", [b"{", b'"a"', b"[1]"])
def test_invalid_fingerprints_are_refused_by_file(tmp_path, text):
    file = tmp_path / "a.parquet"
    rows = read(tmp_path)
    pq.write_table(rows.replace_schema_metadata({VERSION_KEY: b"1", SECRETS_KEY: text}), file)
    with pytest.raises(BadFileError, match=r"a\.parquet: metadata quotagate\.secrets: must be fingerprints"):
        secrets_of(str(file), footer(str(file)).metadata)
