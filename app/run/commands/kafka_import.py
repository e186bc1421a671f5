"""`quotagate quotas import --from-kafka`: a Kafka cluster's quotas, planned and taken over."""
# ruff: noqa: D301  a real backspace keeps the lines of examples apart

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from app.domain.quota import CONTROLLER_MUTATION_RATE
from app.domain.quota_value import ValueErrors
from app.run import kafka_client, kafka_quotas
from app.run.commands import plans, show
from app.run.commands.kafka_meaning import LeftOut, Meaning, beside, meaning
from app.run.commands.node import Node, connected
from app.run.commands.options import Reason
from app.run.commands.plans import Alteration, Plan
from app.run.commands.show import Out, Output
from app.run.commands.target import ConfigFile, Key, Url
from app.run.errors import CannotAsk
from app.run.kafka_quotas import KafkaQuotas

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
            help="Limits for all brokers together, times their number; else for each by itself, as in Kafka.",
            rich_help_panel=PANEL,
        ),
    ] = False,
    kafka_property: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A property of the Kafka client; before QUOTAGATE_KAFKA_NAME, which others cannot see.",
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
        typer.Option(
            min=0.1, metavar="SECONDS", help="The longest to wait for Kafka.", rich_help_panel=PANEL
        ),
    ] = WITHIN_S,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, and write nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    reason: Reason = None,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = Output.table,
) -> None:
    """Take over the quotas of a Kafka cluster.

    Shows the plan, and asks at a terminal. What Kafka does not have stays as it is.
    What cannot be taken over is named, with the reason, and does not stop the rest.

    \b
    Examples:
      quotagate quotas import --from-kafka kafka-1:9092 --dry-run
      quotagate quotas import --from-kafka kafka-1:9092,kafka-2:9092 --yes
      quotagate quotas import --from-kafka kafka-1:9093 --kafka-property security_protocol=SSL \\
          --kafka-property ssl_cafile=ca.pem --multiply-by-brokers
    """
    servers = _servers(from_kafka)
    configuration = _configuration(kafka_property or (), env_file)
    asks = not yes and not dry_run and sys.stdin.isatty()
    kafka = _read(servers, configuration, timeout)
    found = meaning(kafka, multiply=multiply_by_brokers)
    with connected(url, key, config) as node:
        plan = _plan(node, found)
        told = _told(from_kafka, kafka, found)
        if output is Output.table:
            _show(plan, told)
        if dry_run or not plan.changes:
            show.document({"version": plan.version, "changes": plan.changes, **told}, output)
            return
        if asks:
            plans.confirm(plan, node)
        version = _apply(node, plan, reason or f"import from Kafka at {from_kafka}")
    if not show.document({"version": version, "changes": plan.changes, **told}, output):
        typer.echo(f"Applied. The catalog is at version {version}.")


def _servers(from_kafka: str) -> Sequence[str]:
    try:
        return kafka_client.servers(from_kafka)
    except ValueError as error:
        raise typer.BadParameter(str(error).replace(kafka_client.BOOTSTRAP, "--from-kafka")) from None


def _configuration(given: Sequence[str], env_file: Path | None) -> Mapping[str, Any]:
    """What the Kafka client is told: the environment's properties, and those of the command before them."""
    from app.run import settings  # noqa: PLC0415  the help does without it

    options = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"--kafka-property {name}: write NAME=VALUE")
        options[name.lower().replace(".", "_")] = value
    try:
        return kafka_client.configuration({**settings.kafka_properties(env_file), **options})
    except ValueError as error:
        variable, _, wrong = str(error).partition(":")
        name = variable.removeprefix(kafka_client.PREFIX).lower()
        if name in options:
            raise typer.BadParameter(f"--kafka-property {name}:{wrong}") from None
        raise CannotAsk(str(error)) from None


def _read(servers: Sequence[str], configuration: Mapping[str, Any], timeout: float) -> KafkaQuotas:
    with show.progress().status(f"reading from {', '.join(servers)} ..."):
        try:
            return kafka_quotas.read(servers, configuration, timeout)
        except CannotAsk as error:  # what a broker said may be in it
            raise CannotAsk(show.plain_lines(str(error).splitlines())) from None


def _plan(node: Node, found: Meaning) -> Plan:
    """What must change; what does not go together with what stands is left out."""
    etag, now = plans.catalog(node)
    alterations: list[Alteration] = []
    for entity, quotas in found.quotas.items():
        stands, altered = now.get(entity, {}), {}
        for quota, fields in quotas.items():
            try:
                new = beside(entity, quota, fields, stands.get(quota))
            except ValueErrors as wrong:
                found.left_out.append(LeftOut(entity, quota, show.cell(fields["limit"]), str(wrong)))
                continue
            if stands.get(quota) != new:
                altered[quota] = new
        if altered:
            alterations.append({"entity": entity, "quotas": altered})
    plan = Plan(etag, alterations, [])
    for part in plans.parts(alterations):
        plan.changes.extend(plans.plan(node, etag, part).changes)
    return plan


def _apply(node: Node, plan: Plan, reason: str) -> int:
    """Apply a plan, in as many parts as it takes: each adds to what holds, so none waits for another."""
    etag, version, before = plan.etag, plan.version, 0
    for part in plans.parts(plan.alterations):
        try:
            version = plans.apply(node, Plan(etag, part, []), reason)["version"]
        except CannotAsk as error:
            if before:
                show.note(f"{plans.count(before, 'entity was', 'entities were')} taken over before that.")
            raise error from None
        etag, before = f'"{version}"', before + len(part)
    return version


def _told(from_kafka: str, kafka: KafkaQuotas, found: Meaning) -> dict[str, Any]:
    """What belongs to the plan beside the changes."""
    return {
        "kafka": {"bootstrap": from_kafka, "brokers": [broker.id for broker in kafka.brokers]},
        "scope": found.scope,
        "multiplied_by": found.times,
        "notes": [*_scopes(found), *found.notes],
        "left_out": [one._asdict() for one in sorted(found.left_out)],
    }


def _scopes(found: Meaning) -> Iterator[str]:
    """For whom the limits hold, and what was done to them."""
    if found.scope == "broker":
        yield "Limits hold on each broker by itself, as in Kafka (scope: broker); asks must name the broker."
    else:
        yield (
            f"Limits are multiplied by {found.times}, the number of brokers, and hold for all of them "
            "together (scope: cluster); those of brokers by name are as they were."
        )
    if any(CONTROLLER_MUTATION_RATE in quotas for quotas in found.quotas.values()):
        yield (
            "controller_mutation_rate is enforced by the one active controller: it is not multiplied, and "
            "holds for the whole cluster (scope: cluster)."
        )


def _show(plan: Plan, told: Mapping[str, Any]) -> None:
    kafka = told["kafka"]
    brokers = plans.count(len(kafka["brokers"]), "broker", "brokers")
    typer.echo(show.plain(f"Kafka at {kafka['bootstrap']}: {brokers} ({', '.join(kafka['brokers'])})."))
    for note in told["notes"]:
        typer.echo(show.plain(note))
    if told["left_out"]:
        typer.echo("Not taken over:")
        show.table(
            ["ENTITY", "QUOTA", "VALUE", "REASON"],
            [tuple(one.values()) for one in told["left_out"]],
            right=["VALUE"],
        )
    plans.show_changes(
        plan, f"Nothing changes: the catalog, at version {plan.version}, holds Kafka's quotas."
    )
