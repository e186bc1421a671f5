"""Runs our program as after `ulimit -n 256` in a shell, on a machine that allows more open files."""

from __future__ import annotations

import resource

from app.run.cli import main

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    main()
