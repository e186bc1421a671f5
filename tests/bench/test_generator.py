"""The generator against small servers whose answers are known: its requests and its counts."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.bench.arithmetic import moments, percentile
from tests.bench.generator import FLAGS, SOURCE, Found, Load, run
from tests.tools import need

ASK = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 22\r\n\r\n"
BODY = b"who-{next6} and {fresh6}"
STALL_S = 0.3


@contextmanager
def serving(answer: Callable[[int, bytes], bytes]) -> Iterator[tuple[str, int]]:
    """A server with one thread for each connection; `answer` gets the number of the request and its body."""
    counter = iter(range(1_000_000))

    def serve(connection: socket.socket) -> None:
        with connection:
            while received := connection.recv(65_536):
                body = received.partition(b"\r\n\r\n")[2]
                reply = answer(next(counter), body)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(reply), reply))

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)


def loaded(address: tuple[str, int], **changed: object) -> Found:
    usual: dict[str, object] = {
        "address": address,
        "request": ASK + BODY,
        "sequence": array("I", [7, 8, 9]),
        "connections": 1,
        "warm_s": 0.0,
        "seconds": 0.2,
        "expected": "yes",
        "local": "here",
    }
    return run(Load(**{**usual, **changed}))  # type: ignore[arg-type]


def test_generator_compiles_without_warnings(tmp_path: Path):
    strict = ("-Wall", "-Wextra", "-Werror")
    subprocess.run([need("cc"), *FLAGS, *strict, "-o", tmp_path / "generator", SOURCE], check=True)


def test_slots_get_the_next_and_fresh_numbers():
    bodies: list[bytes] = []

    def answer(_: int, body: bytes) -> bytes:
        bodies.append(body)
        return b"yes"

    with serving(answer) as address:
        found = loaded(address, schedule=[0] * 4, fresh=41)
    assert bodies == [
        b"who-000007 and 000041",
        b"who-000008 and 000042",
        b"who-000009 and 000043",
        b"who-000007 and 000044",
    ]
    assert found.fresh == 45
    assert found.answers == found.expected == 4
    assert found.statuses == {"200": 4}


def test_random_digits_differ_in_each_request_and_in_each_run():
    bodies: list[bytes] = []

    def answer(_: int, body: bytes) -> bytes:
        bodies.append(body)
        return b"yes"

    template = b"{hex15} {digits6}"  # as long as `BODY` when filled, so that the length in `ASK` is right
    with serving(answer) as address:
        for _ in range(2):
            loaded(address, request=ASK + template, schedule=[0] * 50)
    assert len(set(bodies)) == 100
    assert all(re.fullmatch(rb"[0-9a-f]{15} [0-9]{6}", body) for body in bodies)
    assert {chr(each) for body in bodies for each in body[:15]} == set("0123456789abcdef")


@pytest.mark.parametrize(("odd_in", "least", "most"), [(0, 0, 0), (10, 50, 150), (1, 1_000, 1_000)])
def test_one_in_so_many_requests_is_odd(odd_in: int, least: int, most: int):
    def answer(_: int, body: bytes) -> bytes:
        return b"yes" if body.startswith(b"odd") else b"no"

    odd = [ASK + b"odd-{next6} and again".ljust(26), ASK + b"odd too, and {fresh6}"]
    with serving(answer) as address:
        found = loaded(address, schedule=[0] * 1_000, odd=odd, odd_in=odd_in)
    assert found.answers == 1_000
    assert least <= found.expected <= most


def test_texts_of_answers_are_counted():
    with serving(lambda number, _: b"no" if number == 1 else b"yes yes here") as address:
        found = loaded(address, schedule=[0] * 3)
    assert (found.answers, found.expected, found.local) == (3, 4, 2)
    assert found.odd.endswith("no")


def test_a_closed_loop_asks_again_when_it_is_answered():
    with serving(lambda *_: b"yes") as address:
        found = loaded(address, connections=3, warm_s=0.05)
    assert found.answers == found.expected == sum(count for _, count in found.waits)
    assert found.answers > 3
    assert found.wall_ns > 0.1e9
    assert found.own_ns > 0


@pytest.mark.parametrize("is_open", [True, False])
def test_a_stall_counts_for_all_that_was_due_meanwhile(is_open: bool):
    """In the closed loop one request waits; in the open loop, all requests that are due meanwhile."""

    def answer(number: int, _: bytes) -> bytes:
        if number == 5:
            time.sleep(STALL_S)
        return b"yes"

    schedule = moments(200, 1.0) if is_open else ()
    with serving(answer) as address:
        found = loaded(address, schedule=schedule, seconds=1.0)
    slow = sum(count for bound, count in found.waits if bound > STALL_S * 1e9 / 3)
    if is_open:
        assert found.answers == 200
        assert slow >= 200 * STALL_S / 2
        assert percentile(found.waits, 0.99) > STALL_S * 1e9 / 2
    else:
        assert 1 <= slow < 200 * STALL_S / 2


def test_what_is_never_answered_counts_with_its_waiting():
    silent = threading.Event()

    def answer(number: int, _: bytes) -> bytes:
        if number == 1:
            silent.wait(30)
        return b"yes"

    with serving(answer) as address:
        try:
            found = loaded(address, schedule=[0, 10_000_000, 20_000_000])
        finally:
            silent.set()
    assert found.answers == 1
    assert found.unanswered == 2
    assert percentile(found.waits, 1.0) > 9e9


def test_processor_time_is_the_kernels():
    with serving(lambda *_: b"yes") as address:
        before = time.process_time_ns()
        found = loaded(address, connections=8, seconds=0.5, programs=[os.getpid()])
        spent = time.process_time_ns() - before
    assert 0 < found.processor_ns[0] <= spent
    assert found.machine_ns >= 0
