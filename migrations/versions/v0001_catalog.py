"""The catalog: its state, the quotas, and the history of their changes."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision: Final = "0001"
down_revision: Final[str | None] = None
branch_labels: Final = None
depends_on: Final = None


def upgrade() -> None:
    """Create the three tables, and the row of state."""
    state = op.create_table(
        "catalog_state",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("hash_secret", sa.String(64)),
        sa.Column("hash_secret_fingerprint", sa.String(64)),
        sa.CheckConstraint("id = 1", name=op.f("ck_catalog_state_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_catalog_state")),
    )
    op.bulk_insert(state, [{"id": 1, "version": 0}])
    op.create_table(
        "quotas",
        sa.Column("entity_hash", sa.String(64), nullable=False),
        sa.Column("quota", sa.String(64), nullable=False),
        sa.Column("entity", sa.Text(), nullable=False),
        sa.Column("definition", sa.Text()),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("identity", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("entity_hash", "quota", name=op.f("pk_quotas")),
    )
    op.create_index(op.f("ix_quotas_version"), "quotas", ["version"])
    op.create_table(
        "changes",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("who", sa.Text(), nullable=False),
        sa.Column("entity_hash", sa.String(64), nullable=False),
        sa.Column("entity", sa.Text(), nullable=False),
        sa.Column("before", sa.Text()),
        sa.Column("after", sa.Text()),
        sa.Column("reason", sa.Text()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_changes")),
    )
    op.create_index(op.f("ix_changes_entity_hash_id"), "changes", ["entity_hash", "id"])


def downgrade() -> None:
    """Drop the three tables."""
    op.drop_table("changes")
    op.drop_table("quotas")
    op.drop_table("catalog_state")
