"""`quotagate buckets`: show the state of a bucket, or reset it."""
# ruff: noqa: D301  a real backspace keeps the lines of examples apart

from __future__ import annotations

from typing import Annotated

import typer

from app.run.commands import show, values
from app.run.commands.node.requests import connected
from app.run.commands.node.target import ConfigFile, Key, Url
from app.run.commands.options import AtMs
from app.run.commands.show import Out

group = typer.Typer(
    help="Show and reset buckets, the counters that requests are charged to.", no_args_is_help=True
)

Bucket = Annotated[
    str,
    typer.Argument(
        metavar="BUCKET",
        help="As decisions name it: user=alice, or 'listener=EXTERNAL;broker=1'.",
        autocompletion=values.completed_types,
    ),
]
Quota = Annotated[
    str | None,
    typer.Option(metavar="KEY", help="Only this quota.", autocompletion=values.completed_names),
]


@group.command("show")
def show_(
    bucket: Bucket,
    quota: Quota = None,
    at_ms: AtMs = None,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """Show the state of a bucket, without changing it.

    \b
    Examples:
      quotagate buckets show user=alice
      quotagate buckets show user=alice,client-id=etl --quota request_rate -o json
    """
    with connected(url, key, config) as node:
        found = node.get("/v1/buckets", bucket=bucket, quota=quota, at_ms=at_ms)
    if show.document(found, output):
        return
    if not found["buckets"]:
        show.note("No quota charges this bucket.")
        return
    # Columns that are empty in all rows are left out, and lists.
    columns = [
        name
        for name in found["buckets"][0]
        if name not in {"bucket", "live_layers"} and any(one[name] is not None for one in found["buckets"])
    ]
    rows = [
        {name.upper(): one[name] if name == "quota" else show.measured(one[name]) for name in columns}
        for one in found["buckets"]
    ]
    show.records(rows, right=[name.upper() for name in columns if name != "quota"])


@group.command()
def reset(
    bucket: Bucket,
    quota: Quota = None,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """Reset a bucket: forget everything charged to it, and the producer ids it remembers.

    \b
    Examples:
      quotagate buckets reset user=alice
      quotagate buckets reset user=alice --quota producer_ids_rate
    """
    body = {"bucket": bucket} | ({} if quota is None else {"quota": quota})
    with connected(url, key, config) as node:
        node.ask("POST", "/v1/buckets:reset", body)
    show.done(output)
