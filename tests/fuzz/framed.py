"""Requests that are framed as HTTP requires, with any content."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Final

from tests.fuzz.bodies import (
    NO_QUOTAS,
    PATCHES,
    POOL,
    QUOTAS,
    TOO_LARGE,
    Json,
    a_name,
    batch_of,
    flipped,
    spoiled,
    valid_ask,
    warped,
    written,
)
from tests.fuzz.cases import (
    ADMIN,
    ENTITIES,
    JSON,
    LEDGERS,
    OK,
    Expected,
    Request,
    answer,
    post,
    refusable,
    spending,
)
from tests.fuzz.messages import BATCH, CHECK, KEY, METHODS, ONE, chunked, message, oddly_dressed
from tests.service import ADMIN_KEY

DECIDED: Final = frozenset({200, 403, 429})

# Asks


def ask_on_a_ledger(chance: Random, _: int) -> Request:
    ask, spends = spending(chance)
    return Request(
        "ask", post(ONE, written(chance, ask), *oddly_dressed(chance)), Expected("POST", OK, spends)
    )


def batch_on_ledgers(chance: Random, _: int) -> Request:
    asks, spends = [], dict.fromkeys(LEDGERS, 0)
    for _asked in range(chance.choice((1, 2, 5, 20))):
        ask, spent = spending(chance)
        asks.append(ask)
        for ledger, tokens in spent.items():
            spends[ledger] += tokens
    return Request("batch", post(BATCH, written(chance, {"asks": asks})), Expected("POST", OK, spends))


def ask_of_anybody(chance: Random, number: int) -> Request:
    ask = valid_ask(chance, a_name(chance, number), ids=chance.random() < 0.2)
    return Request("ask", post(ONE, written(chance, ask), *oddly_dressed(chance)), Expected("POST", OK))


def ask_with_repeated_keys(chance: Random, _: int) -> Request:
    """The last value of a key counts; earlier ones may be invalid."""
    ask, spends = spending(chance)
    wrong = chance.choice(('"x"', "null", "[1]", "{}", "-1", "1e999", '"admit"'))
    field_ = chance.choice(("principal", "usage", "mode"))
    last = {"mode": "admit"} | ask
    text = f'{{"{field_}": {wrong}, {json.dumps(last)[1:]}'
    return Request("repeated keys", post(ONE, text.encode()), Expected("POST", OK, spends))


def account(chance: Random, number: int) -> Request:
    """A mode that needs an API key, with the key or without."""
    ask = valid_ask(chance, f"refused-{number}", ids=False)
    ask |= chance.choice(({"mode": "record"}, {"mode": "refund"}, {"mode": "admit", "cluster_action": True}))
    ask.pop("id", None)
    if chance.random() < 0.5:
        return Request("account", post(ONE, written(chance, ask)), answer("POST", 401))
    ask["principal"] = chance.choice(POOL)
    return Request("account", post(ONE, written(chance, ask), ADMIN), Expected("POST", OK))


def spoiled_ask(chance: Random, number: int) -> Request:
    body, statuses = spoiled(chance, refusable(number))
    return Request("spoiled ask", post(ONE, body, *oddly_dressed(chance)), Expected("POST", statuses))


def spoiled_batch(chance: Random, number: int) -> Request:
    before = [json.dumps(refusable(number)).encode()] * chance.choice((0, 1, 5))
    body, statuses = spoiled(chance, refusable(number))
    if not body.strip() or body.lstrip()[:1] in b"[,":  # as part of a list, it makes a different list
        statuses = frozenset({400, 422})
    return Request("spoiled batch", post(BATCH, batch_of(body, before)), Expected("POST", statuses))


def batch_of_a_wrong_size(chance: Random, number: int) -> Request:
    ask = json.dumps({"principal": f"refused-{number}", "usage": {"requests": 1}}).encode()
    many = {
        "none": b'{"asks":[]}',
        "1,001": batch_of(ask, [ask] * 1_000),
        "many ids": json.dumps(
            {"asks": [{"principal": "refused", "usage": {"producer_ids": list(range(1_000))}}] * 11}
        ).encode(),
        "no list": b'{"asks":' + ask + b"}",
    }
    return Request("spoiled batch", post(BATCH, many[chance.choice(list(many))]), answer("POST", 422))


def flipped_body(chance: Random, number: int) -> Request:
    ask = valid_ask(chance, f"flipped-{number % 500}", ids=True)
    path, body = chance.choice(((ONE, ask), (BATCH, {"asks": [ask, ask]})))
    return Request("flipped body", post(path, flipped(chance, written(chance, body))), _BENT_ASK)


def warped_body(chance: Random, number: int) -> Request:
    ask = valid_ask(chance, f"flipped-{number % 500}", ids=True)
    path, body = chance.choice(((ONE, ask), (BATCH, {"asks": [ask, ask]})))
    return Request("warped body", post(path, written(chance, warped(chance, body))), _BENT_ASK)


def random_body(chance: Random, _: int) -> Request:
    body = chance.randbytes(chance.choice((1, 2, 10, 100, 5_000)))
    return Request("random body", post(chance.choice((ONE, BATCH)), body), answer("POST", 400, 422))


def oversized_body(chance: Random, number: int) -> Request:
    body = json.dumps(refusable(number)).encode().ljust(TOO_LARGE)
    if chance.random() < 0.5:
        return Request("oversized body", post(chance.choice((ONE, BATCH)), body), answer("POST", 413))
    head = message("POST", ONE, ["Transfer-Encoding: chunked"])
    chunks = b"8000\r\n" + body[:0x8000] + b"\r\n"
    return Request("oversized body", head + chunks * 33 + b"0\r\n\r\n", answer("POST", 413))


def chunked_ask(chance: Random, _: int) -> Request:
    ask, spends = spending(chance)
    head = message("POST", ONE, [*oddly_dressed(chance), "Transfer-Encoding: chunked"])
    return Request("chunked", head + chunked(chance, written(chance, ask)), Expected("POST", OK, spends))


def ask_by_another_method(chance: Random, number: int) -> Request:
    method = chance.choice([method for method in METHODS if method != "POST"])
    body = json.dumps(refusable(number)).encode() if chance.random() < 0.5 else None
    return Request("methods", message(method, chance.choice((ONE, BATCH)), (), body), answer(method, 405))


def ask_with_a_bad_key(chance: Random, number: int) -> Request:
    keys = ("Basic YTpi", "Bearer", "Bearer ", f"Bearer {ADMIN_KEY}x", "Bearer \xff", "x" * 5_000, "")
    sent = [f"Authorization: {chance.choice(keys)}"] + [ADMIN] * chance.randint(0, 1)
    return Request("keys", post(ONE, json.dumps(refusable(number)).encode(), *sent), answer("POST", 401))


_BENT_ASK: Final = answer("POST", 200, 400, 401, 413, 422)


# The check


def check(chance: Random, number: int) -> Request:
    name = a_name(chance, number).encode()
    query = chance.choice(
        ("", "?", "?requests=1", "?mutations=0&listener=%20a", "?produce_bytes=1e3&deny_status=403")
    )
    headers = [b"X-Quotagate-Principal: " + name, *oddly_dressed(chance)]
    if chance.random() < 0.3:
        headers.append("X-Quotagate-IP: 10.0.0.7")
    method = chance.choice(METHODS)
    body = chance.randbytes(chance.choice((1, 100, 70_000))) if chance.random() < 0.1 else None
    return Request("check", message(method, CHECK + query, headers, body), Expected(method, DECIDED))


def spoiled_check(chance: Random, number: int) -> Request:
    who: list[str | bytes] = [f"X-Quotagate-Principal: refused-{number}"]
    query = "?requests=1"
    match chance.randrange(4):
        case 0:
            query = f"?{chance.choice(_NO_QUERIES)}"
        case 1:
            who.append("x-quotagate-principal: somebody")
        case 2:
            who = [b"X-Quotagate-Principal: refused" + chance.choice((b"\xff", b"\xc0\x80", b"\xc2\x80"))]
        case _:
            who.append("X-Quotagate-IP: " + chance.choice(("host", "1.2.3.4, 5.6.7.8", "::g", "1" * 5_000)))
    return Request("spoiled check", message("GET", CHECK + query, who), answer("GET", 400))


_NO_QUERIES: Final = (
    *("requests=x", "requests=1.0", "requests=-1", "requests=" + "9" * 5_000, "requests=1&requests=1"),
    *("produce_bytes=1e999", "mutations=%zz", "producer_ids=1", "deny_status=500", "at_ms=1", "listener="),
    *("broker=%00", "listener=%ff", "=", "x=1", "%00=1", "a&b&c"),
)


def bent_query(chance: Random, _: int) -> Request:
    """A query that may be valid or not."""
    query = "".join(chance.choice(_QUERY) for _ in range(chance.choice((1, 3, 8, 30))))
    sent = message("GET", f"{CHECK}?{query}", ["X-Quotagate-Principal: flipped"])
    return Request("bent query", sent, answer("GET", 200, 400, 403, 429))


_QUERY: Final = (
    *(
        "requests",
        "mutations",
        "produce_bytes",
        "broker",
        "listener",
        "deny_status",
        "=",
        "=",
        "=",
        "&",
        "&",
        "&",
    ),
    *(
        "1",
        "0",
        "9" * 20,
        "1e5",
        "-",
        "+",
        ".",
        "%",
        "%2",
        "%20",
        "%00",
        "%ff",
        "%C3%BC",
        "403",
        "429",
        "?",
        "/",
        ";",
    ),
)


# Administration


def administration(chance: Random, _: int) -> Request:
    entity, method = chance.choice(ENTITIES), chance.choice(("GET", "GET", "HEAD", "PUT", "PATCH", "DELETE"))
    body = {"PUT": QUOTAS, "PATCH": PATCHES}.get(method)
    text = None if body is None else written(chance, chance.choice(body))
    sent = message(method, f"/v1/quotas/{entity}", [ADMIN, JSON] if text else [ADMIN], text)
    return Request("quotas", sent, Expected(method, frozenset({200, 201, 204, 404}), changes=True))


def spoiled_quotas(chance: Random, _: int) -> Request:
    method, status, entity, type_ = chance.choice(("PUT", "PATCH")), 422, chance.choice(ENTITIES), JSON
    conditions: list[str] = []
    text = json.dumps(chance.choice(QUOTAS)).encode()
    match chance.randrange(5):
        case 0:
            text = chance.choice(_NO_QUOTAS)
        case 1:
            text, status = chance.choice((*_NOT_JSON, text[:-1])), 400
        case 2:
            type_, status = (
                chance.choice(("Content-Type: text/json", "Content-Type:", "X-Type: application/json")),
                415,
            )
        case 3:
            conditions, status = (
                [chance.choice(('If-Match: "999999999"', 'If-Match: W/"1"', "If-Match: x"))],
                412,
            )
        case _:
            entity = chance.choice(_NO_ENTITIES)
    sent = message(method, f"/v1/quotas/{entity}", [ADMIN, type_, *conditions], text)
    return Request("spoiled quotas", sent, Expected(method, frozenset({status}), changes=True))


_NO_QUOTAS: Final = (
    *(json.dumps(quotas).encode() for quotas in NO_QUOTAS),
    *(b'{"request_rate":1,"request_rate":2}', b'{"request_rate":1e999}', b"[]", b"1", b'""', b"null"),
)
_NOT_JSON: Final = (
    *(
        b'{"request_rate":NaN}',
        b'{"\\ud800":1}',
        b'{"request_rate":01}',
        b"\xff",
        b"",
        b"{}{}",
        b"[" * 100_000,
    ),
)
_NO_ENTITIES: Final = (
    *("users=a", "user=", "user=%00", "user=%ff", "user=%", "user=a,", "user=a,ip=1.1.1.1", "user=a,user=b"),
    *("ip=host", "user=" + "x" * 513, "a", "%", "broker=1,listener=*"),
)


def warped_quotas(chance: Random, _: int) -> Request:
    method = chance.choice(("PUT", "PATCH"))
    text = written(chance, warped(chance, chance.choice((*QUOTAS, *PATCHES))))
    if chance.random() < 0.3:
        text = flipped(chance, text)
    headers: list[str | bytes] = [ADMIN, JSON]
    if chance.random() < 0.3:
        marks = ('"1"', 'W/"1"', "*", "1", '"', '""', '"1", "2"', '"' + "9" * 5_000 + '"', "\u00fc")
        headers.append(chance.choice(("If-Match: ", "If-None-Match: ")) + chance.choice(marks))
    if chance.random() < 0.3:
        headers.append(b"X-Reason: " + chance.choice((b"\xff", b"launch", "ü".encode(), b"\t", b"x" * 5_000)))
    sent = message(method, f"/v1/quotas/{chance.choice(ENTITIES)}", headers, text)
    return Request("warped quotas", sent, Expected(method, changes=True))


def bent_lists(chance: Random, _: int) -> Request:
    """An admin request with a query that may be valid or not."""
    path = chance.choice(
        ("/v1/quotas", "/v1/quotas:effective", "/v1/quotas:history", "/v1/buckets", "/v1/keys")
    )
    query = "".join(chance.choice(_LISTED) for _ in range(chance.choice((0, 1, 3, 5, 20))))
    return Request("bent lists", message("GET", f"{path}?{query}", [ADMIN]), Expected("GET"))


_LISTED: Final = (
    *(
        "match=",
        "match=user",
        "match=user=*",
        "match=user=fuzz-1",
        "match=client-id",
        "match=ip=",
        "strict=true",
    ),
    *("limit=", "limit=1", "limit=1000", "limit=1001", "cursor=", "entity=user=fuzz-1", "entity=", "bucket="),
    *(
        "bucket=user=fuzz-1",
        "quota=request_rate",
        "principal=fuzz-1",
        "client_id=",
        "ip=10.0.0.7",
        "broker=1",
    ),
    *(
        "&",
        "&",
        "&",
        "&",
        "&",
        "&",
        "&",
        "=",
        "%",
        "%00",
        "%ff",
        "%2A",
        "*",
        ",",
        ";",
        "x",
        "0",
        "-1",
        "1e9",
        "9" * 30,
    ),
)


def warped_administration(chance: Random, _: int) -> Request:
    """An admin request with a body that may be valid or not."""
    path = chance.choice(list(_POSTED))
    text = written(chance, warped(chance, chance.choice(_POSTED[path])))
    if chance.random() < 0.2:
        text = flipped(chance, text)
    return Request("warped administration", post(path, text, ADMIN, JSON), Expected("POST", changes=True))


_POSTED: Final[Mapping[str, Sequence[Json]]] = {
    "/v1/quotas:alter": [
        {"alterations": [{"entity": entity, "quotas": dict(quotas)}], "validate_only": only}
        for entity, quotas, only in zip(ENTITIES, (*QUOTAS, *PATCHES), [True, False] * 5, strict=False)
    ],
    "/v1/buckets:reset": [{"bucket": ENTITIES[0]}, {"bucket": ENTITIES[1], "quota": "request_rate"}],
    "/v1/keys": [
        {"name": f"fuzz-{n}", "scopes": ["decide", "read"], "bound_to": ["user=fuzz-*"], "expires_ms": 2**42}
        for n in range(5)
    ],
}


def quotas_without_a_key(chance: Random, _: int) -> Request:
    method = chance.choice(("GET", "PUT", "PATCH", "DELETE", "POST"))
    text = json.dumps(chance.choice(QUOTAS)).encode()
    headers = chance.choice(([], [KEY + "guess"], [KEY], ["X-Api-Key: " + ADMIN_KEY], [ADMIN, ADMIN]))
    entity = chance.choice(("user=*", "user=canary-0", "user=ledger-0", *ENTITIES))
    return Request("keys", message(method, f"/v1/quotas/{entity}", headers, text), answer(method, 401))


# Everything else


def other_paths(chance: Random, _: int) -> Request:
    open_ = {"/health/live": (200,), "/health/ready": (200,), "/docs": (200,), "/redoc": (200,)}
    rare = {"/metrics": (200,), "/openapi.json": (200,)}
    known = rare if chance.random() < 0.03 else open_
    match chance.randrange(3):
        case 0:
            path = chance.choice(list(known))
            method = chance.choice(("GET", "GET", "HEAD"))
            return Request("paths", message(method, path), answer(method, *known[path]))
        case 1:
            method = chance.choice([method for method in METHODS if method not in ("GET", "HEAD")])
            return Request("methods", message(method, chance.choice(list(known))), answer(method, 405))
        case _:
            path = "/" + "/".join(chance.choice(_SEGMENTS) for _ in range(chance.randint(1, 5)))
            path = "/v2" if path == "/" else path  # which is open
            method = chance.choice(METHODS)
            key, status = chance.choice((([], 401), ([ADMIN], 404)))
            return Request("paths", message(method, path, key), answer(method, status))


_SEGMENTS: Final = (
    "v2",
    "quotas",
    "..",
    ".",
    "",
    "%2e%2e",
    "%00",
    "a" * 2_000,
    "%F0%9F%92%A5",
    "~",
    "a;b=c",
    "@",
    "$&'()*+,=",
)


def many_headers(chance: Random, _: int) -> Request:
    ask, spends = spending(chance)
    headers = [f"X-{n}: {chance.randrange(10**9)}" for n in range(chance.choice((100, 300)))]
    return Request("many headers", post(ONE, written(chance, ask), *headers), Expected("POST", OK, spends))
