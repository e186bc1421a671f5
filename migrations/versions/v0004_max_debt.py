"""The longest debt of a token bucket, on which the nodes of a deployment agree."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision: Final = "0004"
down_revision: Final[str | None] = "0003"
branch_labels: Final = None
depends_on: Final = None


def upgrade() -> None:
    """Add the column; the first node that starts sets it."""
    op.add_column("catalog_state", sa.Column("max_debt_ms", sa.BigInteger()))


def downgrade() -> None:
    """Drop the column."""
    with op.batch_alter_table("catalog_state") as state:
        state.drop_column("max_debt_ms")
