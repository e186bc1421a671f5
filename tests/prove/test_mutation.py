"""Cosmic Ray changes the domain and the admission in hundreds of places: do the tests notice?

A seeded sample of mutants meets the unit tests of its module. Survivors meet the unit tests of their package,
and those that survive again meet the wider tests. docs/proofs/mutation.md has the score. Faults in the Lua
scripts are planted by hand: `FAULTS` in tests/contract/test_machine.py and tests/contract/test_load.py.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Final

import pytest

from tests.proofs import print_table
from tests.report import say

ROOT: Final = Path(__file__).parents[2]
SEED: Final = int(os.environ.get("MUTATION_SEED", "936"))
MUTANTS: Final = int(os.environ.get("MUTANTS", "300"))
"""The size of the sample, divided between the packages by their numbers of mutants."""
NOTICED_AT_LEAST: Final = 0.9
"""Of 300 mutants 25 were equivalent to the original (docs/proofs/mutation.md): about 0.92 is the most."""
UNCHANGED_WITHIN_S: Final = 1_800.0
"""The timeout of the tests without a mutant."""
TIMES_LONGER: Final = 8.0
LEAST_WITHIN_S: Final = 20.0
"""The least timeout of the tests of a mutant; else it is `TIMES_LONGER` times their usual time."""
CONFIGURATION: Final = "mutation.toml"
SESSION: Final = "session.sqlite"
"""All mutants of a package, without results."""
STAGE: Final = "stage.sqlite"
"""The mutants of one stage, with their results."""
OPTIONS: Final = (
    "-x -q -p no:cacheprovider --hypothesis-profile first-failure --deselect tests/http/test_schemathesis.py"
)
UNLIKELY: Final = re.compile(
    r"core/ReplaceBinaryOperator_BitOr_"  # in annotations, where it changes nothing
    r"|core/ReplaceBinaryOperator_\w+_(?:RShift|LShift|Pow|BitXor|BitOr|BitAnd|Mod)$"  # noticed by everything
    r"|core/ReplaceComparisonOperator_(?:Eq|NotEq|Lt|LtE|Gt|GtE)_(?:Is|IsNot)$"  # likewise
)
"""Operators that are left out, as they say nothing about the tests."""
QUICK: Final = {
    "app/domain": "tests/unit/domain app/domain",
    "app/admission": "tests/unit/admission app/admission",
}
"""By package, the quick tests that run on each mutant."""
WIDER: Final = {
    "app/domain": "tests/contract/test_machine.py::test_store_and_oracle_agree[valkey] tests/bounds"
    " tests/contract/test_load.py::test_load_equals_the_oracle[valkey-1] tests/system/test_vectors.py"
    " tests/unit/kafka tests/unit/run tests/http/test_volumes.py tests/http/test_quotas.py",
    "app/admission": "tests/contract/test_budget.py tests/http tests/unit/decision_log tests/unit/http",
}
"""By package, the wider tests that run on a survivor of the quick ones."""

pytestmark = [pytest.mark.prove, pytest.mark.timeout(6 * 3600)]


@dataclass(frozen=True)
class Mutant:
    """A mutant: the place of the change, its operator, and the resulting line."""

    job: str
    place: str
    operator: str
    line: str


class Session:
    """The mutants of one package, in a copy of the repository."""

    def __init__(self, package: str, folder: Path) -> None:
        self._package = package
        self._folder = folder / package.replace("/", "-")
        copy_repository(self._folder)
        self._configure(QUICK[package])
        self._run("init", CONFIGURATION, SESSION)
        mutants = self._query(
            "SELECT job_id, operator_name FROM mutation_specs"
            " ORDER BY module_path, operator_name, operator_args, occurrence"
        )
        # in the order of their places: their ids are random in each session, so they give no seeded sample
        self._jobs = [job for job, operator in mutants if not UNLIKELY.match(operator)]

    def __len__(self) -> int:
        return len(self._jobs)

    def survivors(self, sample: int) -> tuple[list[Mutant], list[Mutant]]:
        """The mutants of a sample that survived the quick tests, and those that survived the wider ones."""
        chosen = set(random.Random(SEED).sample(self._jobs, sample))
        left: list[str] = []
        modules = self._query("SELECT module_path, job_id FROM mutation_specs ORDER BY 1")
        for module, rows in groupby(modules, itemgetter(0)):
            jobs = [job for _, job in rows if job in chosen]
            path = Path(module)
            own = Path("tests/unit", *path.parts[1:-1], f"test_{path.stem}.py").as_posix()
            if (self._folder / own).exists():
                jobs = [each.job for each in self._survivors_of(jobs, own)]
            left += jobs
        quick = self._survivors_of(left, QUICK[self._package])
        left = [each.job for each in quick]
        return quick, self._survivors_of(left, WIDER[self._package])

    def _survivors_of(self, jobs: Sequence[str], tests: str) -> list[Mutant]:
        if not jobs:
            return []
        self._configure(tests)
        began = time.monotonic()
        self._run("baseline", CONFIGURATION)
        self._configure(tests, within_s=max(LEAST_WITHIN_S, TIMES_LONGER * (time.monotonic() - began)))
        shutil.copy(self._folder / SESSION, self._folder / STAGE)
        marks = ",".join("?" * len(jobs))
        for table in ("mutation_specs", "work_items"):
            self._query(f"DELETE FROM {table} WHERE job_id NOT IN ({marks})", *jobs, file=STAGE)
        self._run("exec", CONFIGURATION, STAGE)
        rows = self._query(
            "SELECT job_id, module_path, start_pos_row, operator_name, diff FROM mutation_specs"
            " JOIN work_results USING (job_id) WHERE test_outcome = 'SURVIVED' ORDER BY 2, 3, 4",
            file=STAGE,
        )
        return [
            Mutant(job, f"{module}:{row}", operator.removeprefix("core/"), added(diff))
            for job, module, row, operator, diff in rows
        ]

    def _configure(self, tests: str, within_s: float = UNCHANGED_WITHIN_S) -> None:
        (self._folder / CONFIGURATION).write_text(
            f"""\
