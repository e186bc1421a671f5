"""Refuses retired words, class names with two meanings, and exceptions whose names do not end in Error.

Run by `make lint`. Prints each place, and exits with 1 if there is one. With `--all` it also prints
places that are not rewritten yet.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]

RETIRED: Final = re.compile(
    r"\b(?:(?i:told|tells? of|tells? apart|stands?|stood|standing|beside|hinders?|hindered|amid|whom|lest"
    r"|thereof|wherefrom|he|his|him|she|her|as good as|at its root|nobody's)|is none|are none)\b"
)
"""Words that made sentences hard to read. Rewrite the sentence: another word alone seldom helps."""

KEPT: Final = re.compile("more charged than the rows tell of|limits that did not stand|log:standing")
"""Names that programs read: findings of an audit, and a key of the store."""

EXEMPT: Final = (
    "LICENSE",
    "app/http/console/uplot/",  # of another project
    "clients/python/LICENSE",
    "clients/package-lock.json",
    "requirements",
    "tests/bench/peers/node/package-lock.json",
    "tests/decision_log/version-",  # written by earlier versions
    "tests/vectors/",  # quotes Kafka's documentation
    "tests/words.py",
)

NOT_YET: Final[tuple[str, ...]] = ()
"""Paths whose sentences are still to be rewritten."""

NAMES_NOT_YET: Final[frozenset[str]] = frozenset({})
"""Classes that are still to be renamed."""


class ClassName(NamedTuple):
    """A class of ours, by its name; where it is, and what it derives from."""

    name: str
    place: str
    bases: tuple[str, ...]


def main() -> int:
    """Print what is refused; 1 if anything is."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [path for path in listed.stdout.splitlines() if (ROOT / path).is_file()]
    code = [path for path in paths if path.startswith(("app/", "workers/")) and path.endswith(".py")]
    classes = [each for path in code for each in classes_in(path)]
    everything = "--all" in sys.argv
    named = [each for each in classes if everything or each.name not in NAMES_NOT_YET]
    found = [*clashes(named), *misnamed_exceptions(named)]
    skipped = EXEMPT if everything else (*EXEMPT, *NOT_YET)
    for path in paths:
        if not path.startswith(skipped):
            found += retired_words(path)
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


def retired_words(path: str) -> Iterator[str]:
    """Every retired word of a file, with its line."""
    try:
        lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return
    for number, line in enumerate(lines, 1):
        for word in RETIRED.finditer(KEPT.sub("", line)):
            yield f"{path}:{number}: {word[0]}: retired word, rewrite the sentence (tests/words.py)"


def classes_in(path: str) -> Iterator[ClassName]:
    """The classes that a file defines."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            bases = tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases)
            yield ClassName(node.name, f"{path}:{node.lineno}", bases)


def clashes(classes: list[ClassName]) -> Iterator[str]:
    """Names that several classes have."""
    places = defaultdict(list)
    for each in classes:
        places[each.name].append(each.place)
    for name, where in sorted(places.items()):
        if len(where) > 1:
            yield f"{where[0]}: class name used again: {name} ({', '.join(where[1:])})"


def misnamed_exceptions(classes: list[ClassName]) -> Iterator[str]:
    """Exceptions, also by way of other classes of ours, whose names do not end in Error."""
    exceptions: set[str] = set()
    before = -1
    while len(exceptions) > before:
        before = len(exceptions)
        for each in classes:
            if any(base.endswith(("Error", "Exception")) or base in exceptions for base in each.bases):
                exceptions.add(each.name)
    for each in classes:
        if each.name in exceptions and not each.name.endswith("Error"):
            yield f"{each.place}: exception without Error: {each.name}"


if __name__ == "__main__":
    sys.exit(main())
