"""Bodies of asks and quotas: valid ones, and ones with a known fault and the status that must answer it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

from app.domain.ask import AMOUNTS, COUNTS

Json = dict[str, Any]
Spoil = Callable[[Random, Json], bytes]

POOL: Final = (
    "alice",
    "älice",
    "名前",
    "💥",
    "a b",
    "*",
    "user=*",
    "%2A",
    "%",
    "{tag}",
    "a,b=c",
    "a;broker=1",
    "../../etc/passwd",
    "'; DROP TABLE quotas; --",
    "null",
    "0",
    "\u202ertl",
    "e\u0301",
    "\ufeff",
    "x" * 128,
    "y" * 129,
    "z" * 512,
    "é" * 256,
    *(f"pool-{n}" for n in range(100)),
)
"""Names that are used repeatedly."""
NUMBERS: Final = (0, 0, 1, 1, 1, 2, 7, 1000, 2**31, 2**53 - 1)
ADDRESSES: Final = ("10.0.0.7", "::ffff:10.0.0.7", "2001:db8::1", "fe80::1", "0.0.0.0", "255.255.255.255")
TEXT_IDS: Final = ("a", "-0", "00", "9223372036854775807", "-1", "ü" * 128, "\u0001", " ")
TOO_LARGE: Final = 1024 * 1024 + 1


def a_name(chance: Random, number: int) -> str:
    """A name of the pool, or one that is used only once."""
    return chance.choice(POOL) if chance.random() < 0.7 else f"once-{number}"


def valid_ask(chance: Random, principal: str, *, ids: bool = False) -> Json:
    """A valid ask, without producer ids or with them."""
    fields = chance.sample(COUNTS + AMOUNTS, chance.randint(1, 3))
    usage: Json = {field: chance.choice(NUMBERS) for field in fields}
    if ids:
        usage["producer_ids"] = [an_id(chance) for _ in range(chance.choice((0, 1, 2, 10)))]
    if chance.random() < 0.2:
        usage["produce_bytes"] = chance.choice((0.5, 1e-300, 1e15, -0.0))
    ask: Json = {"principal": principal, "usage": usage}
    optional: Json = {
        "client_id": chance.choice((None, "", *POOL)),
        "ip": chance.choice((None, *ADDRESSES)),
        "broker": chance.choice((None, "1", "2", "ü")),
        "listener": chance.choice((None, "EXTERNAL", "💥")),
        "mode": chance.choice(("admit", "peek")),
        "enforcement": "deny",
        "recheck": chance.random() < 0.5,
        "cluster_action": False,
        "detail": chance.random() < 0.5,
        "id": f"{chance.randrange(10**6)}",
    }
    return ask | {field: optional[field] for field in chance.sample(list(optional), chance.randint(0, 3))}


def an_id(chance: Random) -> int | str:
    """A producer id, from a range in which they repeat."""
    return chance.choice((chance.randrange(1000), str(chance.randrange(1000)), chance.choice(TEXT_IDS)))


def written(chance: Random, body: object) -> bytes:
    """A body as JSON, in one of several equivalent spellings."""
    blank = chance.choice((None, None, None, 1, "\t", "\r\n "))
    tight = (",", ":") if chance.random() < 0.5 else (" , ", " : ")
    return json.dumps(
        body,
        ensure_ascii=chance.random() < 0.5,
        indent=blank,
        separators=tight,
        sort_keys=chance.random() < 0.2,
    ).encode()


def _usage(ask: Json, **fields: object) -> Json:
    return {**ask, "usage": {**ask["usage"], **fields}}


def _raw(body: Json, place: str, text: str) -> bytes:
    """A body in which a placeholder is replaced by a text that is not JSON."""
    return json.dumps(body).replace(f'"{place}"', text).encode()


def _prefix(chance: Random, body: Json) -> bytes:
    text = json.dumps(body).encode()
    return text[: chance.randrange(len(text))]


BAD_UTF8: Final = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\x80", b"\xe2\x82")

NOT_JSON: Final[Sequence[Spoil]] = (
    _prefix,
    lambda c, a: json.dumps(a).encode() + c.choice((b"{}", b",", b"}", b"x", b"\0", json.dumps(a).encode())),
    lambda c, a: _raw(_usage(a, fetch_bytes="@"), "@", c.choice(("NaN", "Infinity", "-Infinity", "nan"))),
    lambda c, a: _raw(
        _usage(a, requests="@"), "@", c.choice(("01", "+1", "1.", ".5", "0x1", "1_0", "--1", "1e"))
    ),
    lambda c, a: _raw({**a, "listener": "@"}, "@", c.choice((r'"\ud800"', r'"a\udfff"', r'"\ud800\ud800"'))),
    lambda c, a: _raw(
        {**a, "listener": "@"}, "@", c.choice(('"\n"', '"\0"', r'"\x41"', r'"\u12"', "'a'", '"a'))
    ),
    lambda c, a: (
        json.dumps(a).encode().replace(b'"principal"', c.choice((b"principal", b"'principal'", b"1")))
    ),
    lambda c, a: b"[" * c.choice((1_000, 100_000)) + json.dumps(a).encode(),
    lambda c, a: b'{"a":' * c.choice((2_000, 50_000)) + json.dumps(a).encode(),
    lambda c, a: json.dumps({**a, "listener": "é"}, ensure_ascii=False).encode(
        c.choice(("latin-1", "utf-16"))
    ),
    lambda c, a: json.dumps({**a, "listener": "@"}).encode().replace(b"@", c.choice(BAD_UTF8)),
    lambda _, a: b"\xef\xbb\xbf" + json.dumps(a).encode(),
    lambda _, a: json.dumps(a).encode()[:-1] + b",}",
    lambda _, a: b"// said\n" + json.dumps(a).encode(),
    lambda c, _: c.choice((b"", b" ", b"\n\n", b"\0", b"{", b"}", b"nul", b"<ask/>", b"principal=a&usage=1")),
)
"""Texts that a parser of RFC 8259 must refuse."""

NO_COUNT: Final[tuple[Any, ...]] = (
    True,
    1.5,
    1.0,
    "1",
    [],
    {},
    -1,
    2**53,
    None,
    10**400,
    10**4000,
    [1],
    "one",
)
NO_AMOUNT: Final[tuple[Any, ...]] = (True, "1", [], {}, -1, -1e-9, 2**53 + 2, 1e300, None, 10**400)
NO_ID: Final[tuple[Any, ...]] = (True, 1.5, 1.0, None, [], {}, "", 2**63, -(2**63) - 1, "x" * 257, "ü" * 129)
NO_NAME: Final[tuple[Any, ...]] = (
    "",
    "\0",
    "a\nb",
    "\x7f",
    "\x9f",
    "x" * 513,
    "ü" * 257,
    "x" * 100_000,
    5,
    True,
    [],
    {},
    1.5,
)
NO_ADDRESS: Final = ("", "host", "300.1.1.1", "1.2.3.4/8", "fe80::1%eth0", " 1.1.1.1", "::g", "1" * 10_000, 7)

WRONG: Final[Sequence[Spoil]] = (
    lambda c, a: written(c, _usage(a, **{c.choice(COUNTS): c.choice(NO_COUNT)})),
    lambda c, a: written(c, _usage(a, **{c.choice(("produce_bytes", "fetch_bytes")): c.choice(NO_AMOUNT)})),
    lambda c, a: _raw(_usage(a, fetch_bytes="@"), "@", c.choice(("1e999", "-1e999", "9" * 5_000, "1e16"))),
    lambda c, a: _raw(_usage(a, requests="@"), "@", c.choice(("1e3", "1E0", "-0.0", "9" * 5_000, "1e999"))),
    lambda c, a: written(c, _usage(a, producer_ids=[1, c.choice(NO_ID)])),
    lambda c, a: written(c, _usage(a, producer_ids=c.choice((1, "1", {}, True, None, list(range(1001)))))),
    lambda c, a: written(c, {**a, "principal": c.choice(NO_NAME)}),
    lambda c, a: written(c, {**a, c.choice(("broker", "listener")): c.choice(NO_NAME)}),
    lambda c, a: written(c, {**a, "ip": c.choice(NO_ADDRESS)}),
    lambda c, a: written(c, {**a, "mode": c.choice(("steal", "", "ADMIT", None, 1, ["admit"]))}),
    lambda c, a: written(c, {**a, "enforcement": c.choice(("delay", "", None, 1, True))}),
    lambda c, a: written(
        c, {**a, c.choice(("detail", "recheck", "cluster_action")): c.choice((1, "true", None))}
    ),
    lambda c, a: written(c, {**a, "id": c.choice(("", "x" * 65, "ü" * 33, None, 1))}),
    lambda c, a: written(c, {**a, "at_ms": c.choice((0, 1, 2**53 - 1, -1, "1"))}),
    lambda c, a: written(c, {**a, c.choice(("Usage", "", "x" * 10_000, "usage ", "a/b~c", "💥")): 1}),
    lambda c, a: written(c, _usage(a, **{c.choice(("request", "", "x" * 10_000, "_", "$")): 1})),
    lambda c, a: _raw({**a, "more": "@"}, "@", "[" * 400 + "]" * 400),
    lambda c, a: written(c, {**a, "usage": c.choice(({}, [], 1, "requests", None, [["requests", 1]]))}),
    lambda c, a: written(c, {field: value for field, value in a.items() if field != "usage"}),
    lambda c, a: written(c, c.choice(([], [a], 1, "ask", None, True, {"asks": [a]}, {}))),
)
"""Valid JSON that is not a valid body."""


def spoiled(chance: Random, ask: Json) -> tuple[bytes, frozenset[int]]:
    """An ask with a fault, and the status that must answer it; it must not be charged."""
    if chance.random() < 0.4:
        return chance.choice(NOT_JSON)(chance, ask), frozenset({400})
    return chance.choice(WRONG)(chance, ask), frozenset({422})


def batch_of(body: bytes, before: Sequence[bytes]) -> bytes:
    """A batch whose last ask is this one; a fault in it must fail the whole batch."""
    return b'{"asks":[' + b",".join([*before, body]) + b"]}"


def warped(chance: Random, body: Json) -> object:
    """A body with one of its values replaced, removed, renamed, wrapped or moved."""
    bent: Any = _copy({"": body})
    for _ in range(chance.choice((1, 1, 2, 4))):
        places = _places(bent)
        holder, key = chance.choice(places)
        match chance.randrange(5):
            case 0 if holder is not bent:
                del holder[key]
            case 1 if isinstance(holder, dict) and holder is not bent:
                holder[chance.choice(STRANGE_TEXTS)] = holder.pop(key)
            case 2:
                holder[key] = _copy(chance.choice(([holder[key]], {"usage": holder[key]}, [holder[key]] * 3)))
            case 3:
                other, other_key = chance.choice(places)
                holder[key] = _copy(other[other_key])
            case _:
                holder[key] = _copy(chance.choice(STRANGE))
    return bent[""]


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every place of a value in a document: its container, and its key there."""
    found, left = [], [value]
    while left:
        holder = left.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                left.append(holder[key])
    return found


