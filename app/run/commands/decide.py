"""`quotagate decide`: ask for one decision."""
# ruff: noqa: D301  a real backspace keeps the lines of examples apart

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from app.domain.ask import Mode
from app.run.commands import show
from app.run.commands.node.requests import connected
from app.run.commands.node.target import ConfigFile, Key, Url
from app.run.commands.options import AtMs
from app.run.commands.show import Out, Output
from app.terminal import duration


def decide(
    principal: Annotated[str | None, typer.Option(help="The principal that asks.")] = None,
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
        Mode,
        typer.Option(help="Admit and charge; only look; record work already done; or give a charge back."),
    ] = "admit",
    enforcement: Annotated[
        Literal["deny"] | None, typer.Option(help="Decide every quota with enforcement deny.")
    ] = None,
    recheck: Annotated[bool, typer.Option("--recheck", help="The second ask for a held connection.")] = False,
    cluster_action: Annotated[
        bool, typer.Option("--cluster-action", help="Exempt from request quotas.")
    ] = False,
    at_ms: AtMs = None,
    ask_id: Annotated[
        str | None,
        typer.Option("--id", help="An id for the ask; a repeated ask with it gets the same decision."),
    ] = None,
    detail: Annotated[bool, typer.Option("--detail", help="Show each quota that applied.")] = False,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """Ask a running node for a decision.

    Exit code 0 if the work may be done (admit, delay), 1 if not (throttle, reject).

    \b
    Examples:
      quotagate decide --principal alice --producer-id 4711
      quotagate decide --principal alice --requests 1 --mode peek --detail
      quotagate decide --ip 10.0.0.7 --connections 1 -o json
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
        "mode": mode,
        "enforcement": enforcement,
        "recheck": recheck or None,
        "cluster_action": cluster_action or None,
        "at_ms": at_ms,
        "id": ask_id,
        "detail": detail or None,
    }
    if not ask["usage"]:
        raise typer.BadParameter("name at least one usage, such as --requests 1 or --producer-id 4711")
    with connected(url, key, config) as node:
        decision = node.ask("POST", "/v1/decisions", _given(ask)).body
    _show(decision, output)
    if decision["decision"] in {"throttle", "reject"}:
        raise typer.Exit(1)


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _show(decision: Mapping[str, Any], output: Output) -> None:
    if show.document(decision, output):
        return
    show.fields((name, value) for name, value in _for_people(decision).items() if name != "quotas")
    if quotas := decision.get("quotas"):
        show.line()
        show.records([*map(_for_people, quotas)], right=["limit", "throttle", "observed", "remaining"])


def _for_people(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a decision or a verdict, with a readable wait and rounded numbers."""
    return {
        name.removesuffix("_ms"): duration(value)
        if name == "throttle_ms"
        else show.measured(value)
        if name in {"limit", "observed", "remaining"}
        else value
        for name, value in answer.items()
    }
