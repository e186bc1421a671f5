"""When the definition of each quota last changed, so that the counts of a shadow quota begin anew then."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision: Final = "0006"
down_revision: Final[str | None] = "0005"
branch_labels: Final = None
depends_on: Final = None


def upgrade() -> None:
    """Add the column; 0 is an unknown time, also in rows that older programs write."""
    op.add_column("quotas", sa.Column("since_ms", sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("quotas", "since_ms")
