"""Reports of tests, such as measurements: shown at the end of a run, whichever worker ran the test."""

from __future__ import annotations

from typing import Final

MARK: Final = "» "


def say(*texts: object) -> None:
    """Report something, in one line or in several."""
    for line in " ".join(map(str, texts)).splitlines():
        print(f"\n{MARK}{line}", end="", flush=True)
    print()


def reported(output: str) -> list[str]:
    """The lines that a test reported, out of everything that it printed."""
    return [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
