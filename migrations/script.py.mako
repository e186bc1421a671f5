"""${message}

The previous release must still run on the new schema, and this release on the old one: add columns that may
be NULL, fill them later, drop nothing that the previous release reads. A step waits at most 4 s for a lock
and runs at most 5 s (lock_timeout, statement_timeout): split longer work into pieces.

Revision ID: ${up_revision}
Revises: ${down_revision | comma,n}
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}

revision: Final = ${repr(up_revision)}
down_revision: Final[str | None] = ${repr(down_revision)}
branch_labels: Final = ${repr(branch_labels)}
depends_on: Final = ${repr(depends_on)}


def upgrade() -> None:
    """Make the change."""
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    """Take it back."""
    ${downgrades if downgrades else "pass"}
