"""When the last turn at dropping old changes from the history began; nodes take turns by it."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision: Final = "0005"
down_revision: Final[str | None] = "0004"
branch_labels: Final = None
depends_on: Final = None


def upgrade() -> None:
    """Add the column, which older programs do not touch."""
    op.add_column("catalog_state", sa.Column("history_turn_ms", sa.BigInteger()))


def downgrade() -> None:
    """Drop the column."""
    with op.batch_alter_table("catalog_state") as state:
        state.drop_column("history_turn_ms")