STRANGE_TEXTS: Final = (
    "",
    "usage",
    "principal",
    "limit",
    "\0",
    "ü" * 300,
    "a/b~c",
    "__proto__",
    "1",
    " ",
    "\u2028",
)
STRANGE: Final[tuple[Any, ...]] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        1.5,
        -0.0,
        1e308,
        5e-324,
        2**63,
        10**30,
        [],
        {},
        [[]],
        {"": {}},
        [None] * 50,
    ),
    *("", "x", "1", "admit", "deny", "NaN", "10.0.0.7", *STRANGE_TEXTS),
    json.loads("[" * 200 + "]" * 200),
)
"""Values to put anywhere; they are valid nowhere."""


def flipped(chance: Random, text: bytes) -> bytes:
    """A body with a few bytes changed, inserted, removed, doubled or moved; it may be valid or not."""
    bent = bytearray(text)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at = chance.randrange(len(bent) + 1)
        to = min(at + chance.choice((1, 1, 2, 5, 40)), len(bent))
        match chance.randrange(6):
            case 0 if at < len(bent):
                bent[at] ^= 1 << chance.randrange(8)
            case 1:
                bent[at:at] = chance.randbytes(chance.choice((1, 1, 2, 8)))
            case 2:
                del bent[at:to]
            case 3:
                bent[at:at] = bent[at:to] * chance.choice((1, 1, 50))
            case 4:
                bent[at:at] = chance.choice(TOKENS)
            case _:
                bent[at:to] = bytes(reversed(bent[at:to]))
    return bytes(bent)


