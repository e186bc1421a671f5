"""Bodies of up to a mebibyte that take long to decode, to explain or to answer, for every route.

Each is made for a number, so that a change of quotas or volumes is another one each time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

MIB: Final = 1024 * 1024
Make = Callable[[int], bytes]
"""Returns a body for a number."""


def filled(before: bytes, unit: bytes, after: bytes) -> bytes:
    """Return a mebibyte that repeats a unit between a beginning and an end."""
    return before + unit * ((MIB - len(before) - len(after)) // len(unit)) + after


def listed(each: Callable[[int], str], most: int = MIB, before: str = "{", after: str = "}") -> bytes:
    """Return up to ``most`` parts, but at most a mebibyte, joined by commas and enclosed."""
    parts, room = [], MIB - len(before) - len(after)
    for number in range(most):
        part = each(number)
        room -= len(part.encode()) + 1
        if room < 0:
            break
        parts.append(part)
    return (before + ",".join(parts) + after).encode()


ANYWHERE: Final[Mapping[str, bytes]] = {
    "nested numbers in an unknown field": filled(b'{"x":[', b"[0],", b'0],"usage":{"requests":1}}'),
    "arrays, nested": b"[" * MIB,
    "objects, nested": filled(b"", b'{"a":', b""),
    "a list below deep nesting": filled(b'{"a":' * 900 + b"[", b"[],", b"0]" + b"}" * 900),
    "a long integer": filled(b'{"x":', b"9", b"}"),
    "integers of 4,000 digits": filled(b'{"x":[', b"9" * 4_000 + b",", b"0]}"),
    "integers of 390 digits": filled(b'{"x":[', b"9" * 390 + b",", b"0]}"),
    "fractions": filled(b'{"x":[', b"0.5,", b"0]}"),
    "escapes": filled(b'{"x":"', rb"\n", b'"}'),
    "surrogates": filled(b'{"x":"', rb"\ud83d\ude00", rb'\ud800"}'),
    "one key again and again": filled(b"{", b'"usage":{},', b'"usage":{}}'),
    "unknown keys": listed(lambda n: f'"k{n}":0'),
    "unknown keys to escape": listed(lambda n: f'"~{n}/":0'),
    "empty objects": filled(b"[", b"{},", b"0]"),
    "objects": filled(b"[", b'{"":0},', b"0]"),
    "duplicated keys in many objects": filled(b'{"x":[', b'{"a":0,"a":0},', b"0]}"),
    "texts": filled(b"[", b'"",', b"0]"),
    "integers": filled(b"[", b"0,", b"0]"),
    "wrong UTF-8 at the end": filled(b'{"x":"', b"a", b'\xff"}'),
    "blanks": filled(b"{", b" ", b'"x":1}'),
    "nothing but blanks": b" " * MIB,
}
"""Bodies for any route."""

USAGE: Final = {"requests": 1, "connections": 1, "mutations": 1, "produce_bytes": 1, "fetch_bytes": 1}


def _ask(n: int, **more: Any) -> str:
    return json.dumps({"principal": f"p{n}", "usage": {"requests": 1}, **more})


def _ids(n: int, ids: int, size: int) -> str:
    return _ask(n, usage={"producer_ids": [f"{n}-{i}-{'x' * size}" for i in range(ids)]})


def _asks(each: Callable[[int], str], most: int = 1_000) -> bytes:
    return listed(each, most, '{"asks":[', "]}")


def _alterations(each: Callable[[int], dict[str, Any]], most: int, *, only: bool = False) -> bytes:
    before = f'{{"validate_only":{str(only).lower()},"alterations":['
    return listed(lambda n: json.dumps({"entity": f"user=u{n}", "quotas": each(n)}), most, before, "]}")


def _volume(n: int, available: int | None) -> str:
    return f'{{"broker":"{n}","dir":"/d","total_bytes":1000000,"available_bytes":{json.dumps(available)}}}'


ONE: Final[Mapping[str, Make]] = {
    "too many ids": lambda _: filled(b'{"usage":{"producer_ids":[', b'"a",', b"0]}}"),
    "too many ids, replaced": lambda _: filled(
        b'{"mode":"x","usage":{"producer_ids":[', b'"a",', b'0]},"usage":{"requests":1},"mode":"admit"}'
    ),
    "a thousand long ids": lambda _: _ids(0, 1_000, 240).encode(),
    "a thousand ids that are too long": lambda _: _ids(0, 1_000, 1_000).encode(),
    "usage again and again": lambda _: filled(b"{", b'"usage":{"requests":1},', b'"usage":{"requests":1}}'),
    "an address of colons": lambda _: filled(b'{"ip":"', b":", b'","usage":{"requests":1}}'),
    "a long name": lambda _: filled(b'{"principal":"', b"a", b'","usage":{"requests":1}}'),
}
BATCHES: Final[Mapping[str, Make]] = {
    "a thousand asks": lambda k: _asks(lambda n: _ask(n + k)),
    "a thousand asks in detail": lambda k: _asks(
        lambda n: _ask(n + k, client_id="c", broker="b", listener="l", usage=USAGE, detail=True)
    ),
    "a thousand errors": lambda _: _asks(lambda n: _ask(n, broker="\x01" * 70, listener="\x02" * 70)),
    "an error at the end": lambda _: _asks(lambda n: '{"x":1}' if n == 999 else _ask(n)),
    "a thousand asks with ten ids each": lambda k: _asks(lambda n: _ids(n + k, 10, 80)),
    "ten asks with a thousand ids each": lambda k: _asks(lambda n: _ids(n + k, 1_000, 80), 10),
    "too many small asks": lambda _: filled(b'{"asks":[', b'{"usage":{}},', b"0]}"),
    "too many asks of another type": lambda _: filled(b'{"asks":[', b"0,", b"0]}"),
}
LEASES: Final[Mapping[str, Make]] = {
    "too many settlements": lambda _: filled(
        b'{"ask":{"usage":{}},"lease_ms":1,"settle":[', b'{"lease":"a","usage":{}},', b"0]}"
    ),
    "a hundred settlements": lambda k: listed(
        lambda n: f'{{"lease":"{k}{"a" * 9_000}{n}","usage":{{"requests":1}}}}',
        100,
        '{"ask":{"principal":"a","usage":{"requests":1}},"lease_ms":100,"settle":[',
        "]}",
    ),
}
QUOTAS: Final[Mapping[str, Make]] = {
    "unknown fields of a quota": lambda _: listed(
        lambda n: f'"f{n}":1', before='{"request_rate":{', after="}}"
    ),
    "removed fields of a quota": lambda _: listed(
        lambda n: f'"f{n}":null', before='{"request_rate":{"limit":5,', after="}}"
    ),
}
ALTERATIONS: Final[Mapping[str, Make]] = {
    "a thousand alterations": lambda k: _alterations(lambda n: {"request_rate": n + k + 1}, 1_000),
    "ten thousand alterations": lambda k: _alterations(lambda n: {"request_rate": n + k + 1}, 10_000),
    "ten thousand, as a dry run": lambda k: _alterations(
        lambda n: {"request_rate": n + k + 2}, 10_000, only=True
    ),
    "a thousand alterations with a hundred errors": lambda _: _alterations(
        lambda _n: {f"x{i}": 1 for i in range(100)}, 1_000
    ),
    "an entity ten thousand times": lambda _: listed(
        lambda _n: '{"entity":"user=a","quotas":{"request_rate":1}}', 10_000, '{"alterations":[', "]}"
    ),
}
VOLUMES: Final[Mapping[str, Make]] = {
    "ten thousand volumes": lambda k: listed(
        lambda n: _volume(n, k + 50), 10_000, '{"volumes":[', '],"complete":true}'
    ),
    "ten thousand unknown sizes": lambda _: listed(
        lambda n: _volume(n, None), 10_000, '{"volumes":[', '],"complete":true}'
    ),
}
OF_PATHS: Final[Mapping[str, Mapping[str, Make]]] = {
    "/v1/decisions": ONE,
    "/v1/decisions:batch": BATCHES,
    "/v1/leases": LEASES,
    "/v1/leases/{lease}": LEASES,
    "/v1/quotas/{entity}": QUOTAS,
    "/v1/quotas:alter": ALTERATIONS,
    "/v1/quotas:apply": ALTERATIONS,
    "/v1/volumes": VOLUMES,
}
"""Bodies for some paths, by the path in the OpenAPI document."""


def of_example(example: Any) -> Iterator[tuple[str, Make]]:
    """Yield copies of a route's example in which one value is a mebibyte large."""
    for steps, value in _values(example, ()):
        where = "/".join(map(str, steps)) or "all of it"
        for kind, large in _grown(value):
            yield f"{where}: {kind}", partial(_made, _with(example, steps, large))


