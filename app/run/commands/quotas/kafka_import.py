"""`quotagate quotas import --from-kafka`: import the quotas of a Kafka cluster."""
# ruff: noqa: D301  a real backspace keeps the lines of examples apart

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from app.kafka import configuration, import_plan
from app.kafka import quotas as kafka_quotas
from app.kafka.errors import KafkaError
from app.kafka.mapping import QuotaMapping, map_quotas
from app.kafka.quotas import KafkaQuotas
from app.node.errors import NodeRequestError
from app.run.commands import show
from app.run.commands.node.pages import catalog
from app.run.commands.node.requests import Node, connected
from app.run.commands.node.target import ConfigFile, Key, Url
from app.run.commands.options import Reason
from app.run.commands.quotas import plans
from app.run.commands.quotas.plans import ChangePlan
from app.run.commands.show import Out
from app.terminal import count

WITHIN_S: Final = 10.0
PANEL: Final = "Kafka"

group = typer.Typer()


@group.command("import")
def import_(
    from_kafka: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="A broker, or several separated by commas.", rich_help_panel=PANEL
        ),
    ],
    *,
    multiply_by_brokers: Annotated[
        bool,
        typer.Option(
            "--multiply-by-brokers",
            help="Multiply limits by the number of brokers, to hold for all of them together. "
            "Without it, limits hold on each broker, as in Kafka.",
            rich_help_panel=PANEL,
        ),
    ] = False,
    kafka_property: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A property of the Kafka client. Put secrets in QUOTAGATE_KAFKA_NAME instead, "
            "which other users of the machine cannot see.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    env_file: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Read QUOTAGATE_KAFKA_* from this file instead of .env; the environment wins.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(min=0.1, metavar="SECONDS", help="How long to wait for Kafka.", rich_help_panel=PANEL),
    ] = WITHIN_S,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, and write nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    reason: Reason = None,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """Import the quotas of a Kafka cluster.

    Shows the plan and, at a terminal, asks before applying it. Quotas that Kafka does not have stay as they
    are. Quotas that cannot be imported are listed with the reason; the others are imported all the same.

    \b
    Examples:
      quotagate quotas import --from-kafka kafka-1:9092 --dry-run
      quotagate quotas import --from-kafka kafka-1:9092,kafka-2:9092 --yes
      quotagate quotas import --from-kafka kafka-1:9093 --kafka-property security_protocol=SSL \\
          --kafka-property ssl_cafile=ca.pem --multiply-by-brokers
    """
    servers = _servers(from_kafka)
    properties = _properties(kafka_property or (), env_file)
    asks = not yes and not dry_run and sys.stdin.isatty()
    kafka = _read(servers, properties, timeout)
    mapping = map_quotas(kafka, multiply=multiply_by_brokers)
    with connected(url, key, config) as node:
        plan = _plan(node, mapping)
        report = import_plan.report(from_kafka, kafka, mapping)
        if output == "table":
            _show(plan, report)
        if dry_run or not plan.changes:
            show.document({"version": plan.version, "changes": plan.changes, **report}, output)
            return
        if asks:
            plans.confirm(plan, node)
        version = _apply(node, plan, reason or f"import from Kafka at {from_kafka}")
    if not show.document({"version": version, "changes": plan.changes, **report}, output):
        show.line(f"Applied. The catalog is at version {version}.")


def _servers(from_kafka: str) -> Sequence[str]:
    try:
        return configuration.servers(from_kafka)
    except ValueError as error:
        raise typer.BadParameter(str(error).replace(configuration.BOOTSTRAP, "--from-kafka")) from None


def _properties(given: Sequence[str], env_file: Path | None) -> Mapping[str, Any]:
    """The configuration of the Kafka client: the command's properties override the environment's."""
    from app.node import settings

    options = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"--kafka-property {name}: write NAME=VALUE")
        options[name.lower().replace(".", "_")] = value
    try:
        return configuration.configuration(
            {**settings.kafka_properties(settings.given_variables(env_file)), **options}
        )
    except ValueError as error:
        variable, _, wrong = str(error).partition(":")
        name = variable.removeprefix(configuration.PREFIX).lower()
        if name in options:
            raise typer.BadParameter(f"--kafka-property {name}:{wrong}") from None
        raise NodeRequestError(str(error)) from None


def _read(servers: Sequence[str], properties: Mapping[str, Any], timeout: float) -> KafkaQuotas:
    with show.working(f"reading from {', '.join(servers)} ..."):
        try:
            return kafka_quotas.read(servers, properties, timeout)
        except KafkaError as error:
            raise NodeRequestError(*error.args) from None


def _plan(node: Node, mapping: QuotaMapping) -> ChangePlan:
    etag, current = catalog(node)
    alterations = import_plan.alterations(mapping, current)
    plan = ChangePlan(etag, alterations, [])
    for part in plans.parts(alterations):
        plan.changes.extend(plans.plan(node, etag, part).changes)
    return plan


def _apply(node: Node, plan: ChangePlan, reason: str) -> int:
    """Apply a plan in as many requests as it needs; as an import only adds, each part is valid alone."""
    etag, version, before = plan.etag, plan.version, 0
    for part in plans.parts(plan.alterations):
        try:
            version = plans.apply(node, ChangePlan(etag, part, []), reason)["version"]
        except NodeRequestError as error:
            if before:
                show.note(f"{count(before, 'entity was', 'entities were')} imported before that.")
            raise error from None
        etag, before = f'"{version}"', before + len(part)
    return version


def _show(plan: ChangePlan, report: Mapping[str, Any]) -> None:
    kafka = report["kafka"]
    brokers = count(len(kafka["brokers"]), "broker", "brokers")
    show.line(f"Kafka at {kafka['bootstrap']}: {brokers} ({', '.join(kafka['brokers'])}).")
    for note in report["notes"]:
        show.line(note)
    if report["left_out"]:
        show.line("Not imported:")
        show.table(
            ["ENTITY", "QUOTA", "VALUE", "REASON"],
            [tuple(one.values()) for one in report["left_out"]],
            right=["VALUE"],
        )
    plans.show_changes(
        plan, f"Nothing changes: the catalog, at version {plan.version}, holds Kafka's quotas."
    )
