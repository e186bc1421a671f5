"""No test raises the store budget to seconds: a node must work on a busy machine without that."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = re.compile(r"""STORE_BUDGET_MS["']?\s*[:=]\s*["']?\d{4,}""")


def test_no_test_and_no_example_gives_the_store_seconds():
    files = [file for folder in ("tests", "examples") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    assert [str(file) for file in files if SECONDS.search(file.read_text(encoding="utf-8"))] == []


def test_the_search_finds_one():
    assert SECONDS.search('"QUOTAGATE_STORE_' + 'BUDGET_MS": "20000"')
    assert not SECONDS.search('"QUOTAGATE_STORE_' + 'BUDGET_MS": "50"')
