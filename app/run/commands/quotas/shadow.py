"""`quotagate quotas watch` and `promote`: shadow quotas, what they would have done, and making them live."""
# ruff: noqa: D301  a real backspace keeps the lines of examples apart

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from app.node.errors import CommandError
from app.run.commands import show, values
from app.run.commands.node.requests import connected
from app.run.commands.node.target import ConfigFile, Key, Url
from app.run.commands.options import Reason
from app.run.commands.quotas.entity import EntityArgument, IfMatch, written_headers
from app.run.commands.show import Out
from app.run.commands.top import curve
from app.terminal import duration

if TYPE_CHECKING:
    from rich.table import Table

group = typer.Typer()

PATH: Final = "/v1/quotas:shadow"
EVERY_S: Final = 1.0
STEP_MS: Final = 1_000
"""The width of a column of a curve."""
KEPT: Final = 60
"""How many reads the curves show."""
REFUSALS: Final = ("throttle", "reject")
THROTTLED: Final = ("delay", *REFUSALS)
VERDICTS: Final = ("admit", *THROTTLED)

Shadow = Mapping[str, Any]
"""A shadow quota in an answer."""


@group.command()
def watch(
    entity: EntityArgument,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """Show what the shadow quotas of an entity would have done: live at a terminal until Ctrl-C, else once.

    The counts are of the whole deployment, from any of its nodes, since the quota's last change. They have
    only asks that were let through. A curve shows, while you watch, how many a second would have waited.

    \b
    Examples:
      quotagate quotas watch 'user=*'
      quotagate quotas watch user=alice --url http://node-2:8080
      quotagate quotas watch 'user=*' -o json
    """
    of = str(values.entity(entity))
    with connected(url, key, config) as node:
        found = node.get(PATH, entity=of)
        if show.document(found, output):
            return
        if not sys.stdout.isatty():
            show.grids([_table(found["now_ms"], found["shadows"])])
            if not found["shadows"]:
                show.note(f"{found['entity']} has no shadow quota.")
            return
        reads = deque([found], maxlen=KEPT)
        with suppress(KeyboardInterrupt), show.live() as screen:
            while True:
                screen.update(show.group(_screen(reads)), refresh=True)
                time.sleep(EVERY_S)
                reads.append(node.get(PATH, entity=of))


@group.command()
def promote(
    entity: EntityArgument,
    keys: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY...]", help="Only these shadow quotas.", autocompletion=values.completed_names
        ),
    ] = None,
    reason: Reason = None,
    if_match: IfMatch = None,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """Make the shadow quotas of an entity live: all, or only those that are named.

    It shows which asks they would have delayed or refused so far, and changes nothing if the entity changed
    meanwhile. Without --reason the history gets these counts as the reason.

    \b
    Examples:
      quotagate quotas promote 'user=*'
      quotagate quotas promote user=alice request_rate --reason 'trial is over' --if-match 17
    """
    of = str(values.entity(entity))
    values.check_no_credentials(keys or ())
    with connected(url, key, config) as node:
        found = node.get(PATH, entity=of)
        promoted = _chosen(found, keys)
        for warning in _warnings(found, promoted):
            show.note(warning)
        version = found["version"] if if_match is None else if_match
        headers = written_headers(reason or _reason(found, promoted), version)
        live = {shadow["quota"]: {"shadow": None} for shadow in promoted}
        written = node.ask("PATCH", f"/v1/quotas/{of}", live, headers=headers).body
    if not show.document({"promoted": promoted, **written}, output):
        show.grids([_table(found["now_ms"], promoted)])
        show.note(f"Live at version {written['version']} of {written['entity']}: {', '.join(live)}.")


def _chosen(found: Mapping[str, Any], keys: Sequence[str] | None) -> list[Shadow]:
    """The shadow quotas to promote.

    Raises:
        CommandError: the entity has no shadow quota, or lacks one of the named keys.
    """
    shadows = {shadow["quota"]: shadow for shadow in found["shadows"]}
    if not shadows:
        raise CommandError(f"{found['entity']} has no shadow quota")
    if unknown := [key for key in keys or () if key not in shadows]:
        raise CommandError(
            f"{', '.join(unknown)}: no shadow quota of {found['entity']}; there is {', '.join(shadows)}"
        )
    return [shadow for quota, shadow in shadows.items() if not keys or quota in keys]


