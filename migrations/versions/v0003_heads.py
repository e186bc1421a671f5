"""The head of each entity's spelling, by which lists are ordered and found; the whole of it fits no index."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision: Final = "0003"
down_revision: Final[str | None] = "0002"
branch_labels: Final = None
depends_on: Final = None


def upgrade() -> None:
    """Add it; the database computes it, so programs that do not know of it go on writing."""
    text = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    # PostgreSQL can index a computed column that is stored, and SQLite can add one that is not.
    stored = op.get_bind().dialect.name == "postgresql"
    head = sa.Column("head", text, sa.Computed("substr(entity, 1, 512)", persisted=stored))
    op.add_column("quotas", head)
    op.create_index(op.f("ix_quotas_head_entity_hash"), "quotas", ["head", "entity_hash"])


def downgrade() -> None:
    """Drop it."""
    op.drop_index(op.f("ix_quotas_head_entity_hash"), "quotas")
    op.drop_column("quotas", "head")
