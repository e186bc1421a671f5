"""The results of a run of the benchmark, and their raw JSON."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec

from tests.bench.arithmetic import Histogram, percentile
from tests.bench.generator import Found
from tests.bench.works import SERVICES, Work

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("uvicorn", "uvloop", "httptools", "msgspec", "hiredis", "redis", "fastapi", "pydantic")
SHED: Final = "503"
PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999, "max": 1.0}


class ShedError(Exception):
    """A busy node shed asks, so a measurement is not valid."""


class Measured(msgspec.Struct, kw_only=True):
    """The result of one load on one program.

    Attributes:
        api_us: processor time of the program for each decision, by the kernel's count; `store_us`: of its
            store.
        generator_us: the generator's processor time for each answer.
        busy: the program's processor time as a share of the time that passed; near 1 it was loaded fully.
        others: the share of the machine's processor time that went to neither the program, its store nor the
            generator.
        right: the share of decisions that the work expects; `local`: of decisions without the store.
        waits_ms: percentiles of the time to an answer.
        late_ms: the 99th percentile of the generator's delay in sending due requests (open loop).
    """

    wall_s: float
    answers: int
    decisions: int
    api_us: float
    store_us: float
    generator_us: float
    busy: float
    others: float
    right: float
    local: float
    unanswered: int
    waits_ms: dict[str, float]
    late_ms: float = 0.0

    @classmethod
    def of(cls, work: Work, found: Found, api_ns: int, store_ns: int) -> Measured:
        """The result of a work.

        Raises:
            ShedError: the machine was so busy that the service shed asks.
            AssertionError: an answer was not as the work expects it, or a connection was lost.
        """
        if work.subject in SERVICES and SHED in found.statuses:
            raise ShedError(f"{work.name}: {found.statuses}")
        assert found.lost == 0, f"{work.name}: {found.lost} connections were lost"
        assert found.answers, f"{work.name}: no answer"
        assert set(found.statuses) <= work.statuses, f"{work.name}: {found.statuses} {found.odd}"
        decisions = found.answers * work.asks
        right = found.expected / decisions if work.expected else 1.0
        # One of the odd requests has no ask.
        assert right > 0.98, (
            f"{work.name}: {found.expected} of {decisions} are as expected, not so: {found.odd}"
        )
        return cls(
            wall_s=found.wall_ns / 1e9,
            answers=found.answers,
            decisions=decisions,
            api_us=api_ns / decisions / 1000,
            store_us=store_ns / decisions / 1000,
            generator_us=found.own_ns / found.answers / 1000,
            busy=api_ns / found.wall_ns,
            others=max(0, found.machine_ns - api_ns - store_ns - found.own_ns)
            / found.wall_ns
            / (os.cpu_count() or 1),
            right=right,
            local=found.local / decisions,
            unanswered=found.unanswered,
            waits_ms=in_ms(found.waits),
            late_ms=percentile(found.lateness, 0.99) / 1e6,
        )


class Pair(msgspec.Struct, kw_only=True):
    """One work in one round of the closed loop, and the echo of its requests, measured right before it."""

    round: int
    name: str
    echo: Measured
    work: Measured


class OpenRun(msgspec.Struct, kw_only=True):
    """One work at a fixed rate.

    Attributes:
        share: the rate as a share of the capacity.
        capacity: answers a second in the closed loop.
    """

    round: int
    name: str
    share: float
    capacity: float
    rate: float
    measured: Measured


class Plan(msgspec.Struct, kw_only=True):
    """How a benchmark is run; the environment variables that narrow it are in docs/benchmarks/README.md."""

    works: str = "*"
    rounds: int = 7
    seconds: float = 1.0
    warm_s: float = 0.3
    connections: int = 64
    open_rounds: int = 3
    open_seconds: float = 4.0
    open_shares: tuple[float, ...] = (0.5, 0.9)

    @classmethod
    def of_environment(cls) -> Plan:
        """The plan from the ``BENCH_...`` variables."""
        said = {
            field: os.environ[name]
            for field in cls.__struct_fields__
            if (name := f"BENCH_{field.upper()}") in os.environ and field != "open_shares"
        }
        return msgspec.convert(said, cls, strict=False)


class Results(msgspec.Struct, kw_only=True):
    """All results of one run.

    Attributes:
        works: the measured works, by name.
        skipped: why a peer is missing, and which measurements were repeated because asks were shed.
        store_bytes: memory of the store for each principal that asked once, by kind of ask.
        resident_bytes: memory of each program after the rounds, without its store.
    """

    made_at: str
    command: str
    commit: str
    machine: dict[str, str]
    versions: dict[str, str]
    cores: str
    plan: Plan
    skipped: dict[str, str]
    works: dict[str, Work]
    pairs: list[Pair]
    open_runs: list[OpenRun]
    store_bytes: dict[str, float] = {}
    resident_bytes: dict[str, int] = {}

    def pairs_of(self, name: str) -> list[Pair]:
        """The rounds of one work."""
        return [pair for pair in self.pairs if pair.name == name]

    def open_runs_of(self, name: str, share: float) -> list[OpenRun]:
        """The rounds of one work at one rate."""
        return [each for each in self.open_runs if each.name == name and each.share == share]


def in_ms(histogram: Histogram) -> dict[str, float]:
    """The percentiles of a histogram, in milliseconds."""
    return {name: percentile(histogram, share) / 1e6 for name, share in PERCENTILES.items()}


def read(path: Path) -> Results:
    """The results in a file."""
    return msgspec.json.decode(path.read_bytes(), type=Results)


def write(results: Results, path: Path) -> None:
    """Write results as JSON, one measurement a line, so that versions can be compared."""
    text = msgspec.json.format(msgspec.json.encode(results), indent=1).decode()
    path.write_text(re.sub(r"\n {3,}", " ", text) + "\n", encoding="utf-8")


def machine() -> dict[str, str]:
    """The machine: processor, cores, memory, kernel, and its load now."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return {
        "processor": model[1] if model else platform.processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{memory:.0f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "load before": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def versions() -> dict[str, str]:
    """The versions of Python and of `PACKAGES`."""
    return {"Python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def commit() -> str:
    """The commit that is checked out, and whether files differ from it."""
    named = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=10"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return named.stdout.strip() or "unknown"


def now() -> str:
    """The time of day, to the minute."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
