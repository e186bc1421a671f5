"""`quotagate generate`: traffic for running nodes, or a decision log of any size, with its truth."""
# ruff: noqa: D301  a real backspace keeps the lines of examples apart

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

from app.domain.decision import OUTCOMES
from app.domain.digest import secret_of
from app.run.commands import show
from app.run.commands.node.target import check_url
from app.run.commands.options import PlainErrorsGroup
from app.terminal import escape_output
from workers.generate.drive import Drive, DriveFailedError, write_truth
from workers.generate.progress import bar
from workers.generate.traffic import GENERATIONS, Traffic
from workers.generate.write_log import Order, WriteFailedError, write_log

HASHED_WITH: Final = "QUOTAGATE_HASH_SECRET"
END_MS: Final = int(datetime(4253, 1, 1, tzinfo=UTC).timestamp()) * 1000
"""The end of the year 4252: later microseconds have no place in the order, which is a signed integer."""

cli = typer.Typer(
    cls=PlainErrorsGroup,
    help="Make realistic traffic: principals of very different sizes; producers that live long, restart in "
    "a loop, restart after an error or create a producer per batch; and storms of connections after "
    "deployments. The same seed makes the same traffic.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong use.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Seed = Annotated[int, typer.Option(help="The same seed makes the same traffic.")]
Events = Annotated[int, typer.Option(min=1, max=GENERATIONS, help="How many asks.")]
Principals = Annotated[int, typer.Option(min=1, max=65_000, help="How many principals.")]
Zipf = Annotated[
    float,
    typer.Option(
        min=0.0, max=5.0, help="The n-th busiest principal asks n^-ZIPF times as often as the busiest."
    ),
]


def main() -> None:
    """Run the command line."""
    escape_output()
    cli(prog_name="quotagate generate")


@cli.command()
def log(
    to: Annotated[Path, typer.Option(help="The folder of the log; it must not exist yet.")],
    events: Events,
    seed: Seed = 1,
    truth: Annotated[
        Path | None, typer.Option(help="The folder of the ground truth; by default TO-truth.")
    ] = None,
    rate: Annotated[
        float, typer.Option(min=0.001, max=1e6, help="Asks per second, in the time of the log.")
    ] = 500.0,
    begin: Annotated[
        datetime,
        typer.Option(
            "--from",
            formats=["%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d"],
            help="When the traffic begins, in UTC.",
        ),
    ] = datetime(2026, 1, 1, tzinfo=UTC),
    until_now: Annotated[
        bool,
        typer.Option("--until-now", help="End the traffic now instead, so that a running store can load it."),
    ] = False,
    principals: Principals = 1_000,
    zipf: Zipf = 1.1,
    programs: Annotated[
        int | None,
        typer.Option(min=1, max=256, help="How many programs share the work; by default one per processor."),
    ] = None,
) -> None:
    """Write a decision log of any size, as nodes with QUOTAGATE_LOG=all would have, and its ground truth.

    The log is a folder of Parquet, decided exactly. The truth has uses-*.parquet, a row for each id that an
    ask names, and totals.json. Ids are hashed with QUOTAGATE_HASH_SECRET; set it to the deployment's secret,
    which may be in its catalog. Without it, ids are hashed with a secret derived from the seed.

    \b
    Examples:
      quotagate generate log --to traffic --events 1000000
      quotagate generate log --to traffic --events 1000000 --seed 7 --rate 100 --from 2026-03-01
    """
    _must_be_new("--to", to)
    truth_folder = truth or to.with_name(f"{to.name}-truth")
    _must_be_new("--truth", truth_folder)
    if to.absolute() == truth_folder.absolute():
        raise typer.BadParameter("must not be the folder of the log", param_hint="--truth")
    traffic = Traffic(seed, events, rate, principals, zipf)
    order = Order(
        traffic=traffic,
        start_ms=_start_ms(_begun(traffic) if until_now else begin, traffic),
        secret=_secret(seed),
        programs=programs or min(len(os.sched_getaffinity(0)), 256),
    )
    try:
        with bar("rows", events) as advance:
            totals = write_log(order, to, truth_folder, advance)
    except WriteFailedError as failed:
        _fail(str(failed))
    show.line(f"{to}: {_summary(totals['overall'])}; truth in {truth_folder}")


@cli.command()
def drive(
    url: Annotated[list[str], typer.Option(help="A node to ask; repeat for more, to ask them in turn.")],
    events: Events,
    truth: Annotated[Path, typer.Option(help="The folder of the ground truth; it must not exist yet.")],
    seed: Seed = 1,
    batch: Annotated[int, typer.Option(min=1, max=1_000, help="The number of asks in a call.")] = 20,
    at_once: Annotated[int, typer.Option(min=1, max=1_000, help="The most calls in progress at once.")] = 8,
    rate: Annotated[float, typer.Option(min=0.001, max=1e6, help="Asks per second of the traffic.")] = 500.0,
    paced: Annotated[
        bool, typer.Option("--paced", help="Send each ask at its own time, instead of as fast as possible.")
    ] = False,
    retries: Annotated[
        int, typer.Option(min=0, max=100, help="How often to repeat a throttled ask after its wait.")
    ] = 0,
    longest_wait_ms: Annotated[
        int, typer.Option(min=1, max=3_600_000, help="Do not repeat a throttled ask with a longer wait.")
    ] = 2_000,
    set_quotas: Annotated[
        bool, typer.Option("--set-quotas", help="First set the quotas that the traffic is made for.")
    ] = False,
    key: Annotated[str | None, typer.Option(envvar="QUOTAGATE_KEY", help="An API key of the nodes.")] = None,
    principals: Principals = 1_000,
    zipf: Zipf = 1.1,
) -> None:
    """Send traffic to running nodes, and write the ground truth of their answers.

    The truth has uses-0.parquet, a row for each id that an ask names, and totals.json. An ask that got no
    decision is counted as failed, because it may have been charged, and the command then ends with 1.

    \b
    Examples:
      quotagate generate drive --url http://127.0.0.1:8080 --events 10000 --truth truth
      quotagate generate drive --url http://n1:8080 --url http://n2:8080 --events 10000 --truth truth \\
        --set-quotas --key KEY --paced --retries 1
    """
    _must_be_new("--truth", truth)
    for each in url:
        try:
            check_url(each)
        except ValueError as wrong:
            raise typer.BadParameter(str(wrong), param_hint="--url") from None
    if key and not (key.isascii() and key.isprintable()):
        raise typer.BadParameter("the key has invalid characters", param_hint="--key")
    order = Drive(
        traffic=Traffic(seed, events, rate, principals, zipf),
        urls=[each.rstrip("/") for each in url],
        at_once=at_once,
        batch=batch,
        paced=paced,
        retries=retries,
        longest_wait_ms=longest_wait_ms,
        key=key,
        set_quotas=set_quotas,
    )
    try:
        with bar("asks", events) as advance:
            totals = write_truth(order, truth, advance)
    except DriveFailedError as failed:
        _fail(str(failed))
    show.line(f"{_summary(totals['overall'])}; truth in {truth}")
    if totals["failed"]:
        _fail(f"{totals['failed']:,} asks got no decision: {'; '.join(totals['failures'])}")


def _summary(overall: Mapping[str, int]) -> str:
    """The sums of the traffic in words: the decisions, each outcome that occurs, and the charged ids."""
    outcomes = ", ".join(f"{name} {overall[name]:,}" for name in OUTCOMES if overall[name])
    return f"{overall['asks']:,} decisions ({outcomes or 'none'}), {overall['charged']:,} ids charged"


def _must_be_new(option: str, folder: Path) -> None:
    if ":" in str(folder):  # Arrow would take it for a URL
        raise typer.BadParameter("must be a folder of this machine, without a colon", param_hint=option)
    if folder.exists():
        raise typer.BadParameter(f"{folder} is there already; name a new folder", param_hint=option)


def _begun(traffic: Traffic) -> datetime:
    """The time when the traffic must begin so that it ends now."""
    return datetime.now(UTC) - timedelta(milliseconds=traffic.length_ms + 1_000)


def _start_ms(begin: datetime, traffic: Traffic) -> int:
    """Return the start time in ms, after checking that the log has hours for all of the traffic."""
    start_ms = int(begin.replace(tzinfo=UTC).timestamp()) * 1000
    if start_ms < 0:
        raise typer.BadParameter(f"{begin:%Y-%m-%d} is before 1970, where no log begins", param_hint="--from")
    if start_ms + traffic.length_ms >= END_MS:
        raise typer.BadParameter(
            f"{traffic.events:,} asks at {traffic.rate:g} a second from there end after the year 4252; "
            "begin sooner, or raise --rate",
            param_hint="--from",
        )
    return start_ms


def _secret(seed: int) -> bytes:
    """The given secret of the deployment, so that ids match those in its store; else one from the seed."""
    given = os.environ.get(HASHED_WITH)
    if not given:
        return hashlib.blake2b(f"generated {seed}".encode(), digest_size=32).digest()
    try:
        return secret_of(given)
    except ValueError as wrong:
        _fail(f"{HASHED_WITH}: {wrong}")


def _fail(why: str) -> NoReturn:
    show.note(f"quotagate generate: {why}")
    raise typer.Exit(1)


if __name__ == "__main__":
    main()
