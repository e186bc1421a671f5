"""A foreign history: how its rows are read, and the refusals, which name file and field."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.domain.assertion import Assertion
from app.domain.digest import digest, fingerprint
from app.domain.quota import Layers
from tests.jobs.backfills import MAX_IDS, assertions, made, said, uses
from tests.jobs.logs import SECRET, START_MS
from workers.jobs.backfill import foreign
from workers.jobs.backfill.uses import SCHEMA, HistoryColumns
from workers.jobs.errors import JobError


def test_exact_layers_determine_which_uses_are_charged():
    """An id is charged again once the layers have forgotten it, and never while it is in use."""
    layers, window = Layers(100, 300), 250
    used = [
        ("p", "7", 0),  # layer 0 to 300
        ("p", "7", 90),
        ("p", "8", 120),  # layer 120 to 420
        ("p", "9", 130),
        ("p", "7", 301),  # forgotten: layer 301
        ("p", "-1", 301),
        ("p", "8", 310),  # refreshed
        ("q", "8", 310),
    ]
    shuffled = [dict(zip(SCHEMA.names, use, strict=True)) for use in reversed(used)]
    pieces = [pa.Table.from_pylist(some, SCHEMA) for some in (shuffled[::2], shuffled[1::2])]
    rules = foreign.HistoryReplay(350, window, layers, MAX_IDS, SECRET)
    found = foreign.replay(rules, pieces)

    def number(principal: str, id_: int) -> int:
        return int.from_bytes(digest(SECRET, principal, id_), "big", signed=True)

    p, q = ("producer_ids_rate", "user=p", None), ("producer_ids_rate", "user=q", None)
    wanted = [
        Assertion(*p, "charge", 120, value=1.0),
        Assertion(*p, "charge", 130, value=1.0),
        Assertion(*p, "charge", 301, value=1.0),
        Assertion(*p, "id", 130, number("p", 9), 120),
        Assertion(*p, "id", 301, number("p", 7), 301),
        Assertion(*p, "id", 310, number("p", 8), 301),
        Assertion(*q, "charge", 310, value=1.0),
        Assertion(*q, "id", 310, number("q", 8), 310),
    ]
    assert said(iter([found])) == sorted(wanted, key=str)
    assert found.buckets == 2


USES: Final[list[dict[str, Any]]] = [
    {"principal": "a", "id": 1, "time": START_MS},
    {"principal": "a", "id": "x", "time": START_MS + 5},
    {"principal": "b", "id": 12, "time": START_MS + 1_000},
    {"principal": "a", "id": 1, "time": START_MS + 900},
]


def test_json_and_parquet_give_the_same_assertions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Times as numbers, texts or timestamps, ids as numbers or their decimals, rows in any order."""
    monkeypatch.setenv("QUOTAGATE_HASH_SECRET", SECRET.hex())
    json_lines = tmp_path / "uses.json"
    json_lines.write_text("".join(json.dumps(use) + "\n" for use in USES))
    named = [{"who": use["principal"], "pid": str(use["id"]), "seen": use["time"]} for use in reversed(USES)]
    table = pa.Table.from_pylist(named)
    stamped = table.set_column(2, "seen", table["seen"].cast(pa.timestamp("ms", tz="UTC")))
    pq.write_table(stamped, tmp_path / "uses.parquet")
    texts = [{**use, "time": f"2026-11-21T10:00:{(use['time'] - START_MS) / 1000:06.3f}Z"} for use in USES]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(use) + "\n" for use in texts))
    columns: Any = {"principal_column": "who", "id_column": "pid", "time_column": "seen"}
    folders = [
        made(tmp_path / "1", history=str(json_lines)),
        made(tmp_path / "2", history=str(tmp_path / "uses.parquet"), **columns),
        made(tmp_path / "3", history=str(tmp_path / "texts.jsonl")),
    ]
    first, *others = map(assertions, folders)
    assert others == [first, first]
    assert Counter(one.kind for one in first) == {"charge": 3, "id": 3}
    number = int.from_bytes(digest(SECRET, "b", 12), "big", signed=True)
    assert [one.digest for one in first if one.bucket == "user=b" and one.kind == "id"] == [number]
    assert {each.at_ms for each in folders} == {START_MS + 1_000}
    assert {each.secret for each in folders} == {fingerprint(SECRET)}
    early = made(tmp_path / "4", START_MS + 5, history=str(json_lines))
    assert len(assertions(early)) == 4


