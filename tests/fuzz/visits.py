"""Visits: bytes that are not quite HTTP, and connections that end too soon, are slow or send too much."""

from __future__ import annotations

import json
from random import Random
from typing import Final, Literal

from tests.fuzz.bodies import TOO_LARGE, flipped, valid_ask, written
from tests.fuzz.cases import (
    ADMIN,
    ENTITIES,
    JSON,
    OK,
    Expected,
    Visit,
    answer,
    post,
    refusable,
    spending,
    unjudged,
)
from tests.fuzz.messages import CHECK, ONE, chunked, in_pieces, message, oddly_dressed

# Bytes that are no HTTP, or not quite


def random_bytes(chance: Random, _: int) -> Visit:
    return Visit("raw bytes", (chance.randbytes(chance.choice((1, 3, 20, 500, 20_000))),))


def other_protocols(chance: Random, number: int) -> Visit:
    ask = post(ONE, json.dumps(refusable(number)).encode())
    spoken = (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
        b"*1\r\n$8\r\nFLUSHALL\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"EHLO quotagate.test\r\nQUIT\r\n",
        b"PROXY TCP4 203.0.113.9 127.0.0.1 1 2\r\n" + ask,
        b"\r\n\r\n\r\n\x0d\x0a\x00\x0d\x0aQUIT\x0a" + ask,
        b"\0" * chance.choice((1, 1_000)),
        b"A" * 100_000,
        b"{" + json.dumps(refusable(number)).encode(),
    )
    return Visit("other protocols", (chance.choice(spoken),))


def blank_lines_first(chance: Random, _: int) -> Visit:
    ask, spends = spending(chance)
    sent = b"\r\n" * chance.choice((1, 5, 1_000)) + post(ONE, written(chance, ask))
    return Visit("blank lines first", (sent,), (Expected("POST", OK, spends),))


def flipped_message(chance: Random, number: int) -> Visit:
    body = json.dumps(valid_ask(chance, f"flipped-{number % 500}", ids=True)).encode()
    whole = (
        post(ONE, body, *oddly_dressed(chance)),
        message("POST", ONE, ["Transfer-Encoding: chunked"]) + chunked(chance, body),
        message("GET", CHECK + "?requests=1", [b"X-Quotagate-Principal: flipped"]),
        message("GET", f"/v1/quotas/{chance.choice(ENTITIES)}", [ADMIN]),
        message("PUT", f"/v1/quotas/{chance.choice(ENTITIES)}", [ADMIN, JSON], b'{"request_rate":5}'),
        message("GET", "/health/live"),
    )
    return Visit("flipped message", (flipped(chance, chance.choice(whole)),))


def bad_chunks(chance: Random, number: int) -> Visit:
    body = json.dumps(refusable(number)).encode()
    size = f"{len(body):x}".encode()
    head = message("POST", ONE, ["Transfer-Encoding: chunked"])
    last = b"0\r\n\r\n"
    chunks = (
        b"g\r\n" + body + b"\r\n" + last,
        b"-" + size + b"\r\n" + body + b"\r\n" + last,
        b"0x" + size + b"\r\n" + body + b"\r\n" + last,
        b"\r\n" + body + b"\r\n" + last,
        b"ffffffffffffffffff\r\n" + body + b"\r\n" + last,
        b"7fffffffffffffff\r\n" + body + b"\r\n" + last,
        size + b"\r\n" + body + last,
        size + b"\r\n" + body + b"xx" + last,
        b"1\r\n" + body + b"\r\n" + last,
        size + b"\r\n" + body + b"\r\n",
        size + b"\r\n" + body + b"\r\n" + b"0\r\n",
        size + b";" + b"x" * 200_000 + b"\r\n" + body[:5],
        size + b"\0\r\n" + body + b"\r\n" + last,
        last,
    )
    return Visit("bad chunks", (head + chance.choice(chunks),))


