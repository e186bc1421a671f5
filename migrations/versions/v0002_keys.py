"""API keys, and the version by which nodes see that they changed."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision: Final = "0002"
down_revision: Final[str | None] = "0001"
branch_labels: Final = None
depends_on: Final = None


def upgrade() -> None:
    """Create the table of keys, and add their version to the state."""
    op.add_column(
        "catalog_state", sa.Column("keys_version", sa.BigInteger(), server_default="0", nullable=False)
    )
    op.create_table(
        "keys",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("bound_to", sa.Text(), nullable=False),
        sa.Column("expires_ms", sa.BigInteger()),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("rotated_ms", sa.BigInteger()),
        sa.Column("former_digest", sa.String(64)),
        sa.Column("former_until_ms", sa.BigInteger()),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_keys")),
    )


def downgrade() -> None:
    """Drop both; keys are no longer accepted."""
    op.drop_table("keys")
    with op.batch_alter_table("catalog_state") as state:
        state.drop_column("keys_version")
