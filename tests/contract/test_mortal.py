"""A program killed at any SQL statement leaves the old catalog or the new one, never a mixture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, event
from sqlalchemy.exc import OperationalError

from app.catalog import schema
from app.catalog.errors import CatalogUnavailableError
from tests.contract.mortal import BEFORE, CHANGE, _insert_one, _to, schema_of

ROOT = Path(__file__).parents[2]
NEWEST = ScriptDirectory.from_config(schema.config()).get_current_head()


def deaths(what: str, url: str) -> list[dict[str, Any]]:
    """The state that each program left; the last program was not killed."""
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "tests.contract.mortal", what, url],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"killed"')]
    assert [each["killed"] for each in found] == [True] * (len(found) - 1) + [False]
    print(f"{what}: killed at {len(found) - 1} places")
    return found


def test_program_killed_while_applying_leaves_all_or_nothing(empty: str):
    found = deaths("apply", empty)
    after = {**BEFORE}
    for entity, quotas in CHANGE.items():
        merged = {**after.get(entity, {}), **quotas}
        after[entity] = {key: definition for key, definition in merged.items() if definition is not None}  # type: ignore[misc]
    old, new = (
        {"version": version, "quotas": rows, "history": history}
        for version, rows, history in ((1, _rows(BEFORE), 2), (2, _rows(after), 6))
    )
    left = [each["left"] for each in found]
    assert left[-1] == new
    assert all(each in (old, new) for each in left)
    assert old in left, "it was killed before its end"
    assert left.index(new) == len(left) - sum(each == new for each in left), "once new, it stays"
    assert len(found) > 8, "opening, one transaction of six statements, and its end"


def test_program_killed_while_migrating_leaves_the_old_or_the_new_schema(empty: str):
    found = deaths("migrate", empty)
    left = [each["left"] for each in found]
    old, new = left[0], left[-1]
    assert (old["revision"], new["revision"]) == ("0001", NEWEST)
    assert all(each in (old, new) for each in left)
    assert old["columns"] != new["columns"]
    assert old["quota"] == new["quota"] == ["user=alice", "request_rate", '{"limit": 5}']
    assert len(found) > 6


def test_failed_migration_leaves_the_old_schema(empty: str):
    _to(empty, "0001")
    _insert_one(empty)
    old = schema_of(empty)

    def fail(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "ix_quotas_head" in statement:
            raise OperationalError(statement, {}, Exception("the disk is full"))

    event.listen(Engine, "before_cursor_execute", fail)
    try:
        with pytest.raises(CatalogUnavailableError, match="the disk is full"):
            schema.upgrade(empty)
    finally:
        event.remove(Engine, "before_cursor_execute", fail)
    assert schema_of(empty) == old
    schema.upgrade(empty)
    assert schema_of(empty)["revision"] == NEWEST


def _rows(quotas: dict[str, Any]) -> list[list[Any]]:
    return sorted(
        [entity, key, definition] for entity, keys in quotas.items() for key, definition in keys.items()
    )
