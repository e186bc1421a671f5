"""Compiles and runs the load generator (generator.c), and defines its input and output."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import struct
import subprocess
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from tests.bench.arithmetic import NS
from tests.tools import need

SOURCE: Final = Path(__file__).with_name("generator.c")
BUILT: Final = Path(__file__).parents[2] / "build" / "bench"
FLAGS: Final = ("-O2", "-std=gnu11")
ENDS_WITHIN_S: Final = 900.0
"""How much longer than its window a load may take, for connecting and for outstanding answers."""
SLOT: Final = re.compile(rb"\{(next|same|fresh|hex|digits)(\d+)\}")
KINDS: Final = {b"next": 0, b"same": 1, b"fresh": 2, b"hex": 3, b"digits": 4}


class Load(msgspec.Struct, kw_only=True, frozen=True):
    """A load: its requests, its connections, and its duration.

    Attributes:
        request: the whole of a request. In it ``{next6}`` becomes the next number of the sequence in six
            digits, ``{same6}`` that number again, ``{fresh12}`` a number that was never used, ``{hex32}``
            random hexadecimal digits, and ``{digits5}`` random decimal ones. The seed differs in each run.
        odd: other requests, with the same kinds of slots; at most seven.
        odd_in: one in this many requests, at random, is one of `odd`; 0: none is.
        sequence: the numbers that ``{next…}`` takes in turn, again and again; as an array of unsigned 32-bit
            integers.
        schedule: due times of requests, in nanoseconds from the start; empty: each connection asks again when
            it is answered.
        expected: a text whose occurrences in answers are counted.
        local: another such text.
        programs: process ids whose processor time in the window is read.
    """

    address: tuple[str, int]
    request: bytes
    odd: Sequence[bytes] = ()
    odd_in: int = 0
    sequence: array[int]
    schedule: Sequence[int] = ()
    connections: int = 64
    warm_s: float
    seconds: float
    fresh: int = 0
    expected: str = ""
    local: str = ""
    programs: Sequence[int] = ()


class Found(msgspec.Struct, kw_only=True):
    """The result of a load, for its window alone.

    Attributes:
        expected: occurrences of the expected text in answers; `local`: of the other text.
        lost: connections that the server ended.
        unanswered: due requests without an answer, when none had come for 10 s after the window.
        fresh: the first fresh number that was not used.
        own_ns: the generator's processor time; `machine_ns`: the time of all programs on all cores, in steps
            of 10 ms.
        processor_ns: the programs' processor times.
        waits: a histogram of latencies, from the moment a request was due (open loop) or sent (closed loop).
        lateness: a histogram of delays from a request's due time to its sending, without the time in which no
            connection was free.
        odd: the first answer without the expected text.
    """

    wall_ns: int
    answers: int
    expected: int
    local: int
    lost: int
    unanswered: int
    fresh: int
    own_ns: int
    machine_ns: int
    processor_ns: list[int]
    statuses: dict[str, int]
    waits: list[tuple[int, int]]
    lateness: list[tuple[int, int]]
    odd: str


def compiled() -> Path:
    """The generator's program, compiled by ``$CC`` or ``cc`` if its source has changed."""
    source = SOURCE.read_bytes()
    program = BUILT / f"generator-{hashlib.sha256(source).hexdigest()[:12]}"
    if not program.exists():
        compiler = shlex.split(os.environ.get("CC", "")) or [
            str(need("cc", "any C compiler will do: CC names one"))
        ]
        BUILT.mkdir(parents=True, exist_ok=True)
        partial = program.with_suffix(f".{os.getpid()}")
        subprocess.run([*compiler, *FLAGS, "-o", partial, SOURCE], check=True)
        partial.rename(program)
    return program


def filled(text: bytes) -> bytes:
    """A text with zeros in all slots; other numbers give the same length.

    >>> filled(b"user-{next6}")
    b'user-000000'
    """
    return SLOT.sub(lambda slot: b"0" * int(slot[2]), text)


def packed(load: Load) -> bytes:
    """The generator's input: four counts, the schedule, the sequence, and the requests with their slots."""
    requests = (load.request, *load.odd)
    slots = [_slots(request) for request in requests]
    bodies = [filled(request) for request in requests]
    sizes = [struct.pack("<II", *map(len, pair)) for pair in zip(bodies, slots, strict=True)]
    schedule = array("Q", load.schedule)
    assert load.sequence.itemsize == 4, "the generator reads 32-bit numbers"
    counts = struct.pack("<IIII", len(requests), load.odd_in, len(load.sequence), len(schedule))
    inner = [slot for request_slots in slots for slot in request_slots]
    return b"".join([counts, schedule.tobytes(), load.sequence.tobytes(), *sizes, *inner, *bodies])


def _slots(request: bytes) -> list[bytes]:
    found, shorter = [], 0
    for slot in SLOT.finditer(request):
        digits = int(slot[2])
        found.append(struct.pack("<III", slot.start() - shorter, digits, KINDS[slot[1]]))
        shorter += len(slot[0]) - digits
    return found


def run(load: Load) -> Found:
    """Send a load from a program of its own, on the cores that this thread is pinned to."""
    with tempfile.NamedTemporaryFile(prefix="qg-load-") as file:
        file.write(packed(load))
        file.flush()
        times = [str(round(seconds * NS)) for seconds in (load.warm_s, load.seconds)]
        words = [str(part) for part in (*load.address, load.connections, *times, load.fresh)]
        ran = subprocess.run(
            [compiled(), file.name, *words, load.expected, load.local, *map(str, load.programs)],
            capture_output=True,
            timeout=load.warm_s + load.seconds + ENDS_WITHIN_S,
            check=False,
        )
    assert ran.returncode == 0, ran.stderr.decode(errors="replace")
    return msgspec.json.decode(ran.stdout, type=Found)


def processor_us(load: Load) -> float:
    """Send a load, whose answers must be 200; return microseconds of its first program for an answer."""
    found = run(load)
    assert found.statuses == {"200": found.answers}
    return found.processor_ns[0] / found.answers / 1e3
