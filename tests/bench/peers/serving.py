"""How the ASGI peers are served: by uvicorn, with the settings of `quotagate serve`."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from typing import Any, Literal

import uvicorn


def serve(app: Callable[..., Any], *, lifespan: Literal["on", "off"] = "on") -> None:
    """Serve on the inherited listening socket whose number is the first argument."""
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            loop="uvloop",
            http="httptools",
            ws="none",
            lifespan=lifespan,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
        )
    )
    server.run(sockets=[socket.socket(fileno=int(sys.argv[1]))])
