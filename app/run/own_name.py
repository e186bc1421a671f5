"""The name by which a program of ours is told from every other one."""

from __future__ import annotations

import os
import secrets
import socket


def own_name() -> str:
    """Host and process id, for whoever reads it, and something random, as both come again in containers."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
