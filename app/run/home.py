"""The directory with the state of one installation: the admin key, the embedded store and catalog, a lock."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

from app.run.errors import HomeTaken


def make(home: Path) -> Path:
    """The directory as an absolute path, made if need be, and closed to other users."""
    home = home.resolve()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return home


def lock(home: Path) -> int:
    """Keep other supervisors out for as long as the answer, a file descriptor, stays open in this program."""
    fd = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise HomeTaken(f"another `quotagate up` keeps its state in {home}") from None
    return fd


def admin_key(home: Path) -> tuple[str, bool]:
    """The key kept in `admin.key`, and whether it was made just now."""
    path = home / "admin.key"
    try:
        return path.read_text(encoding="ascii").strip(), False
    except FileNotFoundError:
        pass
    # Written aside and linked into place: nobody ever reads half a key, and the first of two makers wins.
    key = secrets.token_urlsafe(32)
    draft = home / f"admin.key.{os.getpid()}"
    draft.unlink(missing_ok=True)
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w", encoding="ascii") as file:
        file.write(f"{key}\n")
    try:
        os.link(draft, path)
    except FileExistsError:
        return path.read_text(encoding="ascii").strip(), False
    finally:
        draft.unlink()
    return key, True
