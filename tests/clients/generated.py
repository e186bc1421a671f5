"""The generated clients: generated once for all tests, compiled, and their examples run against a node."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from clients.generate import QUICK_START
from tests.tools import need

ROOT: Final = Path(__file__).parents[2]
CLIENTS: Final = ROOT / "clients"
GENERATED: Final = CLIENTS / "generated"
EXAMPLES: Final = ROOT / "examples" / "clients"
NPM: Final = CLIENTS / "node_modules" / ".bin"
WITHIN_S: Final = 600
TOOLCHAIN: Final = "its toolchain is the machine's own"


def run(*command: str | Path, cwd: Path = ROOT, environment: Mapping[str, str] | None = None) -> str:
    """The output of a program, which must succeed."""
    ran = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert ran.returncode == 0, f"{' '.join(map(str, command))}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


def npm_tool(name: str) -> Path:
    """A program of `clients/package.json`, in the version of its lock file."""
    need("node", TOOLCHAIN)
    npm = need("npm", TOOLCHAIN)
    lock = CLIENTS / "package-lock.json"
    installed = CLIENTS / "node_modules" / ".package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        run(npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts", cwd=CLIENTS)
        installed.touch()
    return NPM / name


def python() -> list[str | Path]:
    """Import the client, and check with mypy what the example calls."""
    source = GENERATED / "python"
    example = EXAMPLES / "python" / "example.py"
    path = {"MYPYPATH": str(source), "PYTHONPATH": str(source)}
    quiet = ("--config-file", os.devnull, "--follow-imports", "silent", "--ignore-missing-imports")
    run(sys.executable, "-m", "mypy", *quiet, example, environment=path)
    return [sys.executable, example]


def typescript() -> list[str | Path]:
    """Compile the client in strict mode, together with the example."""
    run(npm_tool("tsc"), "-p", EXAMPLES / "typescript")
    return [
        need("node", TOOLCHAIN),
        GENERATED / "built" / "examples" / "clients" / "typescript" / "example.js",
    ]


def java() -> list[str | Path]:
    """Compile the client with Maven, and the example against it."""
    maven, compiler = need("mvn", TOOLCHAIN), need("javac", TOOLCHAIN)
    skipped = [f"-Dmaven.{part}.skip=true" for part in ("test", "javadoc", "source")]
    goals = ("package", "dependency:copy-dependencies", "-DincludeScope=runtime")
    run(
        maven,
        "--quiet",
        "--batch-mode",
        *skipped,
        *goals,
        cwd=GENERATED / "java",
        environment={"MAVEN_OPTS": QUICK_START},
    )
    target = GENERATED / "java" / "target"
    path = os.pathsep.join([str(target / "classes"), f"{target / 'dependency'}/*"])
    built = GENERATED / "java" / "example"
    run(compiler, f"-J{QUICK_START}", "-cp", path, "-d", built, EXAMPLES / "java" / "Example.java")
    return [need("java", TOOLCHAIN), "-cp", f"{path}{os.pathsep}{built}", "Example"]


def go() -> list[str | Path]:
    """Compile all of the client, and the example against it."""
    compiler = need("go", TOOLCHAIN)
    run(compiler, "build", "./...", cwd=GENERATED / "go")
    built = GENERATED / "go-example"
    run(compiler, "build", "-mod=mod", "-o", built, ".", cwd=EXAMPLES / "go")
    return [built]


def example(command: Sequence[str | Path], url: str, key: str) -> list[str]:
    """The lines that an example prints."""
    path = os.pathsep.join([str(GENERATED / "python"), str(CLIENTS / "python")])
    environment = {"QUOTAGATE_URL": url, "QUOTAGATE_KEY": key, "PYTHONPATH": path}
    return run(*command, environment=environment).splitlines()
