"""A real PgBouncer before a real PostgreSQL, on a unix socket of its own."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

import psycopg
from sqlalchemy import make_url

from tests.postgres import Postgres, without_root
from tests.programs import Program, end
from tests.service import eventually
from tests.tools import need

PORT: Final = 6432
START_S: Final = 60.0


class PgBouncer(Program):
    """A pooler of all databases of one server.

    Args:
        settings: options of the configuration; the default pools transactions in one session per database.
    """

    def __init__(self, server: Postgres, **settings: object) -> None:
        self.program = need("pgbouncer")
        self.home = Path(tempfile.mkdtemp(prefix="qg-pgb-"))
        self._as = without_root(self.home)
        self._server = server
        own: dict[str, Any] = {
            "listen_addr": "",
            "listen_port": PORT,
            "unix_socket_dir": self.home,
            "auth_type": "any",
            "admin_users": "pgbouncer",
            "pool_mode": "transaction",
            "default_pool_size": 1,
            "server_login_retry": 0.1,
            **settings,
        }
        lines = [f"{name} = {value}" for name, value in own.items()]
        text = "\n".join(["[databases]", f"* = host={server.home} user=postgres", "[pgbouncer]", *lines])
        (self.home / "pgbouncer.ini").write_text(text + "\n", encoding="utf-8")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.home, ignore_errors=True)

    def start(self) -> None:
        with (self.home / "log").open("ab") as log:
            self._running = subprocess.Popen(
                [self.program, self.home / "pgbouncer.ini"], cwd=self.home, stdout=log, stderr=log, **self._as
            )
        eventually(self._answers, within_s=START_S)

    def stop(self) -> None:
        """Stop the pooler at once, which closes all its connections."""
        end(self.running)

    def before(self, url: str) -> str:
        """The URL of a database of the server, through the pooler."""
        place = {"host": str(self.home), "port": str(PORT)}
        return make_url(url).update_query_dict(place).render_as_string(hide_password=False)

    def logged(self) -> str:
        return (self.home / "log").read_text(encoding="utf-8", errors="replace")

    def _answers(self) -> bool:
        assert self.running.poll() is None, f"it ended:\n{self.logged()}"
        url = f"postgresql://pgbouncer@/pgbouncer?host={self.home}&port={PORT}"
        with suppress(psycopg.OperationalError), psycopg.connect(url):
            return True
        return False
