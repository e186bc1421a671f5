"""Folders of reports as jobs write them, and as nobody should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

AUDIT: Final = {"decisions": 5, "verdicts": 9, "judged": 9, "unjudged": 0, "findings": []}
TABLES: Final = {
    "tables": [
        {
            "name": "decisions_over_time",
            "title": "Decisions over time",
            "columns": ["at_ms", "admit"],
            "rows": [[1_000, 5], [2_000, None]],
            "count": 7,
        }
    ]
}


def made(folder: Path, name: str, **files: object) -> Path:
    """A report; a file is bytes or JSON."""
    report = folder / name
    report.mkdir()
    for stem, content in {"summary": AUDIT, **files}.items():
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        (report / f"{stem}.json").write_bytes(text)
    return report
