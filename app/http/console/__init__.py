"""The console: one static page at ``/console`` that uses the public routes; ``/`` redirects to it."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Final

from starlette.types import Scope

from app.domain.quota import KEYS
from app.http.openapi.pages import HTML, OPENAPI, REDOC, SWAGGER, hash_of
from app.http.server.hot import HttpAnswer
from app.http.server.static import Redirect, StaticPage

ENTRANCE: Final = "/"
PATH: Final = "/console"
FOLDER: Final = files("app.http") / "console"
SCRIPTS: Final = (
    *("script.js", "curves.js", "overview.js", "quotas.js", "buckets.js", "keys.js", "reports.js"),
    "start.js",
)
"""One script of the page, in this order."""


def kept() -> StaticPage:
    """Return the page as static content; its policy allows its own style and script, and no other host."""
    uplot = _text("uplot/uPlot.iife.min.js")
    style = _text("uplot/uPlot.min.css") + _text("style.css")
    script = "\n".join(map(_text, SCRIPTS)).replace("{{keys}}", json.dumps(list(KEYS)))
    html = _text("page.html")
    for name, content in (("style", style), ("uplot", uplot), ("script", script)):
        html = html.replace(f"{{{{{name}}}}}", content)
    policy = (
        f"default-src 'none'; style-src {hash_of(style)}; script-src {hash_of(uplot)} {hash_of(script)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        # No other page, not even of this host, gets a handle on this window and the key typed into it.
        "Cross-Origin-Opener-Policy": "noopener-allow-popups",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
    return StaticPage(html.encode(), HTML, headers)


def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


class Entrance(StaticPage):
    """Redirects browsers to the console, and lists the paths for other clients; all of them are relative."""

    def __init__(self) -> None:
        there, document, swagger, redoc = (path.lstrip("/") for path in (PATH, OPENAPI, SWAGGER, REDOC))
        places = {"console": there, "openapi": document, "docs": [swagger, redoc], "ready": "health/ready"}
        super().__init__(json.dumps(places).encode(), "application/json", {"Vary": "Accept"})
        self._redirect = Redirect(there, {"Vary": "Accept"})

    def answer(self, scope: Scope) -> HttpAnswer:
        """Return a redirect to clients that accept HTML, else the paths as JSON."""
        takes = b",".join(value for name, value in scope["headers"] if name == b"accept")
        if b"text/html" not in takes.lower() or scope["method"] not in ("GET", "HEAD"):
            return super().answer(scope)
        return self._redirect.answer(scope)
