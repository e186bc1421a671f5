"""The console: one static page at ``/console``, over the routes that everybody has; ``/`` leads to it."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Final

from starlette.types import Scope

from app.domain.quota import KEYS
from app.http.decisions import Answer
from app.http.documents import HTML, OPENAPI, REDOC, SWAGGER, hash_of
from app.http.kept import Kept

ENTRANCE: Final = "/"
PATH: Final = "/console"
FOLDER: Final = files("app.http") / "console"


def page() -> tuple[str, str]:
    """The page, and the policy under which a browser shows it: its own style and script, no other host."""
    style = (FOLDER / "style.css").read_text()
    script = (FOLDER / "script.js").read_text().replace("{{keys}}", json.dumps(list(KEYS)))
    html = (FOLDER / "page.html").read_text().replace("{{style}}", style).replace("{{script}}", script)
    policy = (
        f"default-src 'none'; style-src {hash_of(style)}; script-src {hash_of(script)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def kept() -> Kept:
    """The page as bytes; it holds nothing that is not known to everybody."""
    html, policy = page()
    headers = {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        # No page holds on to this one as a window, of this host neither: what is typed here stays here.
        "Cross-Origin-Opener-Policy": "noopener-allow-popups",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
    return Kept(html.encode(), HTML, headers)


class Entrance(Kept):
    """Leads a browser to the console, and tells others what there is."""

    def __init__(self) -> None:
        places = {"console": PATH, "openapi": OPENAPI, "docs": [SWAGGER, REDOC], "ready": "/health/ready"}
        super().__init__(json.dumps(places).encode(), "application/json", {"Vary": "Accept"})

    def answer(self, scope: Scope) -> Answer:
        """A redirect for who takes HTML, else the places as JSON."""
        takes = b",".join(value for name, value in scope["headers"] if name == b"accept")
        if b"text/html" not in takes.lower() or scope["method"] not in ("GET", "HEAD"):
            return super().answer(scope)
        there = [(b"location", PATH.encode()), (b"vary", b"Accept"), (b"cache-control", b"no-cache")]
        return Answer(302, [*there, (b"content-length", b"0")], b"")