def _made(body: bytes, _: int) -> bytes:
    return body


def _values(value: Any, at: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    yield at, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, each in inner:
        yield from _values(each, (*at, step))


def _grown(value: Any) -> Iterator[tuple[str, bytes]]:
    room = MIB - 4_096  # for the rest of the example
    if isinstance(value, str):
        yield "a long text", b'"' + b"a" * room + b'"'
        yield "a text of escapes", b'"' + b"%20" * (room // 3) + b'"'
        yield (
            "the text again and again",
            json.dumps(value + f",{value}" * (room // (len(value) + 1))).encode(),
        )
    elif isinstance(value, list) and value:
        each = json.dumps(value[0]).encode()
        yield "the same again and again", b"[" + b",".join([each] * (room // (len(each) + 1))) + b"]"
        yield "zeros", b"[" + b",".join([b"0"] * (room // 2)) + b"]"
    elif isinstance(value, dict):
        known = json.dumps(value)[1:-1] + ("," if value else "")
        yield "unknown keys", listed(lambda n: f'"k{n:07}":0', room // 14, "{" + known)


def _with(example: Any, steps: tuple[str | int, ...], large: bytes) -> bytes:
    """Return the example with a large value in one place."""
    if not steps:
        return large
    copy = holder = json.loads(json.dumps(example))
    for step in steps[:-1]:
        holder = holder[step]
    holder[steps[-1]] = "@large@"
    return json.dumps(copy).encode().replace(b'"@large@"', large)
