"""Commands refuse a malformed URL of a store or catalog, and accept one with an encoded password."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import psycopg
import pytest
import redis

from tests import postgres, stores
from tests.ports import HOST, free_port
from tests.service import eventually, running

PASSWORD: Final = "57#W/c@?:[9]%"
ENCODED: Final = "57%23W%2Fc%40%3F%3A%5B9%5D%25"
COMMANDS: Final = (
    "up",
    "serve",
    "workers",
    "migrate",
    "migrate --max-debt",
    "backfill load .",
    "generate log x",
)
WRONG: Final = {
    "REDIS_URL": [
        "redis://:57#Wc903z@127.0.0.1:6379/0",
        "redis://:57/Wc903z@127.0.0.1:6379/0",
        "redis://:Wc903z@127.0.0.1:Wc903z/0",
        "redis+sentinel://:57?Wc903z@one,two/primary",
    ],
    "DATABASE_URL": [
        "postgresql://quotagate:57/Wc903z@127.0.0.1/quotagate",
        "postgresql://quotagate:Wc903z@127.0.0.1:Wc903z/quotagate",
        "postgresql://quotagate:57@Wc903z@127.0.0.1/quotagate",
    ],
}


def run(home: Path, command: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("QUOTAGATE_")}
    own = {f"QUOTAGATE_{name}": value for name, value in settings.items()}
    return subprocess.run(
        [sys.executable, "-P", "-m", "app.run.cli", *command.split()],
        env={**bare, "QUOTAGATE_HOME": str(home), **own},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_starts_with_a_url_that_cannot_be_meant(command: str, tmp_path: Path) -> None:
    for name, urls in WRONG.items():
        for url in urls:
            ended = run(tmp_path, command, **{name: url})
            said = ended.stdout + ended.stderr
            assert ended.returncode == 1, said
            assert f"quotagate: QUOTAGATE_{name}: " in said
            assert "Traceback" not in said
            assert "Wc903z" not in said
            assert not [*tmp_path.iterdir()], "it has begun nothing"


@pytest.mark.parametrize("scheme", ["redis", "unix"])
def test_node_reaches_a_store_whose_password_is_encoded(scheme: str) -> None:
    port = free_port()
    with (
        stores.server("valkey", "--port", str(port), "--bind", HOST) as server,
        redis.Redis.from_url(server.url) as store,
    ):
        store.execute_command("ACL", "SETUSER", "node", "on", f">{PASSWORD}", "~*", "+@all")
        place = f"{HOST}:{port}/0" if scheme == "redis" else str(server.socket)
        with running(store_url=f"{scheme}://node:{ENCODED}@{place}") as node:
            assert node.http.get("/health/ready").json()["store"] == "ok"
            node.put("user=a", request_rate=10)
            assert node.ask(principal="a", usage={"requests": 1})["source"] == "store"


def refuses(url: str) -> bool:
    """Whether PostgreSQL refuses a password: it has read its rules again."""
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return True
    return False


def test_node_reaches_a_catalog_whose_password_is_encoded() -> None:
    database = postgres.started()
    try:
        name = psycopg.conninfo.conninfo_to_dict(database.database())["dbname"]
        with psycopg.connect(database.url("postgres"), autocommit=True) as admin:
            admin.execute(f"CREATE ROLE node LOGIN PASSWORD '{PASSWORD}'")
            admin.execute(f'ALTER DATABASE "{name}" OWNER TO node')
            rules = database.home / "state" / "pg_hba.conf"
            rules.write_text(f"local all node scram-sha-256\n{rules.read_text()}", encoding="utf-8")
            admin.execute("SELECT pg_reload_conf()")

            def url(password: str) -> str:
                return f"postgresql://node:{password}@/{name}?host={database.home}"

            eventually(lambda: refuses(url("Wc")))
            with running(database_url=url(ENCODED)) as node:
                node.put("user=a", request_rate=10)
                assert node.http.get("/v1/quotas/user=a").is_success
                assert ENCODED not in node.logged()
                assert PASSWORD not in node.logged()
    finally:
        database.remove()
