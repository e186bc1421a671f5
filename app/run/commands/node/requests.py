"""Requests to a running node over HTTP, with readable errors."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from app.node.errors import NodeRequestError
from app.redaction import url_without_secrets
from app.run.commands.node import target

if TYPE_CHECKING:
    import httpx

TIMEOUT_S: Final = 10.0


class NodeRefusalError(NodeRequestError):
    """The node answered with a problem; ``status`` is its HTTP status."""

    def __init__(self, status: int, *lines: str) -> None:
        self.status = status
        super().__init__(*lines)


class NodeAnswer(NamedTuple):
    """A successful answer: its JSON, which is empty if it has no body, and its headers."""

    body: dict[str, Any]
    headers: httpx.Headers


class Node:
    """A running node, and the key for requests to it."""

    def __init__(self, node: target.Target, http: httpx.Client) -> None:
        self._target = node
        self._http = http

    @property
    def url(self) -> str:
        """The URL of the node."""
        return self._target.url

    @property
    def name(self) -> str:
        """The URL of the node for messages, without user name, password and options."""
        return url_without_secrets(self._target.url)

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """Return the JSON at a path; parameters that are None are left out."""
        return self.ask("GET", path, query=query).body

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str | None] | None = None,
        timeout: float = TIMEOUT_S,
    ) -> NodeAnswer:
        """Send a request and return its successful answer.

        Raises:
            NodeRefusalError: the node refused the request.
            NodeRequestError: no answer, or not a node's.
        """
        import httpx  # `up`, `serve` and `migrate` start without it

        url = self._target.url + path
        if self._target.key and not self._target.key.isprintable():  # httpx would show it in its error
            raise NodeRequestError("the key has invalid characters")
        all_headers = {"Authorization": f"Bearer {self._target.key}"} if self._target.key else {}
        all_headers |= {name: value for name, value in (headers or {}).items() if value is not None}
        if body is not None:
            all_headers.setdefault("Content-Type", "application/json")
        params = {name: value for name, value in (query or {}).items() if value is not None}
        try:
            answer = self._http.request(
                method,
                url,
                json=body,
                params=params or None,
                headers=[(name.encode(), value.encode()) for name, value in all_headers.items()],
                timeout=timeout,
            )
        except (httpx.InvalidURL, UnicodeError):  # the error would show a part of the URL
            raise NodeRequestError(
                "the node's URL is invalid: write http://HOST:PORT, and percent-encode special characters"
            ) from None
        except httpx.HTTPError as error:
            raise NodeRequestError(f"{self.name}{path}: {error}") from None
        document = _document(answer, self.name + path)
        if not answer.is_success:
            raise NodeRefusalError(answer.status_code, *self._why(answer.status_code, document))
        return NodeAnswer(document, answer.headers)

    def _why(self, status: int, problem: Mapping[str, Any]) -> list[str]:
        lines = [f"{status} {problem.get('detail') or problem.get('title') or ''}".rstrip()]
        faults = problem.get("errors")
        lines += [
            f"  {fault.get('field')}: {fault.get('message')}"
            for fault in (faults if isinstance(faults, list) else ())
            if isinstance(fault, dict)
        ]
        if status in {401, 403} and self._target.key_from:
            lines.append(f"  The key is the one in {self._target.key_from}.")
        elif status == 401 and self._target.key is None:
            lines.append("  Give a key: --key, QUOTAGATE_KEY or a configuration file.")
        return lines


@contextmanager
def connected(url: str | None, key: str | None, config: Path | None) -> Iterator[Node]:
    """Connect to the node of a command's connection options.

    Proxies from the environment are ignored for a node on this machine: a proxy would look for it on the
    proxy's machine, and would see the key.
    """
    import httpx  # `up`, `serve` and `migrate` start without it

    node = target.find(url, key, config)
    # httpx reads SSL_CERT_FILE only with trust_env, which is off for this machine, so the context is made
    # here.
    tls = _tls(node.certificates) if node.certificates else httpx.create_ssl_context()
    try:
        http = httpx.Client(verify=tls, trust_env=not target.is_loopback(node.url))
    except (httpx.InvalidURL, ValueError):  # the error would show a proxy's password
        raise NodeRequestError(
            "a proxy of the environment has no valid URL: see HTTP_PROXY, HTTPS_PROXY and ALL_PROXY"
        ) from None
    with http:
        yield Node(node, http)


def _tls(certificates: target.Certificates) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=certificates.ca)
        if certificates.cert:
            context.load_cert_chain(certificates.cert, certificates.key)
    except OSError as error:  # no such file, or no certificate in it
        raise NodeRequestError(
            f"the certificates of the configuration file cannot be used: {error}"
        ) from None
    return context


def segment(text: str) -> str:
    """Return text as one segment of a path."""
    return quote(text, safe="")


def _document(answer: httpx.Response, url: str) -> dict[str, Any]:
    if answer.status_code == 204:
        return {}
    try:
        document = answer.json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise NodeRequestError(f"{url}: answered {answer.status_code} without JSON")
    return document
