"""Text for people: durations, numbers, and characters that steer a terminal, hide or turn round text."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from decimal import Decimal
from itertools import pairwise
from math import ceil
from typing import Any, Final, TextIO, cast

_UNSEEN: Final = (
    "\x7f-\x9f"  # C1 controls, which some terminals obey
    "\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069"  # change the direction of text, or take no room
    "\u2028\u2029\ufeff\ufff9-\ufffb"
    "\ud800-\udfff"  # halves of a character
    "\U000e0000-\U000e0fff"  # tags and variants, which hide text
)
UNSAFE: Final = re.compile(f"[{_UNSEEN}]")
"""Unsafe characters that JSON and YAML do not escape by themselves."""
_IN_LINE: Final = re.compile(f"[\x00-\x1f{_UNSEEN}]")
_IN_LINES: Final = re.compile(f"[\x00-\x08\x0b-\x1f{_UNSEEN}]")

SECOND: Final = 1_000
UNITS: Final = {"d": 86_400 * SECOND, "h": 3_600 * SECOND, "min": 60 * SECOND, "s": SECOND}
"""Units of durations, in milliseconds."""

ALL_DIGITS: Final = 100
"""Measured numbers from this one on are shown with all digits before the point, and none behind it."""


def duration(ms: float) -> str:
    """Return a duration for people, rounded up, in at most two units.

    >>> duration(0), duration(250), duration(1_230), duration(59_400), duration(3_599_211)
    ('0 ms', '250 ms', '1.3 s', '1 min', '1 h')
    >>> duration(999.4), duration(3_661_000), duration(90_000_000)
    ('1 s', '1 h 2 min', '1 d 1 h')
    """
    if ceil(ms) < SECOND:
        return f"{ceil(ms)} ms"
    if ms < 10 * SECOND:
        return f"{ceil(ms / 100) / 10:g} s"
    for (name, long), (short_name, short) in pairwise(UNITS.items()):
        whole, rest = divmod(ceil(ms / short) * short, long)
        if whole:
            return f"{whole} {name}" + (f" {rest // short} {short_name}" if rest else "")
    return f"{ceil(ms / SECOND)} s"


def measured(number: float) -> str:
    """Return a number that was measured or computed: three digits, or all before the point.

    >>> measured(22.78527160043748), measured(1234.56), measured(0.0333333), measured(5.0), measured(1e-7)
    ('22.8', '1,235', '0.0333', '5', '0.0000001')
    """
    if isinstance(number, int):
        return f"{number:,}"
    if abs(number) >= ALL_DIGITS:
        return f"{number:,.0f}"
    return f"{Decimal(f'{number + 0.0:.3g}'):f}"  # -0.0 + 0.0 is 0.0


def exact(number: float) -> str:
    """Return a number with all its digits, such as a limit.

    >>> exact(1_240_000.0), exact(0.12), exact(1e-7), exact(9_007_199_254_740_991.0)
    ('1,240,000', '0.12', '0.0000001', '9,007,199,254,740,991')
    """
    if float(number).is_integer():
        return f"{int(number):,}"
    return f"{Decimal(f'{number:.15g}'):,f}"


def count(number: int, one: str, more: str) -> str:
    """Return a number with its noun.

    >>> count(1, "entity", "entities"), count(2000, "entity", "entities")
    ('1 entity', '2,000 entities')
    """
    return f"{number:,} {one if number == 1 else more}"


def plain(text: str) -> str:
    r"""Escape characters that could move a terminal's cursor, begin a line, or hide text.

    >>> plain("a\x1b[31mb"), plain("\u202egpj.exe")
    ('a\\x1b[31mb', '\\u202egpj.exe')
    """
    return _IN_LINE.sub(_escape, text)


def plain_lines(lines: Iterable[str]) -> str:
    """Escape unsafe characters in each line, and join the lines."""
    return "\n".join(map(plain, lines))


def plain_text(text: str) -> str:
    r"""Escape unsafe characters of a text that may have line breaks and tabs.

    >>> plain_text("a\x9b\n\tb\r")
    'a\\x9b\n\tb\\r'
    """
    return _IN_LINES.sub(_escape, text)


def plain_json(text: str) -> str:
    r"""Escape unsafe characters of JSON text, which only strings hold, so that the values stay the same.

    >>> print(plain_json('"\u202e\U000e0041ü"'))
    "\u202e\udb40\udc41ü"
    """
    return UNSAFE.sub(lambda found: json.dumps(found.group())[1:-1], text)


class EscapingStream:
    """A standard stream that escapes unsafe characters of everything that is written to it.

    Colours of rich pass, as it writes to ``rich_proxied_file``; foreign text is escaped before rich gets it.
    Other writers find no ``buffer``, so that they do not write past the escapes.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """Write text with its unsafe characters escaped."""
        self.rich_proxied_file.write(plain_text(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each text with its unsafe characters escaped."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError(name)
        return getattr(self.rich_proxied_file, name)


def escape_output() -> None:
    """Escape unsafe characters in everything that this process prints from now on, even in tracebacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, EscapingStream | None):
            setattr(sys, name, cast("TextIO", EscapingStream(stream)))


def styled(stream: TextIO) -> TextIO:
    """Return the stream for text with colours, whose foreign parts are escaped already."""
    return getattr(stream, "rich_proxied_file", stream)


def _escape(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape").decode()
