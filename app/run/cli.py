"""The command line: `quotagate up`, `serve`, `migrate`, `decide`.

Exit codes: 0 done, 1 refused or failed, 2 wrong use.
"""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import httpx
import structlog
import typer
import yaml
from rich.console import Console
from rich.table import Table

import app
from app.run import logs, settings
from app.run.errors import CannotAsk, CannotRun

EnvFile = Annotated[
    Path | None, typer.Option(help="Read settings from this file instead of .env; the environment wins.")
]

cli = typer.Typer(
    help="Cluster-wide quota decisions over HTTP: may this work go ahead, or must it wait N milliseconds?",
    epilog="Settings come from QUOTAGATE_* variables; see docs/settings.md. "
    "Exit codes: 0 done, 1 refused or failed, 2 wrong use.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Output(enum.StrEnum):
    """How an answer is shown."""

    table = "table"
    json = "json"
    yaml = "yaml"


class Mode(enum.StrEnum):
    """What an ask does."""

    admit = "admit"
    peek = "peek"
    record = "record"
    refund = "refund"


class Enforcement(enum.StrEnum):
    """The one enforcement that an ask may demand."""

    deny = "deny"


def main() -> None:
    """Run the command line."""
    try:
        cli(prog_name="quotagate")
    except CannotRun as refused:
        print(f"quotagate: {refused}", file=sys.stderr)  # noqa: T201
        sys.exit(1)


def _version(asked: bool) -> None:
    if asked:
        print(f"quotagate {app.__version__}")  # noqa: T201
        raise typer.Exit


@cli.callback()
def _root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    del version  # its callback has answered


@cli.command()
def up(env_file: EnvFile = None) -> None:
    """Run everything on this machine: embedded store and catalog, and the API.

    Keeps its state in QUOTAGATE_HOME. With QUOTAGATE_REDIS_URL or QUOTAGATE_DATABASE_URL set, those servers
    are used instead of embedded ones.
    """
    from app.run.up import up  # noqa: PLC0415  `decide` starts twice as fast without

    up(_settings(env_file), options=_passed_on(env_file))


@cli.command()
def serve(
    env_file: EnvFile = None,
    fd: Annotated[int | None, typer.Option(hidden=True, help="A listening socket, inherited.")] = None,
    counts: Annotated[Path | None, typer.Option(hidden=True, help="Metrics of sibling processes.")] = None,
) -> None:
    """Run the API alone, against QUOTAGATE_REDIS_URL and QUOTAGATE_DATABASE_URL."""
    from app.run.serve import serve  # noqa: PLC0415

    serve(_settings(env_file, warn=fd is None), fd=fd, counts=counts, options=_passed_on(env_file))


@cli.command()
def migrate(env_file: EnvFile = None) -> None:
    """Bring the catalog to the newest schema."""
    given = _settings(env_file, warn=False)

    from app.run import home, wiring  # noqa: PLC0415

    if given.database_url is None:
        home.make(given.home)
    wiring.migrate(given.catalog_url)


@cli.command()
def decide(
    principal: Annotated[str | None, typer.Option(help="Who asks.")] = None,
    client_id: Annotated[str | None, typer.Option(help="Its client-id.")] = None,
    ip: Annotated[str | None, typer.Option(help="Its address.")] = None,
    broker: Annotated[str | None, typer.Option(help="The broker that is asked.")] = None,
    listener: Annotated[str | None, typer.Option(help="The listener that is asked.")] = None,
    requests: Annotated[int | None, typer.Option(help="Usage: requests.")] = None,
    request_time_ms: Annotated[float | None, typer.Option(help="Usage: thread time in milliseconds.")] = None,
    produce_bytes: Annotated[float | None, typer.Option(help="Usage: bytes written.")] = None,
    fetch_bytes: Annotated[float | None, typer.Option(help="Usage: bytes read.")] = None,
    mutations: Annotated[int | None, typer.Option(help="Usage: mutations.")] = None,
    connections: Annotated[int | None, typer.Option(help="Usage: connections.")] = None,
    producer_id: Annotated[
        list[str] | None, typer.Option(help="Usage: a producer id; repeat for more.")
    ] = None,
    mode: Annotated[
        Mode, typer.Option(help="Admit and charge, only look, record what is done, or give back.")
    ] = (Mode.admit),
    enforcement: Annotated[Enforcement | None, typer.Option(help="Decide every quota as deny.")] = None,
    recheck: Annotated[bool, typer.Option("--recheck", help="The second ask for a held connection.")] = False,
    cluster_action: Annotated[
        bool, typer.Option("--cluster-action", help="Exempt from request quotas.")
    ] = False,
    at_ms: Annotated[int | None, typer.Option(help="The time, where the caller's clock decides.")] = None,
    ask_id: Annotated[str | None, typer.Option("--id", help="Asked again with it, answers the same.")] = None,
    detail: Annotated[bool, typer.Option("--detail", help="Show each quota that applied.")] = False,
    url: Annotated[str, typer.Option(envvar="QUOTAGATE_URL", help="The service.")] = "http://127.0.0.1:8080",
    key: Annotated[str | None, typer.Option(envvar="QUOTAGATE_KEY", help="A key of it.")] = None,
    output: Annotated[
        Output, typer.Option("--output", "-o", help="How to show the decision.")
    ] = Output.table,
) -> None:
    """Ask a running service for a decision.

    Exit code 0 when the work may be done (admit, delay), 1 when not (throttle, reject).
    """
    usage = {
        "requests": requests,
        "request_time_ms": request_time_ms,
        "produce_bytes": produce_bytes,
        "fetch_bytes": fetch_bytes,
        "mutations": mutations,
        "connections": connections,
        "producer_ids": producer_id or None,
    }
    ask = {
        "principal": principal,
        "client_id": client_id,
        "ip": ip,
        "broker": broker,
        "listener": listener,
        "usage": _given(usage),
        "mode": mode.value,
        "enforcement": enforcement and enforcement.value,
        "recheck": recheck or None,
        "cluster_action": cluster_action or None,
        "at_ms": at_ms,
        "id": ask_id,
        "detail": detail or None,
    }
    if not ask["usage"]:
        raise typer.BadParameter("name at least one usage, such as --requests 1 or --producer-id 4711")
    decision = _post(f"{url.rstrip('/')}/v1/decisions", key, _given(ask))
    _show(decision, output)
    if decision["decision"] in {"throttle", "reject"}:
        raise typer.Exit(1)


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _post(url: str, key: str | None, body: Mapping[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.post(url, json=body, headers=headers, timeout=10)
        content: dict[str, Any] = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CannotAsk(f"{url}: {error}") from None
    except ValueError:
        raise CannotAsk(f"{url}: answered {answer.status_code}, and not with JSON") from None
    if not answer.is_success:
        faults = [f"  {fault['field']}: {fault['message']}" for fault in content.get("errors") or ()]
        problem = f"{answer.status_code} {content.get('detail') or content.get('title') or ''}"
        raise CannotAsk("\n".join([problem, *faults]))
    return content


def _show(decision: Mapping[str, Any], output: Output) -> None:
    if output is Output.json:
        print(json.dumps(decision, indent=2, ensure_ascii=False))  # noqa: T201
        return
    if output is Output.yaml:
        print(yaml.safe_dump(dict(decision), sort_keys=False, allow_unicode=True), end="")  # noqa: T201
        return
    # In a pipe rich would wrap at 80 columns, and no program could read a row.
    console = Console(width=None if sys.stdout.isatty() else 240)
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in decision.items():
        if name != "quotas":
            table.add_row(name, _cell(value))
    console.print(table)
    if quotas := decision.get("quotas"):
        rows = Table(*quotas[0], box=None, pad_edge=False)
        for quota in quotas:
            rows.add_row(*(_cell(value) for value in quota.values()))
        console.print()
        console.print(rows)


def _cell(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case Mapping():
            return " ".join(f"{name}={_cell(part)}" for name, part in value.items())
    return str(value)


def _settings(env_file: Path | None, *, warn: bool = True) -> settings.Settings:
    logs.configure()
    given = settings.load(env_file)
    # The outermost program warns; a child that reads the same variables would only repeat it.
    for name in settings.unknown_variables(env_file) if warn else ():
        structlog.get_logger("quotagate.settings").warning("nothing reads this variable", variable=name)
    return given


def _passed_on(env_file: Path | None) -> tuple[str, ...]:
    return () if env_file is None else ("--env-file", str(env_file.resolve()))


if __name__ == "__main__":
    main()
