"""The secrets in a log's URL appear nowhere, and no file holds a plain id unless configured."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from app.admission.answers import verdicts_of
from app.admission.plan import PlannedAsk
from app.decision_log.batch import CHARGED, REFRESHED
from app.decision_log.stream import StreamEntry
from app.domain.ask import Ask
from app.domain.decision import Decision, LimitedBy
from app.domain.digest import digest
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import Quota
from app.storage_location import InvalidLocationError
from app.store.port import Answer, IdsResult, UnitsResult
from tests.charging import charges_of
from tests.decision_log.saved import NODE_MS, SECRET, SavedBatches, log_into
from tests.packed import packed
from workers.decision_log.drain import Drain
from workers.decision_log.flush import Flush
from workers.decision_log.folder import Folder
from workers.decision_log.read import read

PARTS = ("AKIA", "SEC", "RET")
MALFORMED = [
    "s3://AKIA:SEC/RET@bucket/x",
    "s3://AKIA:SEC RET@bucket/x",
    "s3://AKIA:SEC#RET@bucket/x",
    "s3://AKIA:SEC?RET@bucket/x",
    "s3://AKIA:SEC%RET@bucket/x",
    "s3://AKIA:SEC@RET@bucket/x?region=no such",
    "s3://AKIA:SEC\u2100RET@bucket/x",  # which urllib calls invalid
    "s3://[AKIA:SECRET@bucket/x",
    "s3://AKIA:SECRET@/x",
    "s3://AKIA:SECRET@bucket/x?region=eu&scheme=ftp",
    "s3:AKIA:SECRET@bucket",
    "file://AKIA:SECRET@host/x",
    "hdfs://AKIA:SECRET@host:port/x",
    "abfs://account.dfs.core.windows.net/c/x?client_id=a&client_secret=SEC RET",
    "ftp://AKIA:SECRET@bucket/x",
]
IDS = (7_305_942_118_033_217, "id-of-a-producer")
EVERYONE = Entity.of(user=ANY)
QUOTAS = {
    "producer_ids_rate": {EVERYONE: Quota("producer_ids_rate", 5, "producer_ids", "deny")},
    "request_rate": {EVERYONE: Quota("request_rate", 1000, "sampled_rate", "delay")},
}


def is_redacted(text: str) -> bool:
    return not any(part in text for part in PARTS)


@pytest.mark.parametrize("url", MALFORMED)
def test_malformed_url_is_refused_without_its_secrets(url):
    with pytest.raises(InvalidLocationError) as refused:
        Folder(url).check()
    assert is_redacted(str(refused.value))
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


def test_refused_url_is_explained_where_that_reveals_no_secret():
    with pytest.raises(
        InvalidLocationError, match=r"Cannot parse URI: 's3://\.\.\.' .*'/' \(position 13\); .* / by %2F$"
    ):
        Folder("s3://AKIA:SEC/RET@bucket/x").check()
    with pytest.raises(InvalidLocationError, match=r"^Unexpected query parameter in S3 URI: 'foo'$"):
        Folder("s3://AKIA:SECRET@bucket/x?foo=1").check()


@pytest.mark.parametrize("url", ["s3://AKIA:12/RET@bucket/x", "s3://AKIA:SEC%2FRET@bucket/x?sig=RET"])
def test_filesystem_errors_are_logged_without_the_secrets_of_the_url(url):
    folder = Folder(url)
    assert is_redacted(folder.name)
    for text in (url, "for key AKIA", "the key 12/RET", "of bucket AKIA:12", "RET is no signature"):
        assert is_redacted(folder.redact(OSError(text)))
    assert folder.redact(OSError("curlCode: 7,\n no connection")) == "curlCode: 7, no connection"
    with capture_logs() as lines:
        Drain(None, folder)._cannot(OSError(f"cannot write to {url}"))  # type: ignore[arg-type]
    assert [line["reason"] for line in lines] == ["away"]
    assert is_redacted(str(lines))


def test_workers_refuse_the_url_without_its_secrets():
    settings = {"QUOTAGATE_REDIS_URL": "unix:///nowhere", "QUOTAGATE_LOG_URL": MALFORMED[0]}
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "workers"],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "quotagate: QUOTAGATE_LOG_URL: has an @ after the host; percent-encode" in ended.stderr
    assert is_redacted(ended.stdout + ended.stderr)


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of a value: keys, and nested values other than dicts, lists and tuples."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        for each in value:
            yield from leaves(each)
    else:
        yield value


@pytest.mark.parametrize("plain_ids", [False, True])
@pytest.mark.parametrize("which", ["all", "denied"])
async def test_no_file_holds_a_plain_id_unless_configured(folder, which, plain_ids):
    stream = SavedBatches()
    log = log_into(stream, which, plain_ids=plain_ids)
    ask = Ask({"requests": 2}, IDS, principal="alice", client_id="etl")
    charges = charges_of(ask, QUOTAS, MatchingRules(), SECRET)
    results = (
        IdsResult("admit", None, 0, 0, 1.0, 4.0, layers=1),
        UnitsResult("throttle", None, 0, 9, 5.0, 0.0),
    )
    found = packed(Answer(results, None, None, NODE_MS, 128, bytes([CHARGED, REFRESHED])))
    for source, answer in (("store", found), ("fallback", None)):
        planned = PlannedAsk(ask, charges, None)
        verdicts = verdicts_of(planned, found)
        by = LimitedBy("request_rate", "user=*", "user=alice")
        planned.decision = Decision("throttle", 9, False, 2, source, by)  # type: ignore[arg-type]
        log.decided(planned, answer, verdicts, None if answer else "budget")
    admitted = PlannedAsk(ask, charges, None, decision=Decision("admit", 0, True, 2, "store", None))
    log.decided(admitted, found, (), None)
    log.refreshed(admitted, found)
    await log._send()
    Flush([StreamEntry(b"1-0", batch, 4) for batch in stream.batches], "a").write(Folder(folder))
    rows = read(folder).to_pylist()
    assert len(rows) == 4
    held = set(leaves(rows))
    assert {int.from_bytes(digest(SECRET, "alice", one), "big", signed=True) for one in IDS} < held
    texts = " ".join(str(each) for each in held)
    assert [str(one) in texts for one in IDS] == [plain_ids, plain_ids]
    raw = b"".join([*stream.batches, *(file.read_bytes() for file in folder.rglob("*.parquet"))])
    number, text = IDS
    assert (text.encode() in raw) is plain_ids
    assert not any(number.to_bytes(8, order) in raw for order in ("big", "little"))
