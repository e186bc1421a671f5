"""The real program, with every connection handed over at once, so that every request goes through ASGI."""

from __future__ import annotations

from app.http.server import hot_protocol
from app.run import cli

if __name__ == "__main__":
    hot_protocol.HttpPort.__call__ = hot_protocol.HttpPort.general  # type: ignore[method-assign]
    cli.main()