TOKENS: Final = (
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b'"',
        b"\\",
        b"\\u0000",
        b"\\ud83d",
        b"null",
        b"true",
        b"-",
        b"1e9",
    ),
    *(
        b"\r\n",
        b"\n",
        b"\r",
        b"\r\n\r\n",
        b"\0",
        b" ",
        b"\t",
        b"%00",
        b"%ff",
        b"%2f",
        b"/",
        b"..",
        b"?",
        b"#",
    ),
    *(b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"HTTP/1.0", b"0\r\n\r\n", b"\xff\xfe"),
    *(
        b'"usage":{},',
        b'"principal":null,',
        b'"mode":"refund",',
        b'"detail":true,',
        b'"id":"1",',
        b"99999999999",
    ),
)

QUOTAS: Final[Sequence[Json]] = (
    {"request_rate": 10},
    {"request_rate": {"limit": 5.5, "enforcement": "deny", "samples": 3, "sample_ms": 500}},
    {"producer_ids_rate": {"limit": 50, "window_ms": 60_000, "layers": "timed"}},
    {"producer_byte_rate": 1_000_000, "consumer_byte_rate": 0, "request_percentage": 0.5},
    {"controller_mutation_rate": {"limit": 3, "algorithm": "token_bucket", "burst": 100, "shadow": True}},
)
PATCHES: Final[Sequence[Json]] = (
    {"request_rate": 7},
    {"request_rate": {"limit": 8, "shadow": None}},
    {"producer_ids_rate": None, "request_rate": 3},
    {"consumer_byte_rate": {"limit": 10}},
)
NO_QUOTAS: Final[Sequence[Json]] = (
    {"request_rates": 5},
    {"": 5},
    {"request_rate": "5"},
    {"request_rate": -1},
    {"request_rate": 2**60},
    {"request_rate": {"limit": 5, "unit": 1}},
    {"request_rate": {"limit": [5]}},
    {"request_rate": {"limit": 5, "samples": 1.5}},
    {"request_rate": {"limit": 5, "samples": 10**400}},
    {"request_rate": {"limit": 5, "enforcement": "maybe"}},
    {"producer_ids_rate": 5.5},
    {"producer_ids_rate": {"limit": 5, "layers": {"interval_ms": 1}}},
    {"producer_ids_rate": {"limit": 5, "window_ms": 1}},
    {"producer_ids_rate": True},
    {"max_connection_creation_rate": 5},
    {"request_rate": 5, "producer_byte_rate": 0.5},
)
"""Invalid quotas of a user, for PUT and for PATCH."""
