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
    '" onmouseover="window.hit=1" x="',
    "' onfocus='window.hit=1' autofocus x='",
    "javascript:window.hit=1",
    "</code></td><style>*{display:none}</style>",
    "--><iframe srcdoc=x></iframe><!--",
    "${window.hit=1}{{script}}",
    "`${window.hit=1}`",
    "&lt;b&gt; &#60;i&#62;",
    "\u202e\u2066<b>right to left</b>",
    "\u2028<b>\u2029\ufeff\u200b\ufffd\ufffe\U000e0001",
    "%3Cimg src=x onerror=window.hit=1%3E",
    "a b+c?d#e&f=g",
    "ünïcode ✓ 你好 😀",
    "<b>" * 60,
    *(text for text in STRANGE_TEXTS if 0 < len(text.encode()) <= MAX_NAME and "\0" not in text),
)
"""Names of principals, reasons, names of reports, and texts in them; also those of the fuzzer."""

TEXTS: Final = (
    *HOSTILE,
    *(text for text in STRANGE_TEXTS if text.strip() and text not in HOSTILE),
    "\0<b>\x01\x07\x1b[31m\r\n\t\x7f\x85</b>",
    "<b>very long</b>" * 1_000,
)
"""More, which names of principals and folders cannot be."""

FOREIGN: Final = (
    ":is(header, #problem, main) :is(img, script, svg, style, iframe, i, b:not(#key-new b),"
    " a:not([href^='#']), [onerror], [onload], [onmouseover], [onfocus], [autofocus])"
)
"""The elements that these texts would make, and that the console does not have."""


def expect_no_markup(console: Console) -> None:
    """No text has become an element or has run."""
    found = console.page.evaluate(
        "foreign => [window.hit ?? null, document.querySelectorAll(foreign).length]", FOREIGN
    )
    assert found == [None, 0]
