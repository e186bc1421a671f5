"""The head of each entity's spelling, which orders lists; the whole spelling is too long for an index."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision: Final = "0003"
down_revision: Final[str | None] = "0002"
branch_labels: Final = None
depends_on: Final = None


def upgrade() -> None:
    """Add the column. The database computes it, so older programs can still write."""
    text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    # PostgreSQL can only index a stored computed column, and SQLite can only add one that is not stored.
    stored = op.get_bind().dialect.name == "postgresql"
    head = sa.Column("head", text, sa.Computed("substr(entity, 1, 512)", persisted=stored))
    op.add_column("quotas", head)
    op.create_index(op.f("ix_quotas_head_entity_hash"), "quotas", ["head", "entity_hash"])


def downgrade() -> None:
    """Drop the column."""
    op.drop_index(op.f("ix_quotas_head_entity_hash"), "quotas")
    op.drop_column("quotas", "head")
