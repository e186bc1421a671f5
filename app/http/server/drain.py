"""The end of a process, which serves on for a while after SIGTERM."""

from __future__ import annotations


class DrainState:
    """Whether the process is stopping."""

    def __init__(self) -> None:
        self.has_begun = False
