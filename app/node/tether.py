"""Runs a command that ends when its parent does: `python tether.py PARENT_PID COMMAND...`.

It is a program and not a `preexec_fn`, which cannot safely run Python once its parent has threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel for SIGTERM at the parent's death, then become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":  # elsewhere a child outlives a parent that was killed with SIGKILL
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit("the parent died first")
    os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main()
