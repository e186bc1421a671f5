"""Folders of assertions for the tests, in the format of the job's output."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet as pq

from app.backfill.assertions import TYPES
from app.domain.assertion import COLUMNS, MANIFEST, VERSION, Assertion

SCHEMA = pa.schema([pa.field(name, TYPES[type_]) for name, (type_, _) in COLUMNS.items()])


def write(
    folder: Path,
    assertions: Sequence[Assertion],
    at_ms: int,
    *,
    name: str = "tests",
    parts: int = 1,
    **said: Any,
) -> Path:
    """Write a folder of assertions in the order given."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = []
    size = max(-(-len(assertions) // parts), 1)
    for number, first in enumerate(range(0, len(assertions), size)):
        rows = assertions[first : first + size]
        columns = [[row[place] for row in rows] for place in range(len(SCHEMA))]
        table = pa.table(dict(zip(SCHEMA.names, columns, strict=True)), schema=SCHEMA)
        pq.write_table(table, folder / f"part-{number:05}.parquet")
        listed.append({"name": f"part-{number:05}.parquet", "rows": len(rows)})
    manifest = {"version": VERSION, "name": name, "at_ms": at_ms, "secret": None, "files": listed, **said}
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return folder
