"""The catalog's schema: bringing it up to date, and refusing one that is not."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, NullPool, create_engine, event, text

import migrations
from app.catalog.port import CatalogAway
from app.catalog.sql import AWAY, driver_url

ADVISORY_LOCK: Final = 0x51754F7461
"""Nodes that migrate at the same moment take turns by this number."""


class SchemaRefused(Exception):
    """The catalog's schema is not one that this program can use."""


def upgrade(database_url: str) -> None:
    """Bring a catalog to the newest schema; one that is there already is left alone.

    Raises:
        CatalogAway: the database cannot be reached.
    """
    try:
        with connect(database_url) as connection:
            command.upgrade(config(connection), "head")
    except AWAY as error:
        name = driver_url(database_url, asynchronous=False).render_as_string(hide_password=True)
        raise CatalogAway(f"the catalog at {name} cannot be migrated: {error}") from error


def check(revision: str | None) -> None:
    """Refuse a schema that is older than this program; a newer one keeps working for it by our own rule.

    Raises:
        SchemaRefused: with what to do about it.
    """
    script = ScriptDirectory.from_config(config())
    head = script.get_current_head()
    known = {step.revision for step in script.walk_revisions()}
    if revision is None:
        raise SchemaRefused("the catalog has no tables yet: run `quotagate migrate`")
    if revision != head and revision in known:
        raise SchemaRefused(
            f"the catalog's schema is {revision}, this program needs {head}: run `quotagate migrate`"
        )


def config(connection: Connection | None = None) -> Config:
    """Alembic's configuration, with the connection to work on."""
    found = Config(str(Path(migrations.__file__).with_name("alembic.ini")))
    found.attributes["connection"] = connection
    return found


@contextmanager
def connect(database_url: str) -> Iterator[Connection]:
    """A connection for migrations alone; what it did is committed at the end."""
    engine = create_engine(driver_url(database_url, asynchronous=False), poolclass=NullPool)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _open_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    with engine.begin() as connection:
        yield connection


def _open_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    """Python's sqlite3 begins no transaction for a CREATE or ALTER: each would be for good at once."""
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode = WAL")  # stays with the file


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def take_turn(connection: Connection) -> None:
    """Wait for another node's migration to end; after that, for nothing long."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": ADVISORY_LOCK})
        connection.execute(text("SET LOCAL lock_timeout = '4s'"))
        connection.execute(text("SET LOCAL statement_timeout = '5s'"))