[cosmic-ray]
module-path = "{self._package}"
timeout = {within_s}
excluded-modules = []
test-command = "{sys.executable} -P -m pytest {OPTIONS} {tests}"
distributor.name = "local"
"""
        )

    def _run(self, *words: str) -> None:
        program = Path(sys.executable).with_name("cosmic-ray")
        ended = subprocess.run(
            [program, *words],
            cwd=self._folder,
            env=environment(self._folder),
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, f"{words}: {ended.stdout[-4_000:]}\n{ended.stderr[-4_000:]}"

    def _query(self, statement: str, *values: object, file: str = SESSION) -> list[tuple[str, ...]]:
        with closing(sqlite3.connect(self._folder / file)) as connection, connection:
            return connection.execute(statement, values).fetchall()


def copy_repository(folder: Path) -> None:
    """Copy the files that git tracks, so that no mutant is ever in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def environment(folder: Path) -> dict[str, str]:
    """The environment in which programs that a test starts import the copy, too."""
    return {
        **os.environ,
        "PYTHONPATH": str(folder),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / ".examples"),
    }


def added(diff: str) -> str:
    """The changed line of a mutant."""
    lines = [line[1:].strip() for line in diff.splitlines() if line.startswith("+") and line[1:2] != "+"]
    return " ".join(lines).replace("|", "\\|")


def test_tests_notice_nearly_all_mutants(tmp_path: Path):
    sessions = {package: Session(package, tmp_path) for package in QUICK}
    total = sum(map(len, sessions.values()))
    samples = {package: round(MUTANTS * len(session) / total) for package, session in sessions.items()}
    with ThreadPoolExecutor(len(sessions)) as threads:
        came = dict(
            zip(
                sessions,
                threads.map(lambda package: sessions[package].survivors(samples[package]), sessions),
                strict=True,
            )
        )
    rows = [
        (
            package,
            len(sessions[package]),
            samples[package],
            len(quick),
            len(wider),
            share(samples[package], wider),
        )
        for package, (quick, wider) in came.items()
    ]
    command = f"MUTATION_SEED={SEED} MUTANTS={MUTANTS} make prove T=tests/prove/test_mutation.py"
    columns = ("package", "mutants", "sampled", "survive its unit tests", "survive wider tests", "noticed")
    print_table("Score", command, columns, rows)
    left = [each for _, wider in came.values() for each in wider]
    survivors = [(f"`{each.place}`", each.operator, f"`{each.line}`") for each in left]
    print_table("Survivors of the last run", command, ("place", "operator", "line"), survivors)
    say(f"{sum(samples.values()) - len(left)} of {sum(samples.values())} mutants noticed")
    assert len(left) <= (1 - NOTICED_AT_LEAST) * sum(samples.values())


def share(sample: int, survivors: Sequence[Mutant]) -> str:
    """The part of a sample that was noticed."""
    return f"{(sample - len(survivors)) / sample:.1%}"