def wrong_lengths(chance: Random, number: int) -> Visit:
    body = json.dumps(refusable(number)).encode()

    def sized(*lengths: str) -> bytes:
        return message("POST", ONE, [f"Content-Length: {length}" for length in lengths]) + body

    right = f"{len(body)}"
    match chance.randrange(4):
        case 0:
            return Visit("wrong lengths", (sized(f"{len(body) + chance.choice((1, 100, 10**6))}"),))
        case 1:
            length = chance.randrange(len(body))
            return Visit("wrong lengths", (sized(f"{length}"),), (answer("POST", 400),))
        case 2:
            lengths = chance.choice([*_NO_LENGTHS, (right, "5")])
            return Visit("wrong lengths", (sized(*lengths),), (answer("POST", 400),))
        case _:
            headers = [f"Content-Length: {right}", f"Transfer-Encoding: {chance.choice(_CODINGS)}"]
            chance.shuffle(headers)
            return Visit(
                "both lengths",
                (message("POST", ONE, headers) + chunked(chance, body),),
                (answer("POST", 400),),
            )


_NO_LENGTHS: Final = (
    *(("+5",), ("5,5",), ("0x10",), ("-1",), ("1e3",), ("",), ("9" * 25,), ("5 5",), ("5;",), ("\xb2",)),
)
_CODINGS: Final = (
    *("chunked", "Chunked", "gzip, chunked", "chunked, chunked", "identity", "\tchunked", "xchunked"),
)


def versions(chance: Random, number: int) -> Visit:
    ask, spends = spending(chance)
    body = written(chance, ask)
    if chance.random() < 0.4:
        kept = chance.choice(([], ["Connection: keep-alive"]))
        sent = message("POST", ONE, kept, body, version="HTTP/1.0", host=chance.random() < 0.5)
        return Visit("HTTP/1.0", (sent,), (Expected("POST", OK, spends),), end="closed")
    body = json.dumps(unjudged(number)).encode()
    version = chance.choice(_VERSIONS)
    return Visit("versions", (message("POST", ONE, (), body, version=version, host=version != "HTTP/1.1"),))


_VERSIONS: Final = (
    *(
        "HTTP/0.9",
        "HTTP/2.0",
        "HTTP/1.2",
        "HTTP/3",
        "HTTP/1.10",
        "http/1.1",
        "HTTP/1,1",
        "HTTPS/1.1",
        "HTTP/",
    ),
    *("", "HTTP/1.1"),
)


def expectations(chance: Random, number: int) -> Visit:
    ask, spends = spending(chance)
    body = written(chance, ask)
    continue_ = chance.choice(("Expect: 100-continue", "expect: 100-CONTINUE"))
    whole = post(ONE, body, continue_)
    head = whole[: len(whole) - len(body)]
    match chance.randrange(5):
        case 0:
            return Visit("expectations", (whole,), (Expected("POST", OK, spends),))
        case 1:
            return Visit("expectations", (head, body), (Expected("POST", OK, spends),), slow=True)
        case 2:
            large = message("POST", ONE, [continue_], length=f"{TOO_LARGE}")
            return Visit("expectations", (large,), (answer("POST", 413),), end="closed")
        case 3:
            return Visit("expectations", (message("POST", ONE, [continue_], length="100"),))
        case _:
            other = post(ONE, json.dumps(refusable(number)).encode()[:-1], "Expect: a miracle")
            return Visit("expectations", (other,), (answer("POST", 400, 417),))


