"""Alembic's entry point. It gets a connection from the program, or `-x url=…` on the command line."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from app.catalog import schema
from app.catalog.tables import METADATA


def migrate(connection: Connection) -> None:
    """Run the requested migrations in one transaction."""
    context.configure(
        connection=connection,
        target_metadata=METADATA,
        compare_type=True,
        render_as_batch=True,
        transactional_ddl=True,
    )
    with context.begin_transaction():
        schema.await_other_migrations(connection)
        context.run_migrations()


given: Connection | None = context.config.attributes.get("connection")
if given is not None:
    migrate(given)
else:
    with schema.connect(context.get_x_argument(as_dictionary=True)["url"]) as own:
        migrate(own)
