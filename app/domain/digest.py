"""From a producer id to the places it has in a filter: a keyed hash, spread by mmh3."""

from __future__ import annotations

import re
import struct
from hashlib import blake2b, sha256
from typing import Final

import mmh3

DECIMAL: Final = re.compile("0|-?[1-9][0-9]{0,18}")
INT64: Final = range(-(2**63), 2**63)
SEEDS: Final = (0x51A7E001, 0x51A7E002)
WORDS: Final = struct.Struct("<8I")


def as_id(text: str) -> int | str:
    """The id that a text is: the canonical decimal of a signed 64-bit integer is that integer.

    >>> as_id("4711"), as_id("-1"), as_id("007"), as_id("9223372036854775808")
    (4711, -1, '007', '9223372036854775808')
    """
    return number if DECIMAL.fullmatch(text) and (number := int(text)) in INT64 else text


def secret_of(text: str) -> bytes:
    """The deployment secret that a setting spells.

    Raises:
        ValueError: it spells none.
    """
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise ValueError("must be 32 bytes, written as 64 hexadecimal digits")
    return bytes.fromhex(text)


def digest(secret: bytes, principal: str, producer_id: int | str) -> bytes:
    """Eight bytes that nobody without the secret can aim: Murmur alone is open to crafted collisions.

    BLAKE2b keyed with the deployment secret (32 bytes) over principal, 0x00, kind, id; so a collision for
    one principal means nothing for another.
    """
    kind = f"i{producer_id}" if isinstance(producer_id, int) else f"s{producer_id}"
    return blake2b(f"{principal}\0{kind}".encode(), digest_size=8, key=secret).digest()


def spread(digested: bytes) -> bytes:
    """Spread a digest over 32 bytes, eight little-endian words: mmh3 (x64, 128 bits) with two seeds."""
    return mmh3.mmh3_x64_128_digest(digested, SEEDS[0]) + mmh3.mmh3_x64_128_digest(digested, SEEDS[1])


def fingerprint(secret: bytes) -> str:
    """What may be kept, and shown, of a secret: enough to tell it from another."""
    return sha256(b"quotagate" + secret).hexdigest()
