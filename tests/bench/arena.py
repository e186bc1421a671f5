"""The programs of a benchmark: each with a store of its own, on fixed cores, and all but one idle."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Final, NamedTuple, Self

import pytest
import redis

from app.decision_log.batch import STREAM
from tests import service, stores
from tests.bench import generator
from tests.bench.generator import BUILT, Found, Load
from tests.bench.results import SHED
from tests.bench.works import (
    MANY,
    QUOTAS,
    SERVICES,
    THROTTLE,
    WITH_KNOWN_IDS,
    Log,
    Subject,
    Work,
    numbers,
    odd_requests,
    request,
)
from tests.load.holding import programs_of
from tests.programs import end
from tests.service import Service, eventually
from tests.tools import need

ROOT: Final = Path(__file__).parents[2]
PEERS: Final = Path(__file__).parent / "peers"
NODE: Final = PEERS / "node"
BEFORE: Final = "647336280a"
"""The commit of the service for works of `before`: the last one with a fast and a slow path."""
SEED: Final = 936
BATCH: Final = 100
ALTERED_AT_ONCE: Final = 100
INSTALL_WITHIN_S: Final = 300
READY_WITHIN_S: Final = 30

NGINX: Final = """\
worker_processes 1;
daemon off;
error_log stderr crit;
pid nginx.pid;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    keepalive_requests 1000000000;
    keepalive_timeout 75s;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi; scgi_temp_path scgi;
    limit_req_status 429;
    limit_req_log_level info;
    limit_req_zone $arg_principal zone=first:32m rate=1000000r/s;
    limit_req_zone $arg_principal zone=tight:32m rate=1r/m;
    server {{
        listen 127.0.0.1:{port};
        location /one {{ limit_req zone=first burst=1000000 nodelay; empty_gif; }}
        location /refused {{ limit_req zone=tight; empty_gif; }}
    }}
}}
"""


class Cores(NamedTuple):
    """The cores of the server under measurement, of its store, and of the generator."""

    server: frozenset[int]
    store: frozenset[int]
    generator: frozenset[int]

    def __str__(self) -> str:
        """The assignment of cores.

        >>> print(cores({0, 1}))
        server on core 1; store and generator on core 0
        """
        shown = {
            name: ", ".join(map(str, sorted(core_numbers))) for name, core_numbers in self._asdict().items()
        }
        if self.server == self.store:
            return (
                f"server, store and generator share core {shown['server']}: the server has no core of its own"
            )
        if self.store == self.generator:
            return f"server on core {shown['server']}; store and generator on core {shown['store']}"
        return "; ".join(f"{name} on core {core_text}" for name, core_text in shown.items())


def cores(available: set[int]) -> Cores:
    """Assign cores: the server has the last one for itself, because devices mostly interrupt the first."""
    *others, server = sorted(available)
    if not others:
        return Cores(*[frozenset({server})] * 3)
    return Cores(frozenset({server}), frozenset({others[0]}), frozenset({others[-1]}))


@contextmanager
def pinned(to: frozenset[int]) -> Iterator[None]:
    """Pin this thread to cores; programs that it starts meanwhile inherit that."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, to)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Subjected(NamedTuple):
    """One running program under measurement, with its store and its catalog if it has them."""

    address: tuple[str, int]
    pid: int
    store: stores.Server | None

    def programs(self) -> tuple[list[int], list[int]]:
        """The process ids of the program, and of its store."""
        return programs_of(self.pid), [self.store.pid] if self.store else []


class Variant(NamedTuple):
    """A program and its log setting, started once for all works that need it."""

    subject: Subject
    log: Log = "denied"

    @classmethod
    def of(cls, work: Work) -> Self:
        """The variant that a work needs."""
        return cls(work.subject, work.log)

    def __str__(self) -> str:
        """The name in results.

        >>> print(Variant("quotagate", "all"))
        quotagate/all
        """
        return f"{self.subject}/{self.log}"


class MissingError(Exception):
    """A peer cannot run here, for this reason."""


