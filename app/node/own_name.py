"""A unique name for this process, in logs, leases and the decision log."""

from __future__ import annotations

import os
import secrets
import socket


def own_name() -> str:
    """Return host, process id and a random part; several containers may have the same first two."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
