"""What a test tells of what it met: shown at the end of a run, passed or not, whichever worker ran it."""

from __future__ import annotations

from typing import Final

MARK: Final = "» "


def say(*texts: object) -> None:
    """Tell something, in one line or in several."""
    for line in " ".join(map(str, texts)).splitlines():
        print(f"\n{MARK}{line}", end="", flush=True)
    print()


def said(output: str) -> list[str]:
    """What was told, out of all that a test printed."""
    return [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
