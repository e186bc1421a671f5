"""The real program, whose connections have no express lane: every request goes through ASGI."""

from __future__ import annotations

from typing import Any

from app.http.protocol import Protocol
from app.run import cli, serve


def without_lane(*arguments: Any, routes: object, outbox: object, **keywords: Any) -> Protocol:
    """Return a connection's protocol, without the hot routes that the lane would answer."""
    del routes, outbox
    return Protocol(*arguments, **keywords)


if __name__ == "__main__":
    serve.LaneProtocol = without_lane  # type: ignore[assignment, attr-defined]
    cli.main()