def upgrades(chance: Random, number: int) -> Visit:
    h2c = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA"]
    socket = ["Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"]
    socket.append("Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
    after = chance.choice((b"", message("GET", "/health/live"), chance.randbytes(50)))
    match chance.randrange(4):
        case 0:
            ask, spends = spending(chance)
            return Visit(
                "upgrades", (post(ONE, written(chance, ask), *h2c) + after,), (Expected("POST", OK, spends),)
            )
        case 1:
            return Visit("upgrades", (message("GET", "/health/live", h2c) + after,), (answer("GET", 200),))
        case 2:
            path, status = chance.choice(((ONE, 405), ("/health/live", 200), ("/chat", 401)))
            return Visit("upgrades", (message("GET", path, socket) + after,), (answer("GET", status),))
        case _:
            target = chance.choice(("example.com:443", ONE, "*", "/", f"refused-{number}:80"))
            return Visit("upgrades", (message("CONNECT", target) + after,))


def targets(chance: Random, number: int) -> Visit:
    if chance.random() < 0.2:
        ask, spends = spending(chance)
        target = chance.choice(
            (f"http://elsewhere{ONE}", f"https://a@b:1{ONE}?x=y", f"{ONE}?", f"{ONE}?a=%zz%00&b")
        )
        return Visit(
            "targets", (message("POST", target, (), written(chance, ask)),), (Expected("POST", OK, spends),)
        )
    body = json.dumps(unjudged(number)).encode()
    method = chance.choice(("GET", "POST", "OPTIONS"))
    return Visit("targets", (message(method, chance.choice(_TARGETS), (), body),))


_TARGETS: Final = (
    *(
        "%",
        "/%zz",
        "/%00",
        "\0",
        "/v1\0",
        "/\xff",
        "//v1//decisions",
        "/v1/../v1/decisions",
        "*",
        "",
        "?x",
        "#",
    ),
    *(
        "/#/v1",
        "host:80",
        "http://",
        "http:///",
        "http://[::1",
        "mailto:a@b",
        "/ /",
        "/\t",
        "\\v1\\decisions",
        "/{}",
    ),
    *("/v1/decisions%20", "%2Fv1%2Fdecisions", "/v1%2Fdecisions", f"/{'a' * 70_000}", f"/?{'q' * 1_000_000}"),
)


def bad_headers(chance: Random, number: int) -> Visit:
    body = json.dumps(refusable(number)).encode()
    bad = (
        b"No colon here",
        b": no name",
        b"X-Space : before the colon",
        b" X-First: after a blank",
        b"X-Folded: a\r\n b",
        b"X-Nul: a\0b",
        b"X-CR: a\rb",
        b"X-\xff: 1",
        b"X-(): 1",
        b"X-\x01: 1",
        b"X-Control: \x02",
    )
    at_fault = chance.choice(bad)
    statuses = answer("POST", 400)
    return Visit("bad headers", (post(ONE, body[:-1], *oddly_dressed(chance), at_fault),), (statuses,))


def oversized_heads(chance: Random, number: int) -> Visit:
    body = json.dumps(unjudged(number)).encode()
    size = chance.choice((70_000, 200_000, 1_000_000))
    heads: tuple[list[str | bytes], ...] = (
        ["X-Long: " + "a" * size],
        ["X" * size + ": 1"],
        [f"X-{n}: 1" for n in range(size // 20)],
        ["Cookie: " + "a=b; " * (size // 5)],
    )
    return Visit(
        "oversized heads", (post(ONE, body, *chance.choice(heads)),), (answer("POST", 200, 400, 431),)
    )


def line_ends(chance: Random, number: int) -> Visit:
    body = json.dumps(unjudged(number)).encode()
    text = post(ONE, body)
    old, new = chance.choice(
        ((b"\r\n", b"\n"), (b"\r\n", b"\r"), (b"\r\n", b"\n\r"), (b"\r\n\r\n", b"\n\n"), (b" ", b"\t"))
    )
    return Visit("line ends", (text.replace(old, new, chance.choice((1, -1))),))


# Connections


def half_closed(chance: Random, number: int) -> Visit:
    """Close our side before anything was sent, in the middle of a request, or right after a complete one."""
    body = json.dumps(unjudged(number)).encode()
    text = post(ONE, body)
    sent = chance.choice(((), (text[: chance.randrange(len(text))],), (text,), (text * 3,)))
    return Visit("half-closed", sent)


def left(chance: Random, number: int) -> Visit:
    """Disconnect in the middle of a request, or without waiting for the answer."""
    body = json.dumps(refusable(number)).encode()
    text = post(ONE, body)
    end: Literal["cut", "reset"] = chance.choice(("cut", "reset"))
    if chance.random() < 0.7:
        return Visit("left", (text[: chance.randrange(1, len(text))],), end=end)
    there = post(ONE, json.dumps(unjudged(number)).encode())
    return Visit("left", (there * chance.choice((1, 20)),), end=end)


def slow(chance: Random, _: int) -> Visit:
    ask, spends = spending(chance)
    return Visit(
        "slow",
        in_pieces(chance, post(ONE, written(chance, ask), *oddly_dressed(chance)), 25),
        (Expected("POST", OK, spends),),
        slow=True,
    )


def deaf(chance: Random, _: int) -> Visit:
    """Request a lot, read nothing, and disconnect."""
    times = chance.choice((5, 50))
    return Visit("deaf", (message("GET", "/openapi.json") * times,), end="reset", slow=True, requests=times)
