"""A server that plays a script: each step is an answer, half an answer, or none."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple

from tests.threaded import threaded

ADMITTED: Final = {
    "decision": "admit",
    "throttle_ms": 0,
    "charged": True,
    "applied": 1,
    "source": "store",
    "limited_by": None,
}
BY: Final = {"quota": "request_rate", "entity": "user=*", "bucket": "user=alice"}
REFUSED: Final = {**ADMITTED, "charged": False, "limited_by": BY}


class Request(NamedTuple):
    """A request that the server received; ``port`` is the client's, and tells connections apart."""

    method: str
    path: str
    headers: dict[str, str]
    content: bytes
    port: int = 0

    @property
    def body(self) -> Any:
        return json.loads(self.content)


class Reply(NamedTuple):
    """An answer of the server."""

    status: int
    content: bytes
    type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


class Lost:
    """A step that reads the request and closes the connection without an answer."""


Step = Reply | Lost | Callable[[Request], Reply | Lost]
LOST: Final = Lost()


def answer(body: object, status: int = 200) -> Reply:
    """An answer with a JSON body."""
    return Reply(status, json.dumps(body).encode())


def overloaded(retry_after: str | None = "2") -> Reply:
    """The problem that an overloaded node answers with."""
    problem = {
        "type": "urn:quotagate:overloaded",
        "title": "Service Unavailable",
        "status": 503,
        "detail": "This node has more to do than it can answer in time.",
    }
    headers = () if retry_after is None else (("Retry-After", retry_after),)
    return Reply(503, json.dumps(problem).encode(), "application/problem+json", headers)


def throttled(ms: int) -> Reply:
    """An answer with the decision throttle."""
    return answer({**REFUSED, "decision": "throttle", "throttle_ms": ms})


def delayed(ms: int) -> Reply:
    """An answer with the decision delay."""
    return answer({**ADMITTED, "decision": "delay", "throttle_ms": ms, "limited_by": BY})


def every(request: Request) -> Reply:
    """Admit each ask of a batch; ``applied`` is the ask's principal, read as a number."""
    decisions = [{**ADMITTED, "applied": int(ask["principal"])} for ask in request.body["asks"]]
    return answer({"decisions": decisions})


@dataclass
class Script:
    """The steps that are left, and the requests that were received."""

    url: str
    steps: list[Step] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def plays(self, *steps: Step) -> None:
        self.steps = list(steps)


@contextlib.contextmanager
def serving() -> Iterator[Script]:
    """Run the server; it answers further requests with its last step."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = Request(self.command, self.path, dict(self.headers), content, self.client_address[1])
            script.requests.append(request)
            step = script.steps.pop(0) if len(script.steps) > 1 else script.steps[0]
            reply = step if isinstance(step, Reply | Lost) else step(request)
            if isinstance(reply, Lost):
                self.close_connection = True
                return
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.type)
            for name, value in reply.headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply.content)))
            self.end_headers()
            self.wfile.write(reply.content)

        do_GET = do_PUT = do_PATCH = do_DELETE = do_POST  # noqa: N815  the base class looks for these names

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True  # shutdown does not wait for a request on a connection that is kept alive

    with threaded(Server(("127.0.0.1", 0), Handler)) as server:
        script = Script(f"http://127.0.0.1:{server.server_port}")
        yield script
