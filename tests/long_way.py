"""The real program, whose connections have no express lane: every request goes through ASGI."""

from __future__ import annotations

from typing import Any

from app.http import lane
from app.http.protocol import Protocol
from app.run import cli


def without_lane(*arguments: Any, routes: object, outbox: object, **keywords: Any) -> Protocol:
    """Return a connection's protocol, without the hot routes that the lane would answer."""
    del routes, outbox
    return Protocol(*arguments, **keywords)


if __name__ == "__main__":
    lane.LaneProtocol = without_lane  # type: ignore[assignment,misc]
    cli.main()
