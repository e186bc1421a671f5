"""Writes the authorities that Python trusts as a key store for Java: `python3 tests/key_store.py FILE`."""

from __future__ import annotations

import hashlib
import ssl
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

STORE_PASSWORD: Final = "changeit"


def key_store(certificates: Sequence[bytes]) -> bytes:
    """Trusted certificates as a Java key store: a list, then a digest over the password and that list."""
    content = struct.pack(">III", 0xFEEDFEED, 2, len(certificates))
    now_ms = int(time.time() * 1000)
    for number, certificate in enumerate(certificates):
        content += struct.pack(">I", 2) + _utf(str(number)) + struct.pack(">Q", now_ms)
        content += _utf("X.509") + struct.pack(">I", len(certificate)) + certificate
    salted = STORE_PASSWORD.encode("utf-16-be") + b"Mighty Aphrodite"
    return content + hashlib.sha1(salted + content).digest()


def _utf(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode()


if __name__ == "__main__":
    trusted = ssl.create_default_context().get_ca_certs(binary_form=True)
    Path(sys.argv[1]).write_bytes(key_store(trusted))
