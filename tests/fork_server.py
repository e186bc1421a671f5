"""Starts nodes as forks of programs that have imported their modules, instead of importing them each time.

The imports take most of the processor time of a start. A forked node is a child of the test, as if the test
had started it: signals, exit codes, descriptors and processor time are the same.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

PR_SET_CHILD_SUBREAPER: Final = 36
MOST_BYTES: Final = 1_000_000
"""Of a request: the arguments and the environment of a node."""
ABOVE: Final = 1_000
"""Descriptors that have arrived wait above this number until those of the server are closed."""
OF_A_START: Final = (
    *("PYTHON", "_PYTHON", "LD_", "MALLOC_", "GLIBC_", "LANG", "LC_", "TZ", "OPENSSL_"),
    *("FORCE_COLOR", "NO_COLOR", "TYPER_", "PYDANTIC_", "PSUTIL_", "PROMETHEUS_", "prometheus_"),
    *("OTEL_PROPAGATORS", "OTEL_PYTHON_CONTEXT"),
)
"""A start or an import reads variables that begin like this, so a fork cannot have others."""
ENVIRONMENT: Final = dict(os.environ)
"""The environment of the programs that fork."""
PROGRAMS: Final = 2
"""They fork in turn, so two nodes in a row hash strings by different seeds, as started programs do."""


class Forked(subprocess.Popen[bytes]):
    """A forked node; it is a child of this process, so everything works as if it was started here."""

    def __init__(self, pid: int, arguments: Sequence[str]) -> None:
        self.pid, self.args = pid, arguments
        self.stdin = self.stdout = self.stderr = None
        self.returncode = None
        self._child_created = True
        self._sigint_wait_secs = 0.25
        self._waitpid_lock = threading.Lock()


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a fork is the same as a program that this thread would start in this environment."""
    return _of_a_start(environment) == _of_a_start(ENVIRONMENT) and _inherited() == INHERITED


def _of_a_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(OF_A_START)}


def _inherited() -> tuple[object, ...]:
    """What a program inherits from the thread that starts it, besides the environment and descriptors."""
    own = Path("/proc/thread-self")
    status = re.findall(
        rb"^(?:Umask|SigBlk|SigIgn|Cap.+|Cpus_allowed):.*", (own / "status").read_bytes(), re.MULTILINE
    )
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    return status, (own / "limits").read_bytes(), (own / "ns/net").readlink(), niceness


INHERITED: Final = _inherited()
"""Inherited by the programs that fork, and by their forks."""


def start(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path,
    descriptors: Mapping[int, int],
) -> Forked:
    """Start `quotagate` with arguments, in a folder.

    Args:
        descriptors: the descriptors of the node by their numbers in it; standard input is empty.
    """
    with _lock:
        server = _servers.popleft() if len(_servers) == PROGRAMS else _Server()
        _servers.append(server)
        return server.start(arguments, environment, folder, descriptors)


class _Server:
    """A program that forks, as its parent sees it."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._control, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
        with theirs:
            self._program = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.fork_server", str(theirs.fileno())],
                env=ENVIRONMENT,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        atexit.register(self._end)

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        descriptors: Mapping[int, int],
    ) -> Forked:
        request = json.dumps([arguments, dict(environment), str(folder), list(descriptors)]).encode()
        # The node's parent ends at once, so the node becomes our child. Other orphans stay those of init.
        _adopt(orphans=True)
        try:
            socket.send_fds(self._control, [request], list(descriptors.values()))
            answer = self._control.recv(100)
            assert answer, "the program that forks has ended; its standard error says why"
        except BaseException:  # such as the end of a test's time; the answer would be taken for the next
            self._end()
            raise
        finally:
            _adopt(orphans=False)
        return Forked(int(answer), ["quotagate", *arguments])

    def _end(self) -> None:
        if os.getpid() != self._owner:  # a fork of a test, which is at its end
            return
        with suppress(ValueError):  # it has ended before
            _servers.remove(self)
        self._program.kill()
        self._program.wait()
        self._control.close()


_servers: Final[deque[_Server]] = deque()
_lock: Final = threading.Lock()
"""Held during a start, because the adoption of orphans is one for this whole process."""


def _adopt(*, orphans: bool) -> None:
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0) == 0


# The program that forks


def _import_nodes() -> None:
    """Import the modules that every node loads."""
    import aiosqlite  # noqa: F401, PLC0415
    import uvicorn.protocols.http.httptools_impl  # noqa: F401, PLC0415
    import uvloop  # noqa: F401, PLC0415

    from app.run import cli, serve, wiring  # noqa: F401, PLC0415


def _serve(control: socket.socket) -> list[str] | None:
    """Fork for each request; return the arguments in the fork, and None in this program at its end."""
    while True:
        sent, came, _, _ = socket.recv_fds(control, MOST_BYTES, 8)
        if not sent:
            return None
        readable, writable = os.pipe()
        between = os.fork()
        if between == 0:
            if pid := os.fork():
                os.write(writable, str(pid).encode())
                os._exit(0)
            os.close(readable)
            os.close(writable)
            arguments, environment, folder, numbers = json.loads(sent)
            control.close()
            _become(environment, folder, dict(zip(numbers, came, strict=True)))
            return list(arguments)
        os.waitpid(between, 0)  # from now on the node is a child of our parent
        control.send(os.read(readable, 100))
        for each in (readable, writable, *came):
            os.close(each)


def _become(environment: Mapping[str, str], folder: str, descriptors: Mapping[int, int]) -> None:
    """Take over what a program inherits when it starts."""
    above = {number: fcntl.fcntl(came, fcntl.F_DUPFD_CLOEXEC, ABOVE) for number, came in descriptors.items()}
    for came in descriptors.values():
        os.close(came)
    for number, waiting in above.items():
        os.dup2(waiting, number)
        os.close(waiting)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)


def main(number: int) -> None:
    """Fork nodes until the other end of a socket is closed."""
    from app.run import cli  # noqa: PLC0415  the parent needs none of it

    _import_nodes()
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"a fork would lose {threads - 1} threads"
    gc.collect()
    gc.freeze()
    arguments = _serve(socket.socket(fileno=number))
    if arguments is not None:
        sys.argv = [str(Path(cli.__file__)), *arguments]
        cli.main()


if __name__ == "__main__":
    main(int(sys.argv[1]))
