"""Texts that would be markup or code in a careless page, and the check that the console's is not."""

from __future__ import annotations

from typing import Final

from tests.console.conftest import Console
from tests.fuzz.bodies import STRANGE_TEXTS

MAX_NAME: Final = 255
"""The longest name of a folder in bytes."""

HOSTILE: Final = (
    "<img src=x onerror=window.hit=1>",
    "<script>window.hit=1</script>",
    "\"'><svg/onload=window.hit=1>",
    "javascript:window.hit=1",
    "</code></td><style>*{display:none}</style>",
    "${window.hit=1}{{script}}",
    "&lt;b&gt; &#60;i&#62;",
    "\u202e\u2066<b>right to left</b>",
    "%3Cimg src=x onerror=window.hit=1%3E",
    "a b+c?d#e&f=g",
    "ünïcode ✓ 你好 😀",
    *(text for text in STRANGE_TEXTS if 0 < len(text.encode()) <= MAX_NAME and "\0" not in text),
)
"""Names of principals, reasons, names of reports, and texts in them; also those of the fuzzer."""

FOREIGN: Final = "main :is(img, script, svg, style, i, b:not(#key-new b))"
"""The elements that these texts would make, and that the console's views do not have."""


def expect_no_markup(console: Console) -> None:
    """No text has become an element or has run."""
    found = console.page.evaluate(f"[window.hit ?? null, document.querySelectorAll({FOREIGN!r}).length]")
    assert found == [None, 0]
