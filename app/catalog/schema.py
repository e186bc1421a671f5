"""The catalog's schema: migrating it, and checking that it is migrated."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection, NullPool, create_engine, event, func, select

import migrations
from app.catalog.errors import CatalogUnavailableError, SchemaVersionError
from app.catalog.sql import AWAY, connection_options, driver_url, first_line, limit_waits, shown

if TYPE_CHECKING:
    from alembic.config import Config

ADVISORY_LOCK: Final = 0x51754F7461
"""PostgreSQL's advisory lock that nodes take while they migrate; it ends with the transaction."""


def upgrade(database_url: str) -> None:
    """Migrate a catalog to the newest schema, if it is not there already.

    Raises:
        CatalogUnavailableError: the database cannot be reached.
    """
    from alembic import command  # noqa: PLC0415  nodes start without it

    with connect(database_url) as connection:
        command.upgrade(config(connection), "head")


def check(revision: str | None) -> None:
    """Check that a schema is not older than this program; a newer one must still work with it.

    Raises:
        SchemaVersionError: the schema is older, or missing; the message names the command to run.
    """
    known = revisions()
    if revision is None:
        raise SchemaVersionError("the catalog has no tables yet: run `quotagate migrate`")
    if revision in known[:-1]:
        raise SchemaVersionError(
            f"the catalog's schema is {revision}, this program needs {known[-1]}: run `quotagate migrate`"
        )


def revisions() -> list[str]:
    """This program's revisions of the schema, oldest first, by the names of their files: v0001_catalog.py."""
    files = Path(migrations.__file__).with_name("versions").glob("v*.py")
    return sorted(file.name.removeprefix("v").partition("_")[0] for file in files)


def config(connection: Connection | None = None) -> Config:
    """Alembic's configuration, with the connection to use."""
    from alembic.config import Config  # noqa: PLC0415  nodes start without it

    result = Config(str(Path(migrations.__file__).with_name("alembic.ini")))
    result.attributes["connection"] = connection
    return result


@contextmanager
def connect(database_url: str, purpose: str = "migrated") -> Iterator[Connection]:
    """A connection for one command; commits at the end.

    Raises:
        CatalogUnavailableError: the database cannot be reached; the text names the purpose.
    """
    url = driver_url(database_url, asynchronous=False)
    is_sqlite = url.get_backend_name() == "sqlite"
    options = {} if is_sqlite else connection_options(url)
    engine = create_engine(url, connect_args=options, poolclass=NullPool)
    if is_sqlite:
        event.listen(engine, "connect", _open_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    try:
        with engine.begin() as connection:
            yield connection
    except AWAY as error:
        why = first_line(error)
        raise CatalogUnavailableError(f"the catalog at {shown(url)} cannot be {purpose}: {why}") from error


def _open_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    """Let SQLAlchemy begin transactions: Python's sqlite3 begins none for a CREATE or ALTER."""
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode = WAL")  # the file remembers it


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def await_other_migrations(connection: Connection) -> None:
    """Wait for other nodes' migrations to end; after that, let no statement wait long."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(ADVISORY_LOCK)))
        limit_waits(connection)
