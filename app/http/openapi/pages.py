"""Pages that show the OpenAPI document, with local scripts and a policy that allows no others.

The scripts are Swagger UI and Redoc from the package fastapi-offline, which is used for nothing else.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files
from typing import Final

from app.http.server.static import StaticPage

OPENAPI: Final = "/openapi.json"
SWAGGER: Final = "/docs"
REDOC: Final = "/redoc"

HTML: Final = "text/html; charset=utf-8"
FILES: Final[Mapping[str, tuple[str, str]]] = {
    "/docs/swagger-ui.css": ("swagger-ui.css", "text/css; charset=utf-8"),
    "/docs/swagger-ui-bundle.js": ("swagger-ui-bundle.js", "text/javascript; charset=utf-8"),
    "/redoc/redoc.standalone.js": ("redoc.standalone.js", "text/javascript; charset=utf-8"),
}

FOREIGN_PICTURE: Final = b"https://cdn.redoc.ly/redoc/logo-mini.svg"
"""Redoc's logo; the policy would block it, with an error in the browser's console."""

_HEAD: Final = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
"""
# A redirect, to a page of a proxy for instance, would take the key along.
_SWAGGER_SCRIPT: Final = (
    'SwaggerUIBundle({url: "openapi.json", dom_id: "#page", deepLinking: true, validatorUrl: null, '
    'requestInterceptor: (request) => Object.assign(request, {redirect: "error"})})'
)
_REDOC_SCRIPT: Final = (
    'Redoc.init("openapi.json", {disableSearch: true, hideDownloadButton: false}, '
    'document.getElementById("page"))'
)
_REDOC_STYLE: Final = "body{margin:0}"
_REDOC_SCROLLBARS: Final = "'sha256-QMIg+bpjm3JdElJ388KYke01izlUW0UoNOeKjpMxdgc='"
"""The hash of a style in Redoc's script; a browser reports the new one if a version changes it."""


def pages() -> dict[str, StaticPage]:
    """Return both pages and the files that they load, by path."""
    found = {}
    for path, (name, media_type) in FILES.items():
        body = (files("fastapi_offline") / "static" / name).read_bytes().replace(FOREIGN_PICTURE, b"data:,")
        found[path] = StaticPage(body, media_type, {"Cross-Origin-Resource-Policy": "same-origin"})
    swagger = (
        f"{_HEAD}<title>Quotagate: the API, to try</title>\n"
        '<link rel="stylesheet" href="docs/swagger-ui.css">\n<div id="page"></div>\n'
        f'<script src="docs/swagger-ui-bundle.js"></script>\n<script>{_SWAGGER_SCRIPT}</script>\n</html>\n'
    )
    redoc = (
        f"{_HEAD}<title>Quotagate: the API, to read</title>\n<style>{_REDOC_STYLE}</style>\n"
        '<div id="page"></div>\n'
        f'<script src="redoc/redoc.standalone.js"></script>\n<script>{_REDOC_SCRIPT}</script>\n</html>\n'
    )
    found[SWAGGER] = StaticPage(swagger.encode(), HTML, _under(policy(_SWAGGER_SCRIPT)))
    # Redoc puts an empty style element into the page and fills it by script: hence the hash of nothing.
    styles = (hash_of(_REDOC_STYLE), hash_of(""), _REDOC_SCROLLBARS)
    found[REDOC] = StaticPage(redoc.encode(), HTML, _under(policy(_REDOC_SCRIPT, *styles)))
    return found


def policy(script: str, *styles: str) -> str:
    """Return a policy: a page runs scripts of this host and its own one, and connects to this host only.

    >>> "unsafe" in policy("start()"), "frame-ancestors 'none'" in policy("start()", hash_of(""))
    (False, True)
    """
    hashes = "".join(f" {style}" for style in styles)
    return (
        f"default-src 'none'; script-src 'self' {hash_of(script)}; style-src 'self'{hashes}; "
        "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def hash_of(text: str) -> str:
    """Return the source expression of a script or style that is part of the page."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _under(page_policy: str) -> dict[str, str]:
    return {
        "Content-Security-Policy": page_policy,
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
    }
