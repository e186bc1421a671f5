"""Options of the Java that tests start."""

from __future__ import annotations

from typing import Final

QUICK_START: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A test is too short to gain from code that is compiled well."""