class Arena:
    """Starts programs when they are first needed, and runs works on them.

    Attributes:
        skipped: why a peer cannot run here, by subject.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.cores = cores(os.sched_getaffinity(0))
        self.skipped: dict[str, str] = {}
        self._running: dict[Variant, Subjected] = {}
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qg-bench-")))
        self._fresh = 0
        self._draw = Random(SEED)
        self._primed: set[tuple[int, str]] = set()

    def has(self, work: Work) -> bool:
        """Whether a work's program runs; start it if needed, or note why it cannot run here."""
        if work.subject in self.skipped:
            return False
        variant = Variant.of(work)
        if variant not in self._running:
            try:
                self._running[variant] = self._started(work)
            except MissingError as error:
                self.skipped[work.subject] = str(error)
                return False
        return True

    def address(self, subject: Subject) -> tuple[str, int]:
        """The address of a program that runs with the default log."""
        return self._running[Variant(subject)].address

    def run(
        self, work: Work, *, warm_s: float, seconds: float, connections: int, schedule: Sequence[int] = ()
    ) -> tuple[Found, int, int]:
        """Measure a work whose program runs.

        Returns:
            the generator's figures, and the processor times of the program and of its store in nanoseconds.
        """
        subject = self._running[Variant.of(work)]
        self._prime(work, subject)
        own, store_programs = subject.programs()
        found = self._generated(
            Load(
                address=subject.address,
                request=request(work),
                odd=odd_requests(work),
                odd_in=work.odd_in,
                sequence=numbers(work.callers, self._draw),
                schedule=schedule,
                connections=connections,
                warm_s=warm_s,
                seconds=seconds,
                fresh=self._fresh,
                expected=work.expected,
                local=work.local,
                programs=[*own, *store_programs],
            )
        )
        return found, sum(found.processor_ns[: len(own)]), sum(found.processor_ns[len(own) :])

    def ask_each(self, work: Work, each: Sequence[int]) -> None:
        """Ask once for each caller of a work whose program runs, by requests that are all due at once."""
        self._ask_each(self._running[Variant.of(work)], work, each)

    def store_bytes(self, kind: str) -> float:
        """Bytes that a new store needs for each of 100,000 principals that asked once."""
        with ExitStack() as stack:
            subject = self._quotagate(Variant("quotagate", "off"), stack)
            assert subject.store is not None
            with redis.Redis.from_url(subject.store.url) as client:
                before = client.info("memory")["used_memory"]
                self._ask_each(subject, batch_of("quotagate", kind), range(MANY))
                return float(client.info("memory")["used_memory"] - before) / MANY

    def resident_bytes(self) -> dict[str, int]:
        """The memory of each running program, without its store."""
        return {str(variant): _resident_bytes(subject) for variant, subject in self._running.items()}

    def resident_bytes_of(self, work: Work) -> int:
        """The memory of a work's program."""
        return _resident_bytes(self._running[Variant.of(work)])

    def versions(self) -> dict[str, str]:
        """The versions of the running programs that are not Python packages."""
        found: dict[str, str] = {"C compiler": _first_line("cc", "--version")}
        for (name, *_), subject in self._running.items():
            if subject.store is not None:
                with redis.Redis.from_url(subject.store.url) as client:
                    about = client.info("server")
                found["Valkey"] = str(about.get("valkey_version") or about["redis_version"])
            if name == "nginx":
                found["nginx"] = _first_line("nginx", "-v")
            if name == "node":
                found["Node"] = _first_line("node", "--version")
                packages = json.loads((NODE / "package.json").read_text(encoding="utf-8"))["dependencies"]
                found |= packages
        return found

    def _generated(self, load: Load) -> Found:
        with pinned(self.cores.generator):
            found = generator.run(load)
        self._fresh = found.fresh
        return found

    def _started(self, work: Work) -> Subjected:
        start: dict[Subject, Callable[[], Subjected]] = {
            "echo": lambda: self._asgi("tests.bench.peers.echo", None),
            "quotagate": lambda: self._quotagate(Variant.of(work), self._stack),
            "before": lambda: self._quotagate(Variant.of(work), self._stack),
            "fastapi": lambda: self._asgi("tests.bench.peers.fastapi_gcra", self._store(self._stack)),
            "node": self._node,
            "nginx": self._nginx,
        }
        return start[work.subject]()

    def _store(self, stack: ExitStack) -> stores.Server:
        with pinned(self.cores.store):
            return stack.enter_context(stores.server("valkey"))

    def _quotagate(self, variant: Variant, stack: ExitStack) -> Subjected:
        environment: dict[str, str] = {"QUOTAGATE_LOG": variant.log}
        if variant.subject == "before":
            environment["PYTHONPATH"] = str(checked_out(BEFORE))
        store = self._store(stack)
        with pinned(self.cores.server):
            node = stack.enter_context(
                service.running(store_url=store.url, environment=environment, program="app.run.cli")
            )
        set_quotas(node)
        return Subjected(node.address, node.pid, store)

    def _asgi(self, module: str, store: stores.Server | None) -> Subjected:
        with socket.create_server(("127.0.0.1", 0)) as listener, pinned(self.cores.server):
            fd = listener.fileno()
            command = [sys.executable, "-P", "-m", module, str(fd), *([store.url] if store else [])]
            process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, pass_fds=(fd,)
            )
            self._stack.callback(end, process)
            address = listener.getsockname()
        eventually(lambda: _answers(process, address))
        return Subjected(address, process.pid, store)

    def _node(self) -> Subjected:
        node = _found("node")
        _install_node_packages()
        store = self._store(self._stack)
        with pinned(self.cores.server):
            process = self._stack.enter_context(
                subprocess.Popen(
                    [node, "server.js", str(store.socket)],
                    cwd=NODE,
                    env={**os.environ, "NODE_ENV": "production"},
                    stdout=subprocess.PIPE,
                )
            )
        self._stack.callback(end, process)
        assert process.stdout is not None
        return Subjected(("127.0.0.1", int(process.stdout.readline())), process.pid, store)

    def _nginx(self) -> Subjected:
        program = _found("nginx")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = listener.getsockname()
        (self._folder / "nginx.conf").write_text(NGINX.format(port=address[1]), encoding="utf-8")
        with pinned(self.cores.server):
            process = self._stack.enter_context(
                subprocess.Popen([program, "-p", self._folder, "-c", "nginx.conf", "-e", "stderr"])
            )
        self._stack.callback(end, process)
        eventually(lambda: _answers(process, address))
        return Subjected(address, process.pid, None)

    def _prime(self, work: Work, subject: Subjected) -> None:
        """Prepare the state that a work expects: buckets, known ids, and an empty stream of the log."""
        if work.subject == "nginx" and work.asked.decision == THROTTLE:  # the first ask is admitted
            self._ask_each(subject, work, range(work.callers))
        if work.subject not in SERVICES:
            return
        assert subject.store is not None
        with redis.Redis.from_url(subject.store.url) as client:
            client.xtrim(STREAM, maxlen=0, approximate=False)
        if work.kind in WITH_KNOWN_IDS:
            self._prime_once(subject, batch_of(work.subject, "known id"))  # this uses up each caller's limit
        if work.asked.applied and work.kind not in {"known id", "refused id", "new id"}:
            # Buckets of rates have expired since the last round. At a steady rate of asks they would not.
            kind = "one quota" if work.kind == "check" else work.kind
            self._ask_each(subject, batch_of(work.subject, kind), range(work.callers))

    def _prime_once(self, subject: Subjected, work: Work) -> None:
        key = subject.pid, work.kind
        if key not in self._primed:
            self._primed.add(key)
            self._ask_each(subject, work, range(MANY))

    def _ask_each(self, subject: Subjected, work: Work, each: Sequence[int]) -> None:
        """Ask once for each principal, by requests that are all due at once."""
        found = self._generated(
            Load(
                address=subject.address,
                request=request(work),
                sequence=array("I", each),
                schedule=[0] * -(-len(each) // work.asks),
                connections=4,
                warm_s=0,
                seconds=0.001,
                fresh=self._fresh,
            )
        )
        silent = f"{found.unanswered} requests were not answered within 10 s, {found.lost} connections lost"
        assert found.unanswered == found.lost == 0, silent
        assert found.statuses.keys() <= {"200", SHED, *work.statuses}, found.statuses
        assert found.statuses.get(SHED, 0) <= found.answers / 10, found.statuses


def batch_of(subject: Subject, kind: str) -> Work:
    """Return asks of a kind in batches that make many buckets quickly."""
    return Work(subject=subject, kind=kind, batch=BATCH)


def checked_out(commit: str) -> Path:
    """A folder with the service at a commit."""
    folder = BUILT / f"before-{commit}"
    if not folder.exists():
        command = ["git", "archive", commit, "app", "migrations", "workers"]
        archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
        if archive.returncode:
            raise MissingError(archive.stderr.decode(errors="replace").strip())
        BUILT.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=BUILT))
        with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
            tar.extractall(partial, filter="data")
        partial.rename(folder)
    return folder


