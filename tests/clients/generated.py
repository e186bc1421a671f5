"""The generated clients: generated once for all tests, compiled, and their examples run against a node."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from clients.generate import QUICK_START
from tests.tools import need

ROOT: Final = Path(__file__).parents[2]
CLIENTS: Final = ROOT / "clients"
GENERATED: Final = CLIENTS / "generated"
EXAMPLES: Final = ROOT / "examples" / "clients"
OPERATIONS: Final = ROOT / "tests" / "clients" / "operations"
"""A program in each language that calls all operations."""
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


class Programs(NamedTuple):
    """The commands of one language: the example, and the program that calls all operations."""

    example: list[str | Path]
    operations: list[str | Path]


def python() -> Programs:
    """Import the client, and check the programs' calls with mypy."""
    source = GENERATED / "python"
    example, operations = EXAMPLES / "python" / "example.py", OPERATIONS / "operations.py"
    path = {"MYPYPATH": str(source), "PYTHONPATH": str(source)}
    quiet = ("--config-file", os.devnull, "--follow-imports", "silent", "--ignore-missing-imports")
    run(sys.executable, "-m", "mypy", *quiet, example, operations, environment=path)
    return Programs([sys.executable, example], [sys.executable, operations])


def typescript() -> Programs:
    """Compile the client in strict mode, together with the programs."""
    run(npm_tool("tsc"), "-p", OPERATIONS)
    node, built = need("node", TOOLCHAIN), GENERATED / "built"
    return Programs(
        [node, built / "examples" / "clients" / "typescript" / "example.js"],
        [node, built / "tests" / "clients" / "operations" / "operations.js"],
    )


def java() -> Programs:
    """Compile the client with Maven, and the programs against it."""
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
    built = GENERATED / "java" / "programs"
    sources = (EXAMPLES / "java" / "Example.java", OPERATIONS / "Operations.java")
    run(compiler, f"-J{QUICK_START}", "-cp", path, "-d", built, *sources)
    command: list[str | Path] = [need("java", TOOLCHAIN), "-cp", f"{path}{os.pathsep}{built}"]
    return Programs([*command, "Example"], [*command, "Operations"])


def go() -> Programs:
    """Compile all of the client, and the programs against it."""
    compiler = need("go", TOOLCHAIN)
    run(compiler, "build", "./...", cwd=GENERATED / "go")
    example, operations = GENERATED / "go-example", GENERATED / "go-operations"
    run(compiler, "build", "-mod=mod", "-o", example, ".", cwd=EXAMPLES / "go")
    run(compiler, "build", "-mod=mod", "-o", operations, ".", cwd=OPERATIONS / "go")
    return Programs([example], [operations])


def printed(command: Sequence[str | Path], url: str, key: str) -> list[str]:
    """The lines that a program prints."""
    path = os.pathsep.join([str(GENERATED / "python"), str(CLIENTS / "python")])
    environment = {"QUOTAGATE_URL": url, "QUOTAGATE_KEY": key, "PYTHONPATH": path}
    return run(*command, environment=environment).splitlines()
