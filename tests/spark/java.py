"""How a Java is started for a test."""

from __future__ import annotations

from typing import Final

QUICK_START: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""What Java gains by compiling well, it does not gain back in a test."""
