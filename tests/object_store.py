"""An S3 store for the tests: as much of S3 as pyarrow uses, in memory, on a free port of loopback."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from tests.threaded import threaded

ENVIRONMENT: Final = {
    "AWS_ACCESS_KEY_ID": "tests",
    "AWS_SECRET_ACCESS_KEY": "tests",
    "AWS_EC2_METADATA_DISABLED": "true",
}
"""The environment of a program that uses the store; every signature is accepted."""

NAMESPACE: Final = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
LONG_AGO: Final = "2026-01-01T00:00:00.000Z"


class ObjectStore:
    """A store of one bucket; while ``away`` it answers every call with 503, as an overloaded one does."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.away = False
        self.refused = 0
        self.parts: dict[str, dict[int, bytes]] = {}
        self.port = 0
        self.lock = threading.Lock()

    def url(self, folder: str) -> str:
        """The URL of a folder in the store, for ``pyarrow.fs.FileSystem.from_uri``."""
        return f"s3://bucket/{folder}?endpoint_override=127.0.0.1:{self.port}&scheme=http&region=us-east-1"


@contextmanager
def running() -> Iterator[ObjectStore]:
    """A running store, empty at first."""
    store = ObjectStore()

    class Answers(_Answers):
        def __init__(self, *parts: Any) -> None:
            self.store = store
            super().__init__(*parts)

    with threaded(ThreadingHTTPServer(("127.0.0.1", 0), Answers)) as server:
        server.daemon_threads = True
        store.port = server.server_port
        yield store


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: ObjectStore

    def _asked(self) -> tuple[str, dict[str, str], bytes]:
        """The key, the query and the body; the key of the bucket itself is empty."""
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        _, _, key = unquote(parts.path).lstrip("/").partition("/")
        if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
            body = b"".join(self._pieces())
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "aws-chunked" in (self.headers.get("Content-Encoding") or ""):
            body = b"".join(_chunks(body))
        return key, query, body

    def _pieces(self) -> Iterator[bytes]:
        """The chunks of a body that comes without a length."""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # trailers

    def _do(self) -> None:
        key, query, body = self._asked()
        with self.store.lock:
            if self.store.away:
                self.store.refused += 1
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE)
            elif self.command in ("GET", "HEAD"):
                self._list(query) if not key and self.command == "GET" else self._give(key)
            elif self.command == "PUT":
                self._take(key, query, body)
            elif self.command == "POST":
                self._remove(body) if "delete" in query else self._put_together(key, query)
            else:
                self.store.objects.pop(key, None)
                self._answer(HTTPStatus.NO_CONTENT)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _do  # noqa: N815

    def _give(self, key: str) -> None:
        found = b"" if not key else self.store.objects.get(key)
        if found is None:
            self._answer(HTTPStatus.NOT_FOUND)
            return
        begin, _, end = (self.headers.get("Range") or "").removeprefix("bytes=").partition("-")
        if not begin:
            self._answer(HTTPStatus.OK, found)
            return
        last = min(int(end or len(found)), len(found) - 1)
        extent = f"bytes {begin}-{last}/{len(found)}"
        self._answer(HTTPStatus.PARTIAL_CONTENT, found[int(begin) : last + 1], {"Content-Range": extent})

    def _take(self, key: str, query: dict[str, str], body: bytes) -> None:
        source = self.headers.get("x-amz-copy-source")
        if "partNumber" in query:
            self.store.parts[query["uploadId"]][int(query["partNumber"])] = body
        elif source:
            _, _, copied = unquote(source).lstrip("/").partition("/")
            if copied not in self.store.objects:
                self._answer(HTTPStatus.NOT_FOUND)
                return
            self.store.objects[key] = body = self.store.objects[copied]
            said = f"<CopyObjectResult {NAMESPACE}><ETag>{_tag(body)}</ETag></CopyObjectResult>"
            self._answer(HTTPStatus.OK, said.encode())
            return
        else:
            self.store.objects[key] = body
        self._answer(HTTPStatus.OK, headers={"ETag": _tag(body)})

    def _put_together(self, key: str, query: dict[str, str]) -> None:
        """Begin or complete a multipart upload; it is visible once complete."""
        if "uploads" in query:
            upload = str(len(self.store.parts))
            self.store.parts[upload] = {}
            name = "InitiateMultipartUploadResult"
            said = f"<{name} {NAMESPACE}><Key>{escape(key)}</Key><UploadId>{upload}</UploadId></{name}>"
        else:
            parts = self.store.parts[query["uploadId"]]
            self.store.objects[key] = b"".join(parts[number] for number in sorted(parts))
            name = "CompleteMultipartUploadResult"
            said = f"<{name} {NAMESPACE}><Key>{escape(key)}</Key><ETag>done</ETag></{name}>"
        self._answer(HTTPStatus.OK, said.encode())

    def _remove(self, body: bytes) -> None:
        """Remove several objects."""
        for key in re.findall(r"<Key>(.*?)</Key>", body.decode(), re.DOTALL):
            self.store.objects.pop(unescape(key), None)
        self._answer(HTTPStatus.OK, f"<DeleteResult {NAMESPACE}></DeleteResult>".encode())

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        found, folders = [], set()
        for key, body in sorted(self.store.objects.items()):
            rest = key.removeprefix(prefix)
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.split(delimiter)[0] + delimiter)
                continue
            found.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{LONG_AGO}</LastModified>"
                f"<ETag>{_tag(body)}</ETag><Size>{len(body)}</Size></Contents>"
            )
        found += [f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in sorted(folders)]
        said = f"<ListBucketResult {NAMESPACE}><IsTruncated>false</IsTruncated>"
        self._answer(
            HTTPStatus.OK,
            f"{said}<KeyCount>{len(found)}</KeyCount>{''.join(found)}</ListBucketResult>".encode(),
        )

    def _answer(self, status: HTTPStatus, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", formatdate(0, usegmt=True))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def _tag(body: bytes) -> str:
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'


def _chunks(body: bytes) -> Iterator[bytes]:
    """The chunks of a body with a signature or checksum for each."""
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end].split(b";")[0], 16)
        if not size:
            return
        yield body[end + 2 : end + 2 + size]
        at = end + 2 + size + 2
