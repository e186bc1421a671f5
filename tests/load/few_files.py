"""Our program where a shell's `ulimit -n 256` came before it, and the machine would allow more."""

from __future__ import annotations

import resource

from app.run.cli import main

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    main()