def _warnings(found: Mapping[str, Any], shadows: Sequence[Shadow]) -> Iterator[str]:
    """Warn of shadow periods that say little."""
    for shadow in shadows:
        quota, window = shadow["quota"], duration(shadow["window_ms"])
        if (in_shadow_ms := _in_shadow_ms(found["now_ms"], shadow)) is None:
            yield f"warning: it is unknown since when {quota} has been in shadow; its window is {window}."
        elif in_shadow_ms < shadow["window_ms"]:
            yield (
                f"warning: {quota} has been in shadow for {duration(in_shadow_ms)}, which is shorter "
                f"than its window of {window}: more asks may be refused than these counts say."
            )


def _reason(found: Mapping[str, Any], shadows: Sequence[Shadow]) -> str:
    """The reason for the history if none is given: the counts that the quotas had."""
    said = (
        f"{shadow['quota']} would have refused {refused(shadow):,} and delayed {shadow['delay']:,} of "
        f"{asks(shadow):,} asks in {_period(found['now_ms'], shadow)}"
        for shadow in shadows
    )
    return f"promoted from shadow: {'; '.join(said)}"


def asks(shadow: Shadow) -> int:
    """The asks that a shadow quota judged."""
    return sum(shadow[verdict] for verdict in VERDICTS)


def refused(shadow: Shadow) -> int:
    """The asks that a shadow quota would have refused.

    >>> refused({"admit": 5, "delay": 4, "throttle": 3, "reject": 2})
    5
    """
    return sum(shadow[verdict] for verdict in REFUSALS)


def throttled(shadow: Shadow) -> int:
    """The asks that a shadow quota would have delayed or refused.

    >>> throttled({"admit": 5, "delay": 4, "throttle": 3, "reject": 2})
    9
    """
    return sum(shadow[verdict] for verdict in THROTTLED)


def _in_shadow_ms(now_ms: int, shadow: Shadow) -> int | None:
    """How long a quota has been in shadow as it is; None if unknown. The clocks of two hosts may differ."""
    return None if shadow["since_ms"] is None else max(now_ms - shadow["since_ms"], 0)


def _period(now_ms: int, shadow: Shadow) -> str:
    in_shadow_ms = _in_shadow_ms(now_ms, shadow)
    return "an unknown time" if in_shadow_ms is None else duration(in_shadow_ms)


def _table(now_ms: int, shadows: Sequence[Shadow]) -> Table:
    """A row for each shadow quota."""
    header = ["QUOTA", "LIMIT", "IN SHADOW FOR", "ASKS", "WOULD DELAY", "WOULD REFUSE"]
    rows = [
        (
            shadow["quota"],
            shadow["limit"],
            _period(now_ms, shadow),
            show.measured(judged := asks(shadow)),
            _part(shadow["delay"], judged),
            _part(refused(shadow), judged),
        )
        for shadow in shadows
    ]
    return show.grid(header, rows, right=header[1:])


def _part(count: int, of: int) -> str:
    """A count, and how much of the whole it is.

    >>> _part(5_000, 1_000_000), _part(0, 1_000)
    ('5,000 (0.50%)', '0')
    """
    return f"{count:,} ({count / of:.2%})" if count else "0"


def _screen(reads: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """The tables of a screen: the counts so far, and what was added while they were read."""
    newest = reads[-1]
    yield show.grid(
        ["ENTITY", "VERSION", "AT"], [[newest["entity"], newest["version"], show.when(newest["now_ms"])]]
    )
    yield _table(newest["now_ms"], newest["shadows"])
    rows = []
    for shadow in newest["shadows"]:
        judged, waits = (rates(reads, shadow["quota"], count) for count in (asks, throttled))
        end_ms = len(reads) * STEP_MS
        rows.append(
            (
                shadow["quota"],
                show.measured(judged.get(end_ms)),
                show.measured(waits.get(end_ms)),
                curve(waits, end_ms),
            )
        )
    header = ["QUOTA", "ASKS A SECOND", "DELAYED OR REFUSED", "CURVE"]
    yield show.grid(header, rows, right=header[1:3])


def rates(reads: Sequence[Mapping[str, Any]], quota: str, count: Callable[[Shadow], int]) -> dict[int, float]:
    """The counts per second between two reads, by the number of the later read times ``STEP_MS``.

    A pair of reads is left out if the quota was not in shadow at both, or changed in between.
    """
    found = {}
    for place, (before, after) in enumerate(pairwise(reads), 2):
        old, new = (
            next((shadow for shadow in read["shadows"] if shadow["quota"] == quota), None)
            for read in (before, after)
        )
        passed_ms = after["now_ms"] - before["now_ms"]
        if old and new and old["since_ms"] == new["since_ms"] and passed_ms > 0:
            found[place * STEP_MS] = max(count(new) - count(old), 0) * 1000 / passed_ms
    return found
