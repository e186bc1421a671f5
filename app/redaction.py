"""Removes secrets from messages: parts of URLs, and words that were typed in the wrong place."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

HIDDEN: Final = "..."
MIN_PART: Final = 3
"""Shorter parts of a word give nothing away, and are parts of many other words."""
MIN_ANYWHERE: Final = 5
"""Parts of this length are hidden inside other words too, such as behind an escaped character."""
MAX_NUMBER: Final = 5
"""Numbers of this many digits are shown: a limit, a port."""

_LOGIN: Final = re.compile(r":[^/]*@")
_PARTS: Final = re.compile(r"[\W_]+")
_OPTION: Final = re.compile(r"--[A-Za-z][A-Za-z-]*|-[A-Za-z]")
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z_-]*(?==)|^[A-Za-z][A-Za-z_-]*$")
"""A lone word, or what is before an equals sign."""
ALIKE: Final = 0.8
"""A name at least as similar as this to a known word is a typo, not a secret."""
_SERVERS: Final = re.compile(
    r"(?:[\w.-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}(?:,(?:[\w.-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5})*"
)
_ENTITY: Final = re.compile(r"(?:user|client-id|ip|broker|listener)=[^=]*(?:,(?:client-id|listener)=[^=]*)?")
_FILE: Final = re.compile(r"[^:@=]*\.(?:ya?ml|json[l]?|toml|env|properties|parquet|csv|gz|pem|ini|conf|txt)")
"""A word that is meant as a file, whether it exists or not."""
_REPEATED: Final = re.compile(r"\.\.\.(?:[^\w\s]{0,3}\.\.\.)+")


def url_without_secrets(url: str) -> str:
    """Return a URL without user name, password and options; a path stays unchanged.

    >>> url_without_secrets("https://me:pw@host:80/a?token=b")
    'https://host:80/a'
    >>> url_without_secrets("https://me:p/w@host")
    'https://...'
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        return f"{url.partition('://')[0]}://{HIDDEN}" if "://" in url else HIDDEN
    if not parts.scheme:
        return HIDDEN if _LOGIN.search(url) else url
    if "@" in parts.path + parts.query + parts.fragment:  # if a password contains a /, this is its end
        return f"{parts.scheme}://{HIDDEN}"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def redact(message: str, words: Sequence[str], known: Collection[str] = ()) -> str:
    """Hide the words of a command line in an error message, as each may be a secret in a wrong place.

    Known words and their typos, option names, entities, existing files, addresses and URLs are shown. The
    secrets of a URL are hidden.

    >>> redact("'hunter2': write KEY=VALUE, such as request_rate=5", ["set", "user=a", "hunter2"])
    "'...': write KEY=VALUE, such as request_rate=5"
    """
    shown: set[str] = {part.casefold() for word in known for part in _parts(word)}
    hidden: set[str] = set()
    whole: list[str] = []
    for word in words:
        option, equals, value = word.partition("=")
        typed = value if equals and _OPTION.fullmatch(option) else word
        if _OPTION.fullmatch(typed) or not typed:
            continue
        if "://" in typed:
            shown.update(map(str.casefold, _parts(url_without_secrets(typed))))
            hidden.update(_parts(typed))
        elif (
            typed in known
            or _SERVERS.fullmatch(typed)
            or _ENTITY.fullmatch(typed)
            or _FILE.fullmatch(typed)
            or _is_file(typed)
        ):
            shown.update(map(str.casefold, _parts(typed)))
        else:
            slips = [name for name in _NAME.findall(typed) if get_close_matches(name, known, 1, ALIKE)]
            shown.update(part.casefold() for name in slips for part in _parts(name))
            hidden.update(_parts(typed))
            whole.append(typed)
    hidden = {part for part in hidden if _may_be_secret(part) and part.casefold() not in shown}
    for word in whole:  # also one of short parts, such as a-b-c
        parts = list(filter(_may_be_secret, _parts(word)))
        if any(part.casefold() not in shown for part in parts) or (not parts and any(map(str.isalpha, word))):
            hidden.add(word)
    found = sorted((part for part in hidden if len(part) >= MIN_PART), key=len, reverse=True)
    if not found:
        return message
    kept = "|".join(_bounded(word) for word in sorted(known, key=len, reverse=True) if word) or "(?!)"
    taken = "|".join(re.escape(part) if len(part) >= MIN_ANYWHERE else _bounded(part) for part in found)
    either = re.compile(f"({kept})|{taken}", re.IGNORECASE)
    return _REPEATED.sub(HIDDEN, either.sub(lambda match: match[1] or HIDDEN, message))


def _bounded(word: str) -> str:
    """A pattern for a word that is no part of a longer one."""
    return rf"(?<![^\W_]){re.escape(word)}(?![^\W_])"


def _parts(word: str) -> Iterator[str]:
    yield from filter(None, _PARTS.split(word))


def _may_be_secret(part: str) -> bool:
    return len(part) >= MIN_PART and not (part.isdecimal() and len(part) <= MAX_NUMBER)


def _is_file(word: str) -> bool:
    try:
        return Path(word).exists()
    except (OSError, ValueError):  # too long, or with a zero byte
        return False
