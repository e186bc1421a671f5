"""`quotagate quotas export`, `plan`, `apply`, `lint` and `schema`: the catalog as a file."""
# ruff: noqa: D301  a real backspace keeps the lines of examples apart

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.node.errors import NodeRequestError
from app.run.commands import show
from app.run.commands.node.pages import catalog
from app.run.commands.node.requests import Node, connected
from app.run.commands.node.target import ConfigFile, Key, Url
from app.run.commands.options import Reason
from app.run.commands.quotas import catalog_schema, plans
from app.run.commands.quotas.plans import ChangePlan
from app.run.commands.show import Out

if TYPE_CHECKING:
    from app.quota_file import EntityAndQuotas

group = typer.Typer()


def _existing(file: Path) -> Path:
    if str(file) != "-" and not file.is_file():
        raise typer.BadParameter(f"there is no file {file}")
    return file


File = Annotated[
    Path,
    typer.Option("--file", "-f", callback=_existing, help="The file; - is standard input."),
]
OnlyNamed = Annotated[
    bool, typer.Option("--only-named", help="Do not touch entities that the file does not name.")
]


@group.command()
def export(url: Url = None, key: Key = None, config: ConfigFile = None, output: Out = "yaml") -> None:
    """Write the whole catalog to standard output, in canonical order.

    \b
    Examples:
      quotagate quotas export > quotas.yaml
      quotagate quotas export -o json
    """
    if output == "table":
        raise typer.BadParameter("an export is yaml or json; `quotagate quotas list` shows a table")
    with connected(url, key, config) as node:
        etag, found = catalog(node)
    from app import quota_file  # and YAML, which only files need

    quotas = quota_file.ordered(found.items())
    if output == "json":
        show.document({"quotas": dict(quotas)}, output)
    else:
        sys.stdout.writelines(lines(quotas, etag.strip('"')))


@group.command()
def plan(
    file: File,
    *,
    only_named: OnlyNamed = False,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """Show what applying a file would change, without changing anything.

    The file is the whole catalog: quotas that are not in it are removed. Some changes empty a quota's
    buckets; the plan shows which.

    \b
    Examples:
      quotagate quotas plan -f quotas.yaml
      quotagate quotas plan -f team-a.yaml --only-named
    """
    target = _read(file)
    with connected(url, key, config) as node:
        planned = _plan(node, target, only_named=only_named)
    if not show.document({"version": planned.version, "changes": planned.changes}, output):
        _show(planned)
        if planned.changes:
            options = (
                f"--if-match {planned.version}{' --only-named' if only_named else ''} -f {quote(str(file))}"
            )
            show.note(f"To apply exactly this: quotagate quotas apply {options}")


@group.command()
def apply(
    file: File,
    *,
    only_named: OnlyNamed = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    if_match: Annotated[
        int | None,
        typer.Option(
            metavar="VERSION", help="Apply only if the catalog is still at this version, which plan shows."
        ),
    ] = None,
    reason: Reason = None,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """Apply a file to the catalog, atomically.

    Shows the plan and, at a terminal, asks before applying it. Refuses if the catalog has changed since then.

    \b
    Examples:
      quotagate quotas apply -f quotas.yaml
      quotagate quotas apply -f quotas.yaml --yes --if-match 17 --reason launch
    """
    asks = not yes and sys.stdin.isatty() and str(file) != "-"
    target = _read(file)
    with connected(url, key, config) as node:
        planned = _plan(node, target, only_named=only_named)
        if if_match is not None and if_match != planned.version:
            raise NodeRequestError(
                f"the catalog changed since the plan: it is at version {planned.version}, not {if_match}. "
                "Nothing was applied."
            )
        if output == "table":
            _show(planned)
        if not planned.changes:
            show.document({"version": planned.version, "changes": []}, output)
            return
        if asks:
            plans.confirm(planned, node)
        done = plans.apply(node, planned, reason)
    if not show.document(done, output):
        show.line(f"Applied. The catalog is at version {done['version']}.")


@group.command()
def lint(
    file: File,
    output: Out = "table",
) -> None:
    """Check a file without a node; show every fault with its line.

    \b
    Examples:
      quotagate quotas lint -f quotas.yaml
    """
    from app import quota_file  # and YAML, which only files need

    contents = quota_file.read(_text(file))
    faults = [{"line": fault.line, "message": fault.message} for fault in contents.faults]
    if not show.document({"file": str(file), "faults": faults}, output):
        for fault in contents.faults:
            show.line(f"{file}:{fault.line}: {fault.message}")
        if not faults:
            show.line(
                f"{file}: valid, with quotas of {plans.count(len(contents.quotas), 'entity', 'entities')}."
            )
    if faults:
        raise typer.Exit(1)


@group.command()
def schema() -> None:
    """Print the JSON schema of such a file, for editors.

    \b
    Examples:
      quotagate quotas schema > quotas.schema.json
    """
    typer.echo(catalog_schema.text(), nl=False)  # noqa: TID251  a text of ours


def lines(quotas: Sequence[EntityAndQuotas], version: str) -> Iterator[str]:
    """Yield the lines of a file of the whole catalog; a quota with only a limit is written as a number."""
    from app import quota_file  # and YAML, which only files need

    name = catalog_schema.NAME
    yield f"# yaml-language-server: $schema={name}\n"
    yield f"# The whole catalog at version {version}. `quotagate quotas schema > {name}` helps editors.\n"
    yield from quota_file.quota_lines(quotas)


def _text(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise NodeRequestError(f"{file}: {error}") from None


def _read(file: Path) -> Mapping[str, Mapping[str, Any]]:
    from app import quota_file  # and YAML, which only files need

    contents = quota_file.read(_text(file))
    if contents.faults:
        lines = [f"{file}:{fault.line}: {fault.message}" for fault in contents.faults]
        raise NodeRequestError(f"{file} has faults; no request was sent", *lines)
    return contents.quotas


def _plan(node: Node, target: Mapping[str, Mapping[str, Any]], *, only_named: bool) -> ChangePlan:
    """Plan the changes that turn the catalog into the file's content."""
    etag, current = catalog(node)
    alterations = []
    for entity in [*target, *(entity for entity in current if entity not in target and not only_named)]:
        new, old = target.get(entity, {}), current.get(entity, {})
        altered = {quota: definition for quota, definition in new.items() if old.get(quota) != definition}
        altered |= dict.fromkeys(quota for quota in old if quota not in new)
        if altered:
            alterations.append({"entity": entity, "quotas": altered})
    return plans.plan(node, etag, alterations)


def _show(planned: ChangePlan) -> None:
    plans.show_changes(
        planned, f"Nothing changes: the catalog, at version {planned.version}, already equals the file."
    )
