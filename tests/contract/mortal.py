"""A change and a migration in programs that are killed before their n-th SQL statement, for each n."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from alembic import command
from sqlalchemy import Engine, event, inspect, text

from app.catalog import schema
from app.catalog.catalog import Catalog
from app.catalog.sql import Origin
from app.domain.entity import Entity
from app.domain.quota import Defaults
from app.domain.quota_value import Definition

MOST = 200
BEFORE = {
    "user=alice": {"request_rate": {"limit": 5}, "producer_ids_rate": {"limit": 7}},
    "user=*": {"request_rate": {"limit": 1}},
}
CHANGE: dict[str, dict[str, Definition | None]] = {
    "user=alice": {"request_rate": {"limit": 6}, "producer_ids_rate": None},
    "user=*": {"request_rate": None},
    "user=bob": {"request_rate": {"limit": 9}},
    "ip=*": {"connection_creation_rate": {"limit": 3}},
}


def main() -> None:
    """Print for each n how the program ended and the state that it left."""
    what, url = sys.argv[1:]
    work, look = {"apply": (apply, catalog_of), "migrate": (migrate, schema_of)}[what]
    if what == "apply":
        schema.upgrade(url)
        asyncio.run(fill(url))
    else:
        _to(url, "0001")
        _insert_one(url)
    for n in range(1, MOST):
        child = os.fork()
        if child == 0:
            die_before(n)
            work(url)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if not killed and status:
            raise SystemExit(f"the program failed by itself at {n}: {status}")
        sys.stdout.write(json.dumps({"killed": killed, "left": look(url)}) + "\n")
        if not killed:
            return
    raise SystemExit(f"more than {MOST} statements")


def die_before(n: int) -> None:
    """Count the statements sent to the database, including COMMIT, and die before the n-th."""
    left = [n]

    def count(*_: Any) -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(Engine, "before_cursor_execute", count)
    event.listen(Engine, "commit", count)


async def _with(url: str, use: Callable[[Catalog], Any]) -> Any:
    catalog = Catalog(url, Defaults())
    await catalog.open()
    try:
        return await use(catalog)
    finally:
        await catalog.close()


async def fill(url: str) -> None:
    edits = {Entity.parse(entity): quotas for entity, quotas in BEFORE.items()}
    await _with(url, lambda catalog: catalog.change(edits, Origin("admin", 1)))


def apply(url: str) -> None:
    edits = {Entity.parse(entity): quotas for entity, quotas in CHANGE.items()}
    asyncio.run(_with(url, lambda catalog: catalog.change(edits, Origin("admin", 2))))


def migrate(url: str) -> None:
    schema.upgrade(url)


def catalog_of(url: str) -> Any:
    """The content of a catalog: its version, its quotas, and the length of its history."""

    async def look(catalog: Catalog) -> Any:
        found = await catalog.database.changed(-1)
        history = await catalog.history(None, None, 100)
        quotas = sorted([row.entity, row.quota, row.definition] for row in found.rows if row.definition)
        return {"version": found.version, "quotas": quotas, "history": len(history)}

    return asyncio.run(_with(url, look))


def schema_of(url: str) -> Any:
    """The revision, tables and columns of a catalog, and the quota it had before."""
    with schema.connect(url) as connection:
        inspector = inspect(connection)
        return {
            "revision": connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one(),
            "columns": {
                table: sorted(column["name"] for column in inspector.get_columns(table))
                for table in sorted(inspector.get_table_names())
            },
            "indexes": sorted(str(index["name"]) for index in inspector.get_indexes("quotas")),
            "quota": list(connection.execute(text("SELECT entity, quota, definition FROM quotas")).one()),
        }


def _to(url: str, revision: str) -> None:
    with schema.connect(url) as connection:
        command.upgrade(schema.config(connection), revision)


def _insert_one(url: str) -> None:
    columns = "entity_hash, quota, entity, definition, epoch, identity, version"
    values = "'x', 'request_rate', 'user=alice', '{\"limit\": 5}', 0, '[]', 1"
    with schema.connect(url) as connection:
        connection.exec_driver_sql(f"INSERT INTO quotas ({columns}) VALUES ({values})")


if __name__ == "__main__":
    main()
