"""Memory that this program has freed."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Return whole free pages to the system, which takes glibc some milliseconds; elsewhere, do nothing.

    uvloop has a buffer of 256 KiB for each connection with TLS, and uses little of it. In memory that was
    freed before, all pages of the buffer count.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
