"""Opens many connections, as fast as it can, and holds them until its input ends.

Its arguments are JSON: ``[host, port]``, the number, the sources, and the bytes to send, compressed, in hex.
When all are open, or were refused, it prints a line.
"""

from __future__ import annotations

import json
import resource
import selectors
import socket
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from tests.addresses import family_of

IP_BIND_ADDRESS_NO_PORT: Final = 24
"""Linux: the port is chosen at connect, so that ports of ended connections to other nodes can be used."""
AT_ONCE: Final = 500
SPARE: Final = 100
LOOKS_S: Final = 0.5
"""How long nothing must happen to the connections until they are counted."""


def main(address: tuple[str, int], count: int, sources: Sequence[str], text: str) -> None:
    """Open the connections, and hold them until the input ends."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(count, hard - SPARE)
    sends, selector = zlib.decompress(bytes.fromhex(text)), selectors.DefaultSelector()
    for n in range(count):
        one = socket.socket(family_of(address[0]))
        one.setblocking(False)
        one.setsockopt(socket.SOL_IP, IP_BIND_ADDRESS_NO_PORT, 1)
        one.bind((sources[n % len(sources)], 0))
        one.connect_ex(tuple(address))  # which JSON made a list
        selector.register(one, selectors.EVENT_WRITE if sends else selectors.EVENT_READ, memoryview(sends))
        if n % AT_ONCE == 0:
            look(selector, 0)
    while look(selector, LOOKS_S):
        pass
    print("open", flush=True)
    sys.stdin.read()


def look(selector: selectors.BaseSelector, wait_s: float) -> bool:
    """Send outstanding bytes, and forget closed connections; return whether anything happened."""
    events = selector.select(wait_s)
    for key, event in events:
        one = key.fileobj
        assert isinstance(one, socket.socket)
        try:
            if event & selectors.EVENT_WRITE:
                left = key.data[one.send(key.data) :]
                selector.modify(one, selectors.EVENT_WRITE if left else selectors.EVENT_READ, left)
            elif not one.recv(65_536):
                raise ConnectionResetError
        except OSError:
            selector.unregister(one)
            one.close()
    return bool(events)


@contextmanager
def crowding(
    address: tuple[str, int], count: int, sources: Sequence[str], sends: bytes = b""
) -> Iterator[None]:
    """Open so many connections, and hold them unless the other end closes them."""
    arguments = [json.dumps(each) for each in (address, count, sources, zlib.compress(sends).hex())]
    crowd = subprocess.Popen(
        [sys.executable, "-m", "tests.load.crowd", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert crowd.stdin is not None
    assert crowd.stdout is not None
    try:
        assert crowd.stdout.readline() == b"open\n"
        yield
    finally:
        crowd.stdin.close()
        crowd.wait()
        crowd.stdout.close()


if __name__ == "__main__":
    main(*map(json.loads, sys.argv[1:]))
