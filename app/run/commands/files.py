"""`quotagate quotas export`, `plan`, `apply`, `lint` and `schema`: the catalog as a file."""
# ruff: noqa: D301  a real backspace keeps the lines of examples apart

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from app.run.commands import plans, quotas_file, quotas_schema, show
from app.run.commands.node import Node, connected
from app.run.commands.options import Reason
from app.run.commands.pages import one_version
from app.run.commands.plans import Plan
from app.run.commands.show import Out, Output
from app.run.commands.target import ConfigFile, Key, Url
from app.run.errors import CannotAsk

group = typer.Typer()


def _there(file: Path) -> Path:
    if str(file) != "-" and not file.is_file():
        raise typer.BadParameter(f"there is no file {file}")
    return file


File = Annotated[
    Path,
    typer.Option("--file", "-f", callback=_there, help="The file; - is standard input."),
]
OnlyNamed = Annotated[
    bool, typer.Option("--only-named", help="Leave entities alone that the file does not name.")
]


@group.command()
def export(url: Url = None, key: Key = None, config: ConfigFile = None, output: Out = Output.yaml) -> None:
    """Write the whole catalog as a file, in one canonical order.

    \b
    Examples:
      quotagate quotas export > quotas.yaml
      quotagate quotas export -o json
    """
    if output is Output.table:
        raise typer.BadParameter("a file is yaml or json; `quotagate quotas list` shows a table")
    with connected(url, key, config) as node:
        listed = one_version(node, "/v1/quotas", "quotas")
    quotas = quotas_file.ordered((one["entity"], one["quotas"]) for one in listed.items)
    if output is Output.json:
        show.document({"quotas": dict(quotas)}, output)
    else:
        sys.stdout.writelines(quotas_file.write(quotas, plans.known_etag(listed.etag).strip('"')))


@group.command()
def plan(
    file: File,
    *,
    only_named: OnlyNamed = False,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = Output.table,
) -> None:
    """Show what applying a file would change, and write nothing.

    The file is the whole truth: what it does not hold is removed. A bucket that is emptied forgets what it
    was charged.

    \b
    Examples:
      quotagate quotas plan -f quotas.yaml
      quotagate quotas plan -f team-a.yaml --only-named
    """
    wanted = _read(file)
    with connected(url, key, config) as node:
        found = _plan(node, wanted, only_named=only_named)
    if not show.document({"version": found.version, "changes": found.changes}, output):
        _show(found)
        if found.changes:
            options = (
                f"--if-match {found.version}{' --only-named' if only_named else ''} -f {quote(str(file))}"
            )
            show.note(f"To apply just this: quotagate quotas apply {options}")


@group.command()
def apply(
    file: File,
    *,
    only_named: OnlyNamed = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    if_match: Annotated[
        int | None,
        typer.Option(
            metavar="VERSION", help="Only if the catalog is at this version still, as plan shows it."
        ),
    ] = None,
    reason: Reason = None,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = Output.table,
) -> None:
    """Make the catalog what a file says: all of it, or nothing.

    Shows the plan, and asks at a terminal. Refuses if the catalog has changed since the plan.

    \b
    Examples:
      quotagate quotas apply -f quotas.yaml
      quotagate quotas apply -f quotas.yaml --yes --if-match 17 --reason launch
    """
    asks = not yes and sys.stdin.isatty() and str(file) != "-"
    wanted = _read(file)
    with connected(url, key, config) as node:
        found = _plan(node, wanted, only_named=only_named)
        if if_match is not None and if_match != found.version:
            raise CannotAsk(
                f"the catalog changed since the plan: it is at version {found.version}, not {if_match}. "
                "Nothing was applied."
            )
        if output is Output.table:
            _show(found)
        if not found.changes:
            show.document({"version": found.version, "changes": []}, output)
            return
        if asks:
            plans.confirm(found, node)
        done = plans.apply(node, found, reason)
    if not show.document(done, output):
        typer.echo(f"Applied. The catalog is at version {done['version']}.")


@group.command()
def lint(
    file: File,
    output: Out = Output.table,
) -> None:
    """Check a file, without a node: every fault with its line.

    \b
    Examples:
      quotagate quotas lint -f quotas.yaml
    """
    contents = quotas_file.read(_text(file))
    faults = [{"line": fault.line, "message": fault.message} for fault in contents.faults]
    if not show.document({"file": str(file), "faults": faults}, output):
        for fault in contents.faults:
            typer.echo(show.plain(f"{file}:{fault.line}: {fault.message}"))
        if not faults:
            typer.echo(
                f"{file}: good, with quotas of {plans.count(len(contents.quotas), 'entity', 'entities')}."
            )
    if faults:
        raise typer.Exit(1)


@group.command()
def schema() -> None:
    """Print the JSON schema of the file, for editors.

    \b
    Examples:
      quotagate quotas schema > quotas.schema.json
    """
    typer.echo(quotas_schema.text(), nl=False)


def _text(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise CannotAsk(f"{file}: {error}") from None


def _read(file: Path) -> Mapping[str, Mapping[str, Any]]:
    contents = quotas_file.read(_text(file))
    if contents.faults:
        lines = [f"{file}:{fault.line}: {fault.message}" for fault in contents.faults]
        raise CannotAsk(show.plain_lines([f"{file} has faults; nothing was asked", *lines]))
    return contents.quotas


def _plan(node: Node, wanted: Mapping[str, Mapping[str, Any]], *, only_named: bool) -> Plan:
    """What must change for the catalog to be what the file says."""
    etag, now = plans.catalog(node)
    alterations = []
    for entity in [*wanted, *(entity for entity in now if entity not in wanted and not only_named)]:
        said, stands = wanted.get(entity, {}), now.get(entity, {})
        altered = {quota: new for quota, new in said.items() if stands.get(quota) != new}
        altered |= dict.fromkeys(quota for quota in stands if quota not in said)
        if altered:
            alterations.append({"entity": entity, "quotas": altered})
    return plans.plan(node, etag, alterations)


def _show(found: Plan) -> None:
    plans.show_changes(
        found, f"Nothing changes: the catalog, at version {found.version}, is what the file says."
    )
