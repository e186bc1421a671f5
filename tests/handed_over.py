"""The real program, each of whose connections is handed over at once: every request goes through ASGI."""

from __future__ import annotations

from app.http import hot_protocol
from app.run import cli

if __name__ == "__main__":
    hot_protocol.HttpPort.__call__ = hot_protocol.HttpPort.general  # type: ignore[method-assign]
    cli.main()
