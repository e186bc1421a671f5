"""Asking a running node over HTTP, and saying readably why it refuses."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx

from app.run.commands import target
from app.run.commands.show import plain_lines
from app.run.errors import CannotAsk

TIMEOUT_S: Final = 10.0


class Refused(CannotAsk):
    """The node answered with a problem; ``status`` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class Node:
    """One running node, asked with one key."""

    def __init__(self, asked: target.Target, http: httpx.Client) -> None:
        self._target = asked
        self._http = http

    @property
    def url(self) -> str:
        """Where it is."""
        return self._target.url

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """The document at a path; parameters that are None are left out."""
        found: dict[str, Any] = self.ask("GET", path, query=query).json()
        return found

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str | None] | None = None,
        timeout: float = TIMEOUT_S,
    ) -> httpx.Response:
        """One answer that is a success: JSON, or nothing.

        Raises:
            Refused: the node says why not.
            CannotAsk: there is no node, or what answers is none.
        """
        url = self._target.url + path
        if self._target.key and not self._target.key.isprintable():  # an error would show all of it
            raise CannotAsk("the key holds characters that no key has")
        sent = {"Authorization": f"Bearer {self._target.key}"} if self._target.key else {}
        sent |= {name: value for name, value in (headers or {}).items() if value is not None}
        if body is not None:
            sent.setdefault("Content-Type", "application/json")
        asked = {name: value for name, value in (query or {}).items() if value is not None}
        try:
            answer = self._http.request(
                method,
                url,
                json=body,
                params=asked or None,
                headers=[(name.encode(), value.encode()) for name, value in sent.items()],
                timeout=timeout,
            )
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise CannotAsk(f"{url}: {error}") from None
        document = _document(answer, url)
        if not answer.is_success:
            raise Refused(answer.status_code, self._why(answer.status_code, document))
        return answer

    def _why(self, status: int, problem: Mapping[str, Any]) -> str:
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
        return plain_lines(lines)


@contextmanager
def connected(url: str | None, key: str | None, config: Path | None) -> Iterator[Node]:
    """The node that a command's connection options mean.

    The environment's proxies are for other machines: one that is asked for this machine would look for the
    node on its own, and would be sent the key.
    """
    asked = target.find(url, key, config)
    # Made here, as whom to trust may be said by the environment too (SSL_CERT_FILE).
    tls = _tls(asked.certificates) if asked.certificates else httpx.create_ssl_context()
    with httpx.Client(verify=tls, trust_env=not target.is_here(asked.url)) as http:
        yield Node(asked, http)


def _tls(certificates: target.Certificates) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=certificates.ca)
        if certificates.cert:
            context.load_cert_chain(certificates.cert, certificates.key)
    except OSError as error:  # there is no such file, or it holds none
        raise CannotAsk(f"the certificates of the configuration file cannot be used: {error}") from None
    return context


def segment(text: str) -> str:
    """Text as one segment of a path."""
    return quote(text, safe="")


def _document(answer: httpx.Response, url: str) -> dict[str, Any]:
    if answer.status_code == 204:
        return {}
    try:
        document = answer.json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise CannotAsk(f"{url}: answered {answer.status_code}, and not with JSON")
    return document
