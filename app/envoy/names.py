"""Turns names of any bytes into valid names."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Final
from urllib.parse import quote

from app.domain.entity import MAX_NAME_BYTES
from app.http.wire import wrong_name

DIGEST: Final = "sha256:"
"""The beginning of the name that replaces a name of more than 512 bytes."""
BYTES: Final = "surrogateescape"
"""How bytes become text and bytes again: a byte that is not UTF-8 is a lone surrogate meanwhile."""

_REFUSED: Final = r"\x00-\x1f\x7f-\x9f\udc80-\udcff"
_IS_REFUSED: Final = re.compile(f"[{_REFUSED}]")
_IS_SPELLED: Final = re.compile(f"[%{_REFUSED}]")


def valid_name(sent: str | None) -> str | None:
    r"""Return a valid name for a name of any bytes; a valid name stays the same.

    In other names bytes that are not UTF-8, control characters and percent signs are spelled ``%XX``. If the
    result is longer than 512 bytes, a digest of the sent bytes replaces it. A valid name with the same
    spelling is counted in the same bucket, which never admits more.

    >>> valid_name("50% \u00e4"), valid_name("50%\t"), valid_name(b"jos\xe9".decode(errors="surrogateescape"))
    ('50% ä', '50%25%09', 'jos%E9')
    >>> valid_name("/" * 600)[:13]
    'sha256:9ce88c'
    """
    if not sent or not wrong_name(sent):
        return sent
    raw = sent.encode(errors=BYTES)
    if len(raw) <= MAX_NAME_BYTES:
        spelled = _IS_SPELLED.sub(_spelled, sent) if _IS_REFUSED.search(sent) else sent
        if len(spelled.encode()) <= MAX_NAME_BYTES:
            return spelled
    return DIGEST + sha256(raw).hexdigest()


def _spelled(found: re.Match[str]) -> str:
    return quote(found[0], safe="", errors=BYTES)
