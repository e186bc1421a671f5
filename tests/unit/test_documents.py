"""Names in the documents exist: links, anchors, paths, code, tests, make targets, commands, and hooks."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import typer
import yaml

from app.run.cli import cli
from tests.tiers import refusal
from workers.jobs.__main__ import Processes
from workers.jobs.command import JOBS, Driver, command_line
from workers.spark.__main__ import Spark

ROOT: Final = Path(__file__).parents[2]
DECISIONS: Final = ROOT / "docs" / "decisions"
PAGES: Final = sorted(
    [*ROOT.glob("*.md")]
    + [page for folder in ("docs", "examples", "clients/python") for page in (ROOT / folder).rglob("*.md")]
)
RECORDS: Final = sorted(DECISIONS.glob("[0-9]*.md"))

HOLDING_CODE: Final = "app|workers|tests|docs|migrations|examples|clients|openapi"
LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
CODE: Final = re.compile(r"`([^`\n]+)`")
PATH: Final = re.compile(rf"(?:{HOLDING_CODE})/[\w./*-]*(?:::[\w.]+)?")
FENCED: Final = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
COMMAND: Final = re.compile(r"^(?:\$ )?(?:\S*/)?(make|quotagate) (.+)$")
TARGET: Final = re.compile(r"^([\w./-]+):.*", re.MULTILINE)
LOCAL_JOBS: Final = {"run" if job == "backfill" else job: job for job in JOBS}
"""The jobs that commands run on this machine: `quotagate audit` and `quotagate backfill run`."""
MADE: Final = frozenset({"clients/generated"})
"""Paths that `make` writes into the working copy."""


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def headings(page: Path) -> list[str]:
    return re.findall(r"^## .*$", text_of(page), re.MULTILINE)


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page, as GitHub derives them from its headings."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", text_of(page)), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)


@cache
def names_in(path: Path) -> frozenset[str]:
    """The classes, functions, methods and constants of a Python file."""
    found = set()
    for node in ast.parse(text_of(path)).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            inner = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{each.name}" for each in inner}
    return frozenset(found)


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """The `make` and `quotagate` commands of a page: in code spans and in fenced blocks."""
    text = text_of(page)
    fenced = [line for block in FENCED.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    for candidate in [*CODE.findall(FENCED.sub("", text)), *fenced]:
        if found := COMMAND.match(candidate.strip()):
            yield found[1], found[2].partition(" #")[0]


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path):
    for link in LINK.findall(FENCED.sub("", text_of(page))):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def is_there(shown: str) -> bool:
    """Whether a path exists, and in it the name after `::`."""
    path, _, name = shown.partition("::")
    exists = any(ROOT.glob(path.rstrip("/")))
    return exists and (not name or name in names_in(ROOT / path))


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_named_code_exists(page: Path):
    named = [span for span in CODE.findall(text_of(page)) if PATH.fullmatch(span)]
    assert [span for span in named if span.rstrip("/") not in MADE and not is_there(span)] == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_named_commands_exist(page: Path):
    targets = TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8"))
    for program, arguments in commands(page):
        words = arguments.replace("...", "").replace("…", "").replace("'", "").replace('"', "").split()
        if program == "make":
            named, is_narrowed, paths = arguments.partition("T=")
            assert {word for word in named.split() if "=" not in word} <= {*targets}, f"make {arguments}"
            narrowed = paths.strip("\"'").split() if is_narrowed else []
            assert [path for path in narrowed if not is_there(path)] == [], f"make {arguments}"
            refused = [why for path in narrowed if (why := refusal(path))]
            assert named.strip() != "test" or refused == [], f"make {arguments}"
        else:
            check_command(words, f"quotagate {arguments}")


def check_command(words: list[str], shown: str) -> None:
    """Check a command's name and its long options against the command line."""
    command: Any = typer.main.get_command(cli)
    while words and words[0] in getattr(command, "commands", ()):
        command, *words = command.commands[words[0]], *words[1:]
    is_group = hasattr(command, "commands")
    assert not is_group or not words or words[0].startswith("-"), shown
    parameters = command.params
    known = {option for each in parameters for option in (*each.opts, *each.secondary_opts)}
    if command.name == "generate" or (command.name == "spark" and (not words or not words[0].islower())):
        return
    if command.name == "spark":
        known = options_of(Spark(), words[0], shown)
    elif command.name in LOCAL_JOBS:
        known = options_of(Processes(), LOCAL_JOBS[command.name], shown)
    known |= {"--help", "--version", "--install-completion"}
    used = {word.partition("=")[0].rstrip(",;") for word in words if word.startswith("--")}
    assert used <= known, shown


def options_of(driver: Driver, job: str, shown: str) -> set[str]:
    """The options of a job."""
    jobs: Any = next(action.choices for action in command_line(driver)._actions if action.choices)
    assert job in jobs, shown
    return set(jobs[job]._option_string_actions)


@pytest.mark.parametrize("record", RECORDS, ids=relative)
def test_record_follows_the_template(record: Path):
    title, _, status, _, date, *_ = text_of(record).splitlines()
    number, _, words = title.removeprefix("# ").partition(". ")
    assert record.name == f"{number}-{re.sub(r'[^a-z0-9 -]', '', words.lower()).replace(' ', '-')}.md"
    assert status == "Status: accepted"
    assert re.fullmatch(r"Date: \d{4}-\d{2}-\d{2}", date), date
    assert headings(record) == headings(DECISIONS / "template.md")


def test_index_has_every_record_once_with_its_title():
    lines = [f"- [{text_of(record).splitlines()[0].removeprefix('# ')}]({record.name})" for record in RECORDS]
    index = text_of(DECISIONS / "README.md")
    assert sorted(line for line in index.splitlines() if line.startswith("- [")) == sorted(lines)


def test_every_missing_number_of_a_record_is_explained_once():
    """No number is used again, so a reader of an old commit finds where its record went."""
    numbers = {int(record.name[:4]) for record in RECORDS}
    moved = text_of(DECISIONS / "README.md").partition("not used again: ")[2].partition("\n")[0]
    gone: list[int] = []
    for part in moved.rstrip(".").split("; "):
        sources, _, target = part.partition(" in ")
        gone += map(int, re.findall(r"\d+", sources))
        assert int(re.findall(r"\d+", target)[0]) in numbers, part
    assert sorted([*gone, *numbers]) == list(range(1, max(numbers) + 1))


def test_proofs_and_decisions_are_short_enough_to_be_read():
    pages = [*DECISIONS.glob("*.md"), *(ROOT / "docs" / "proofs").glob("*.md")]
    assert sum(len(text_of(page).split()) for page in pages) <= 25_000


def test_each_resource_that_a_caller_can_take_names_its_test():
    table = text_of(ROOT / "SECURITY.md").partition("| resource |")[2].partition("\n\n")[0]
    rows = [row.split(" | ") for row in table.splitlines()[2:]]
    assert len(rows) > 10
    for resource, _, others, tests in rows:
        assert others, resource
        assert any(is_there(each) for each in CODE.findall(tests)), resource


def test_pre_commit_runs_what_make_check_runs():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipes = re.findall(r"^(?:check|lint):.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    made = {line.strip().replace("$(BIN)", ".venv/bin") for recipe in recipes for line in recipe.splitlines()}
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert {hook["entry"] for hook in repository["hooks"]} == made


def test_architecture_has_the_layers_of_import_linter():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    assert f"`{' > '.join(layers)}`" in text_of(ROOT / "docs" / "architecture.md")
