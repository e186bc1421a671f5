"""A signal is obeyed even if it arrives before the server handles signals."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.stores import running

SIGNAL_BEFORE_IT_RUNS = """
import os, signal, sys, uvicorn
run = uvicorn.Server.run
def signalled(self, *arguments, **keywords):
    os.kill(os.getpid(), signal.SIGTERM)
    return run(self, *arguments, **keywords)
uvicorn.Server.run = signalled
sys.argv = ["quotagate", "serve"]
from app.run.cli import main
main()
"""


def test_signal_before_the_server_runs_ends_it(tmp_path: Path):
    with running("valkey") as url, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        taken.close()
        settings = {"REDIS_URL": url, "HOME": str(tmp_path), "PORT": str(port)}
        env = os.environ | {f"QUOTAGATE_{name}": value for name, value in settings.items()}
        migrate = [sys.executable, "-m", "app.run.cli", "migrate"]
        subprocess.run(migrate, env=env, check=True, capture_output=True)
        serve = [sys.executable, "-c", SIGNAL_BEFORE_IT_RUNS]
        assert subprocess.run(serve, env=env, check=False, capture_output=True, timeout=60).returncode == 0
