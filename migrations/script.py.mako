"""${message}

The program of the previous release still runs on what this leaves behind, and this one on what was there before
its turn: add columns that may be NULL, fill them later, drop nothing that was read yesterday. A step waits at most
4 s for a lock and runs at most 5 s (lock_timeout, statement_timeout): what takes longer is done in pieces.

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