def set_quotas(node: Service) -> None:
    """Give a node the quotas of the benchmark."""
    alterations = [{"entity": entity, "quotas": quotas} for entity, quotas in QUOTAS.items()]
    for first in range(0, len(alterations), ALTERED_AT_ONCE):
        body = {"alterations": alterations[first : first + ALTERED_AT_ONCE]}
        answer = node.http.post("/v1/quotas:alter", json=body).raise_for_status()
        refused = [result for result in answer.json()["results"] if not result["ok"]]
        assert refused == []


def _found(program: str) -> Path:
    try:
        return need(program)
    except pytest.skip.Exception as reason:
        raise MissingError(str(reason)) from None


def _install_node_packages() -> None:
    """Install the packages of the lock file, if it has changed."""
    lock, installed = NODE / "package-lock.json", NODE / "node_modules" / ".package-lock.json"
    if installed.exists() and installed.stat().st_mtime >= lock.stat().st_mtime:
        return
    npm = _found("npm")
    ran = subprocess.run(
        [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"],
        cwd=NODE,
        capture_output=True,
        text=True,
        timeout=INSTALL_WITHIN_S,
        check=False,
    )
    if ran.returncode:
        raise MissingError(f"npm ci failed: {ran.stderr.strip().splitlines()[-1:]}")
    installed.touch()


def _resident_bytes(subject: Subjected) -> int:
    own, _ = subject.programs()
    pages = [Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1] for pid in own]
    return os.sysconf("SC_PAGE_SIZE") * sum(map(int, pages))


def _first_line(program: str, option: str) -> str:
    ran = subprocess.run(
        [need(program), option], check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return ran.stdout.partition("\n")[0]


def _answers(process: subprocess.Popen[bytes], address: tuple[str, int]) -> bool:
    """Whether a program answers requests, with any status."""
    assert process.poll() is None, f"it ended with {process.returncode}"
    connection = http.client.HTTPConnection(*address, timeout=READY_WITHIN_S)
    with closing(connection), suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/")
        return connection.getresponse().status > 0
    return False
