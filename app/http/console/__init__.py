"""The console: one static page at ``/console``, which asks the routes that everybody has."""

from __future__ import annotations

import json
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import Final

from fastapi import APIRouter
from starlette.responses import HTMLResponse

from app.domain.quota import KEYS

PATH: Final = "/console"
FOLDER: Final = files("app.http") / "console"


def page() -> tuple[str, str]:
    """The page, and the policy under which a browser shows it: its own style and script, no other host."""
    style = (FOLDER / "style.css").read_text()
    script = (FOLDER / "script.js").read_text().replace("{{keys}}", json.dumps(list(KEYS)))
    html = (FOLDER / "page.html").read_text().replace("{{style}}", style).replace("{{script}}", script)
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def router() -> APIRouter:
    """The route of the page, which holds nothing that is not known to everybody."""
    html, policy = page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    routes = APIRouter()

    @routes.get(PATH, include_in_schema=False)
    async def console() -> HTMLResponse:
        return HTMLResponse(html, headers=headers)

    return routes


def _hash(text: str) -> str:
    return "sha256-" + b64encode(sha256(text.encode()).digest()).decode()