def test_invalid_history_is_refused_with_file_and_field(tmp_path: Path):
    file = tmp_path / "uses.json"
    columns = HistoryColumns()

    def refused(text: str, **changed: str) -> str:
        file.write_text(text)
        with pytest.raises(JobError) as refusal:
            uses(str(file), "json", HistoryColumns(**changed))
        return str(refusal.value)

    good = json.dumps(USES[0]) + "\n"
    assert "uses.json: a line is not a JSON object; in {half" in refused(good + '{half: "a"\n')
    assert "uses.json: field who: is missing or empty" in refused(good, principal="who")
    assert "field id: is missing" in refused(good + '{"principal": "a", "time": 5}\n')
    assert "field time: must be an instant such as" in refused(
        good + '{"principal": "a", "id": 1, "time": "soon"}\n'
    )
    table = pa.Table.from_pylist([{"principal": "a", "id": 1.5, "time": 1}])
    pq.write_table(table, tmp_path / "uses.parquet")
    with pytest.raises(JobError, match=r"column id: is double, must be string or bigint"):
        uses(str(tmp_path / "uses.parquet"), "parquet", columns)
    with pytest.raises(
        JobError, match=r"column pid: is missing; name it with --id-column \(there are: principal"
    ):
        uses(str(tmp_path / "uses.parquet"), "parquet", replace(columns, id="pid"))
    with pytest.raises(JobError, match="nowhere"):
        uses(str(tmp_path / "nowhere"), "parquet", columns)


GOOD: Final = {"principal": "a", "id": 4711, "time": START_MS}


@pytest.mark.parametrize(
    ("use", "why"),
    [
        ({"time": START_MS // 1_000}, "field time: must lie in the years 2000 to 2199; a number is millisec"),
        ({"time": START_MS * 1_000}, "field time: must lie in the years 2000 to 2199"),
        ({"time": "1970-01-01T00:00:00Z"}, "field time: must lie in the years"),
        ({"id": 4711.0}, "field id: must be a signed 64-bit integer or a text"),
        ({"id": 2**63}, "field id: must be a signed 64-bit integer"),
        ({"id": True}, "field id: must be a signed 64-bit integer"),
        ({"id": [1]}, "field id: "),
        ({"id": None}, "field id: is missing"),
        ({"time": None}, "field time: must be an instant"),
    ],
    ids=str,
)
def test_ambiguous_value_is_refused(tmp_path: Path, use: dict[str, Any], why: str):
    file = tmp_path / "uses.json"
    file.write_text("".join(json.dumps(each) + "\n" for each in (GOOD, GOOD | use)))
    with pytest.raises(JobError) as refused:
        uses(str(file), "json", HistoryColumns())
    assert f"uses.json: {why}" in str(refused.value)


def test_parquet_time_in_seconds_is_refused(tmp_path: Path):
    pq.write_table(pa.Table.from_pylist([GOOD | {"time": START_MS // 1_000}]), tmp_path / "uses.parquet")
    with pytest.raises(JobError, match=r"uses\.parquet: field time: must lie in the years"):
        uses(str(tmp_path / "uses.parquet"), "parquet", HistoryColumns())


def test_ids_are_numbers_or_texts_as_in_an_ask(tmp_path: Path):
    """Numbers and texts, as in an ask; blank lines and further fields are ignored."""
    ids = [4711, "4711.0", -(2**63), 2**63 - 1, "x y"]
    lines = [json.dumps(GOOD | {"id": id_, "more": {"id": 1}}) for id_ in ids]
    (tmp_path / "uses.json").write_text("\n\n".join(lines) + "\n  \n")
    found = uses(str(tmp_path / "uses.json"), "json", HistoryColumns())
    assert sorted(id_ for _, id_, _ in found) == sorted(map(str, ids))


@pytest.mark.parametrize("name", ["x[1].json", "y{2}*.json", "s p%20\\?.json"])
def test_existing_file_name_is_not_taken_as_a_pattern(tmp_path: Path, name: str):
    (tmp_path / name).write_text(json.dumps(GOOD) + "\n")
    (tmp_path / "x1.json").write_text(json.dumps(GOOD | {"principal": "other"}) + "\n")

    def principals(history: str) -> list[str]:
        found = uses(history, "json", HistoryColumns())
        return sorted(principal for principal, _, _ in found)

    assert principals(str(tmp_path / name)) == ["a"]
    assert principals(str(tmp_path)) == ["a", "other"]
    assert principals(f"{tmp_path}/*.json") == ["a", "other"]
