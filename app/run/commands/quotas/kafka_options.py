"""`quotagate quotas --alter` and `--describe`: the options of kafka-configs.sh, for a running node."""
# ruff: noqa: D301  a real backspace keeps the lines of examples apart

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from app.domain.quota_value import merge
from app.kafka import syntax
from app.kafka.syntax import KafkaOptions
from app.node.errors import NodeRequestError
from app.run.commands import show, values
from app.run.commands.node.pages import pages
from app.run.commands.node.requests import Node, NodeRefusalError, connected
from app.run.commands.node.target import ConfigFile, Key, Url
from app.run.commands.options import Reason, option_order
from app.run.commands.quotas.entity import written_headers
from app.run.commands.show import Out

PANEL: Final = "Options of kafka-configs.sh, instead of a command"
NOT_USED: Final = (
    "bootstrap_server",
    "bootstrap_controller",
    "zookeeper",
    "zk_tls_config_file",
    "command_config",
)
"""Options that say how to reach Kafka. Copied commands have them; their values are not read."""

Unused = Annotated[
    str | None, typer.Option(rich_help_panel=PANEL, help="Accepted and not used: no Kafka is asked.")
]


def kafka(
    ctx: typer.Context,
    *,
    alter: Annotated[
        bool,
        typer.Option(
            "--alter", rich_help_panel=PANEL, help="Change quotas, as --add-config and --delete-config say."
        ),
    ] = False,
    describe: Annotated[
        bool, typer.Option("--describe", rich_help_panel=PANEL, help="Show the quotas.")
    ] = False,
    entity_type: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=PANEL, help="users, clients, ips or brokers; users and clients pair up."
        ),
    ] = None,
    entity_name: Annotated[
        list[str] | None, typer.Option(rich_help_panel=PANEL, help="The name that goes with the type.")
    ] = None,
    entity_default: Annotated[
        int,
        typer.Option(
            "--entity-default", count=True, rich_help_panel=PANEL, help="The default, instead of a name."
        ),
    ] = 0,
    user: Annotated[str | None, typer.Option(rich_help_panel=PANEL, help="Short for a user.")] = None,
    user_defaults: Annotated[
        bool, typer.Option("--user-defaults", rich_help_panel=PANEL, help="Short for the default user.")
    ] = False,
    client: Annotated[str | None, typer.Option(rich_help_panel=PANEL, help="Short for a client-id.")] = None,
    client_defaults: Annotated[
        bool,
        typer.Option("--client-defaults", rich_help_panel=PANEL, help="Short for the default client-id."),
    ] = False,
    ip: Annotated[str | None, typer.Option(rich_help_panel=PANEL, help="Short for an address.")] = None,
    ip_defaults: Annotated[
        bool, typer.Option("--ip-defaults", rich_help_panel=PANEL, help="Short for the default address.")
    ] = False,
    broker: Annotated[str | None, typer.Option(rich_help_panel=PANEL, help="Short for a broker.")] = None,
    broker_defaults: Annotated[
        bool, typer.Option("--broker-defaults", rich_help_panel=PANEL, help="Short for all brokers.")
    ] = False,
    add_config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=NUMBER,...", rich_help_panel=PANEL, help="Quotas to set; others stay unchanged."
        ),
    ] = None,
    add_config_file: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, rich_help_panel=PANEL, help="Properties instead of --add-config."
        ),
    ] = None,
    delete_config: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY,...", rich_help_panel=PANEL, help="Quotas to remove."),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", hidden=True)] = False,
    force: Annotated[bool, typer.Option("--force", hidden=True)] = False,
    bootstrap_server: Unused = None,
    bootstrap_controller: Unused = None,
    zookeeper: Unused = None,
    zk_tls_config_file: Unused = None,
    command_config: Unused = None,
    reason: Reason = None,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """Set, look up and explain quotas, and keep them as files.

    The options of kafka-configs.sh work too. There, the limits of brokers and listeners are named
    max.connection.creation.rate and listener.name.NAME.max.connection.creation.rate; the case of NAME
    matters.

    \b
    Examples:
      quotagate quotas set user=alice producer_ids_rate=50
      quotagate quotas --alter --add-config 'producer_ids_rate=50,request_rate=9' \\
          --entity-type users --entity-name alice
      quotagate quotas --alter --delete-config request_rate --user-defaults
      quotagate quotas --alter --add-config request_rate=9 --ip-defaults
      quotagate quotas --alter --add-config max.connection.creation.rate=9 --broker 1
      quotagate quotas --describe --entity-type users
    """
    # Their values may hold passwords.
    del all_, force, bootstrap_server, bootstrap_controller, zookeeper, zk_tls_config_file, command_config
    short = {"user": user, "client-id": client, "ip": ip, "broker": broker}
    defaults = {
        "user": user_defaults,
        "client-id": client_defaults,
        "ip": ip_defaults,
        "broker": broker_defaults,
    }
    options = KafkaOptions(
        entity_type=entity_type or (),
        entity_name=entity_name or (),
        entity_default=entity_default,
        short={type_: name for type_, name in short.items() if name is not None},
        short_defaults=[type_ for type_, wanted in defaults.items() if wanted],
        add_config=add_config or (),
        delete_config=delete_config or (),
        add_config_file=None if add_config_file is None else _text(add_config_file),
    )
    order = option_order(ctx)
    if ctx.invoked_subcommand is not None:
        if order:
            option = order[0].replace("_", "-")
            ctx.fail(f"--{option} comes before {ctx.invoked_subcommand}: options go after the command")
        return
    if alter == describe:
        ctx.fail("give --alter or --describe, or a command such as set or list")
    if describe and (add_config or add_config_file or delete_config):
        ctx.fail("--add-config, --add-config-file and --delete-config go with --alter")
    try:
        syntax.refuse_credentials(*options.configs)
        names = syntax.entity_names(options, order)
        changes = {} if describe else syntax.changes(options, names, values.value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if describe:
        lists = [values.matches(match, strict=strict) for match, strict in syntax.filters(names)]
        with connected(url, key, config) as node:
            _note_unused(order, node)
            found = [one for query in lists for one in pages(node, "/v1/quotas", "quotas", query)]
        if not show.document({"quotas": found}, output):
            for line in syntax.describe_lines(found, show.cell):
                show.line(line)
        return
    with connected(url, key, config) as node:
        _note_unused(order, node)
        answer = _change(node, changes, reason)
    if not show.document(answer, output):
        for entity in changes:
            show.line(f"Completed updating config for {syntax.title_of(entity)}.")


def _text(file: Path) -> tuple[str, str]:
    """The name and the text of a file of properties, which Java reads as ISO 8859-1."""
    try:
        return str(file), file.read_text(encoding="latin-1")
    except OSError as error:
        raise NodeRequestError(f"{file}: {error.strerror}") from None


def _note_unused(order: Sequence[str], node: Node) -> None:
    given = [f"--{name.replace('_', '-')}" for name in dict.fromkeys(order) if name in NOT_USED]
    if given:
        verb = "is" if len(given) == 1 else "are"
        show.note(f"{' and '.join(given)} {verb} not used: the quotas are those of the node {node.name}.")


def _change(node: Node, changes: Mapping[str, Mapping[str, Any]], reason: str | None) -> dict[str, Any]:
    """Make the changes; changes of several entities are applied atomically."""
    if len(changes) == 1:
        [(entity, patch)] = changes.items()
        return node.ask("PATCH", f"/v1/quotas/{entity}", patch, headers=written_headers(reason, None)).body
    # The version is read before the quotas, so If-Match also fails if they change while they are read.
    etag = node.ask("GET", "/v1/quotas", query={"limit": 1}).headers["ETag"]
    alterations = []
    for entity, patch in changes.items():
        now = _quotas(node, entity)
        merged = {quota: None if new is None else merge(now.get(quota), new) for quota, new in patch.items()}
        alterations.append({"entity": entity, "quotas": merged})
    headers = {"X-Reason": reason, "If-Match": etag}
    return node.ask("POST", "/v1/quotas:apply", {"alterations": alterations}, headers=headers).body


def _quotas(node: Node, entity: str) -> dict[str, Any]:
    """The quotas of an entity; empty if it has none."""
    try:
        return dict(node.get(f"/v1/quotas/{entity}")["quotas"])
    except NodeRefusalError as refused:
        if refused.status != 404:
            raise
        return {}
