"""`quotagate quotas import-envoy`: quotas and a mapping from a configuration of envoyproxy/ratelimit."""
# ruff: noqa: D301  a real backspace keeps the lines of examples apart

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Final

import typer

from app.node.errors import NodeRequestError
from app.run.commands import show
from app.run.commands.quotas.catalog_schema import NAME as SCHEMA
from app.run.commands.show import Out
from app.terminal import count

if TYPE_CHECKING:
    from app.envoy.importing import EnvoyImport

QUOTAS: Final = "quotas.yaml"
MAPPING: Final = "mapping.yaml"

group = typer.Typer()


@group.command("import-envoy")
def import_envoy(
    file: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            dir_okay=False,
            help="Configurations, or ConfigMaps that hold them.",
            metavar="FILE...",
        ),
    ],
    out: Annotated[
        Path, typer.Option(file_okay=False, help="The folder to write to; it is made if need be.")
    ],
    *,
    force: Annotated[bool, typer.Option("--force", help="Replace files of an earlier import.")] = False,
    merge_domains: Annotated[
        bool,
        typer.Option("--merge-domains", help="Join a domain of several files, as MERGE_DOMAIN_CONFIG does."),
    ] = False,
    allow_looser: Annotated[
        bool, typer.Option("--allow-looser", help="Exit with 0 although a limit is lost or looser.")
    ] = False,
    output: Out = "table",
) -> None:
    """Turn a configuration of envoyproxy/ratelimit into quotas.yaml and mapping.yaml.

    Parts that cannot be imported are listed with the reason, and whether the result is looser or stricter;
    the rest is written all the same. The exit code is 1 if a limit is lost or looser. No node is asked: the
    quotas are applied by `quotas apply`, and QUOTAGATE_ENVOY_MAPPING names the mapping.

    \b
    Examples:
      quotagate quotas import-envoy ratelimit/config.yaml --out envoy
      quotagate quotas import-envoy configmaps.yaml --merge-domains --out envoy
      quotagate quotas apply -f envoy/quotas.yaml --only-named
    """
    from app.envoy.importing import EnvoyConfigurationError, EnvoyImport  # it loads PyYAML

    found = EnvoyImport(merge_domains=merge_domains)
    for each in file:
        try:
            found.add(each.read_bytes())
        except (EnvoyConfigurationError, OSError) as error:
            raise NodeRequestError(f"{each}: {error}") from None
    written = {QUOTAS: "".join(_quotas(found)), MAPPING: _mapping(found)}
    for name in written:
        if (out / name).exists() and not force:
            raise NodeRequestError(f"{out / name} is there already; --force replaces it")
    out.mkdir(parents=True, exist_ok=True)
    for name, text in written.items():
        (out / name).write_text(text, encoding="utf-8")
    shown = {
        "files": [str(out / name) for name in written],
        "rows": [row._asdict() for row in found.rows],
        "left_out": [each._asdict() for each in found.left_out],
    }
    if not show.document(shown, output):
        _show(found)
        _say_next(found, out)
    if found.is_looser and not allow_looser:
        raise NodeRequestError(
            "limits are lost or looser than the original; --allow-looser makes the exit code 0"
        )


def _show(found: EnvoyImport) -> None:
    show.table(
        ["DOMAIN", "DESCRIPTOR", "LIMIT", "SHADOW", "ENTITY"],
        [(row.domain, row.path, row.limit, "yes" if row.shadow else "", row.entity) for row in found.rows],
        right=["LIMIT"],
    )
    if found.left_out:
        show.line("Not taken:")
        show.table(
            ["DOMAIN", "DESCRIPTOR", "WHAT", "RESULT", "REASON"],
            [(each.domain, each.path, each.what, each.effect, each.reason) for each in found.left_out],
        )


def _say_next(found: EnvoyImport, out: Path) -> None:
    quotas = count(len(found.quotas), "quota", "quotas")
    show.note(f"Wrote {quotas} to {out / QUOTAS}, and what descriptors name to {out / MAPPING}.")
    show.note(f"Next: quotagate quotas apply --only-named -f {quote(str(out / QUOTAS))}")
    show.note(f"      QUOTAGATE_ENVOY_PORT=8081 QUOTAGATE_ENVOY_MAPPING={quote(str(out / MAPPING))}")


def _quotas(found: EnvoyImport) -> Iterator[str]:
    from app import quota_file

    yield f"# yaml-language-server: $schema={SCHEMA}\n"
    yield "# Made by `quotagate quotas import-envoy`; apply it with --only-named to keep other quotas.\n"
    yield from quota_file.quota_lines(quota_file.ordered(found.quotas.items()))


def _mapping(found: EnvoyImport) -> str:
    from app.run.commands.quotas.short_yaml import dump

    head = (
        "# Made by `quotagate quotas import-envoy` for QUOTAGATE_ENVOY_MAPPING; docs/envoy.md explains it.\n"
    )
    return head + dump(found.mapping())
