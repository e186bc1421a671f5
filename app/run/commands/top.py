"""`quotagate top`: the whole deployment, live at a terminal."""
# ruff: noqa: D301  a real backspace keeps the lines of examples apart

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from app.run.commands import show
from app.run.commands.node.requests import Node, connected
from app.run.commands.node.target import ConfigFile, Key, Url
from app.run.commands.show import Out
from app.run.commands.volumes import bar, size
from app.terminal import duration

if TYPE_CHECKING:
    from rich.table import Table

PATH: Final = "/v1/overview"
EVERY_S: Final = 1.0
SPAN_MS: Final = 60_000
"""How far the entries shown go back."""
END_MS: Final = 2**53 - 1
"""A time after all entries."""
NEWEST_WITHIN_MS: Final = 4_000
"""The newest entry ends at most so long ago, unless samples are lost."""
COUNTED: Final = ("admit", "delay", "throttle", "reject", "local", "fallback", "shed", "shadow_refused")
"""The fields of an entry that count asks."""
QUANTILES: Final = {"p50": 0.5, "p99": 0.99}
MOST_BUCKETS: Final = 10
BLOCKS: Final = "▁▂▃▄▅▆▇█"
COUNTS_COLUMNS: Final = 40
"""The width of the counts, on the left of their curve."""


class Increment(NamedTuple):
    """The entries and the throttled buckets of one answer, which begin after ``since_ms``."""

    since_ms: int
    series: Sequence[Mapping[str, Any]]
    throttled: Sequence[Mapping[str, Any]]


class Recent:
    """The last minute of a deployment, read by increments.

    Attributes:
        parts: the increments with entries of the last minute, oldest first. The first one may begin up to a
            minute earlier.
    """

    def __init__(self, node: Node) -> None:
        self.parts: deque[Increment] = deque()
        self._node = node
        self._since_ms = END_MS
        self._now_ms = 0

    def read(self) -> Mapping[str, Any]:
        """Read the new entries, and return the answer.

        Raises:
            NodeRequestError: the node refused the request, or did not answer.
        """
        found = self._node.get(PATH, since_ms=self._since_ms)
        # At the start, and after the store's clock went back. A node that has not read the store yet says 0.
        if 0 < found["now_ms"] < self._since_ms:
            self.parts.clear()
            self._since_ms = max(found["now_ms"] - SPAN_MS, 0)
            found = self._node.get(PATH, since_ms=self._since_ms)
        if series := found["series"]:
            self.parts.append(Increment(self._since_ms, series, found["throttled"]))
            self._since_ms = series[-1]["at_ms"]
        self._now_ms = found["now_ms"]
        while self.parts and self.parts[0].series[-1]["at_ms"] <= self._now_ms - SPAN_MS:
            self.parts.popleft()
        return found

    @property
    def series(self) -> list[Mapping[str, Any]]:
        """The entries of the last minute, oldest first."""
        since_ms = self._now_ms - SPAN_MS
        return [entry for part in self.parts for entry in part.series if entry["at_ms"] > since_ms]

    @property
    def end_ms(self) -> int:
        """The end of the newest second, whose entry may have been lost."""
        newest_ms = self.parts[-1].series[-1]["at_ms"] if self.parts else 0
        return max(newest_ms, (self._now_ms - NEWEST_WITHIN_MS) // 1000 * 1000)

    def throttled(self) -> Iterator[tuple[str, str, int, int]]:
        """The buckets of all parts, most throttled first: quota, bucket, asks, throttle times in ms."""
        sums: dict[tuple[str, str], tuple[int, int]] = {}
        for each in (each for part in self.parts for each in part.throttled):
            asks, throttle_ms = sums.get((each["quota"], each["bucket"]), (0, 0))
            sums[each["quota"], each["bucket"]] = asks + each["asks"], throttle_ms + each["throttle_ms"]
        return ((*names, *counts) for names, counts in sorted(sums.items(), key=lambda sum_: -sum_[1][0]))


def top(url: Url = None, key: Key = None, config: ConfigFile = None, output: Out = "table") -> None:
    """Show the whole deployment from any of its nodes: live at a terminal until Ctrl-C, else once.

    A curve is the last minute by the second, each in a scale of its own. A second whose samples were lost
    is a gap. JSON and YAML are the answer of GET /v1/overview, with the last 15 minutes.

    \b
    Examples:
      quotagate top
      quotagate top --url http://node-2:8080
      quotagate top -o json
    """
    with connected(url, key, config) as node:
        if output != "table":
            show.document(node.get(PATH), output)
            return
        recent = Recent(node)
        if not sys.stdout.isatty():
            show.grids(_grids(recent.read(), recent))
            return
        with suppress(KeyboardInterrupt), show.live() as screen:
            while True:
                screen.update(show.group(_grids(recent.read(), recent)), refresh=True)
                time.sleep(EVERY_S)


def _grids(found: Mapping[str, Any], recent: Recent) -> Iterator[Table]:
    """The tables of a screen."""
    yield show.grid(
        ["AT", "NODES", "THROTTLE FACTOR"],
        [[show.when(found["now_ms"] or None), len(found["nodes"]), show.measured(found["throttle_factor"])]],
    )
    yield _counts(recent, found["latency_ms"], drawn=sys.stdout.isatty())
    if throttled := list(recent.throttled()):
        seconds = (recent.parts[-1].series[-1]["at_ms"] - recent.parts[0].since_ms) / 1000
        yield show.grid(
            ["BUCKET", "QUOTA", "THROTTLED A SECOND", "MEAN WAIT"],
            [
                (bucket, quota, show.measured(asks / seconds), duration(throttle_ms / asks))
                for quota, bucket, asks, throttle_ms in throttled[:MOST_BUCKETS]
            ],
            right=["THROTTLED A SECOND", "MEAN WAIT"],
        )
    yield show.grid(
        ["STORE", "USED", "", "BYTES", "OF", "FAULTS"],
        [_store(store) for store in found["stores"]],
        right=["", "BYTES", "OF"],
    )
    yield show.grid(
        ["NODE", "VERSION", "SEEN"],
        [
            (node["node"], node["version"], f"{duration(max(found['now_ms'] - node['seen_ms'], 0))} ago")
            for node in found["nodes"]
        ],
        right=["SEEN"],
    )


def _counts(recent: Recent, latency_ms: Sequence[int], *, drawn: bool) -> Table:
    """The counts of the newest second and of the last minute, if drawn with curves."""
    series, end_ms = recent.series, recent.end_ms
    steps = list(pairwise(series))
    rows: list[list[Any]] = []
    for field in COUNTED:
        rates = {
            entry["at_ms"]: entry[field] * 1000 / (entry["at_ms"] - before["at_ms"])
            for before, entry in steps
        }
        total = sum(entry[field] for entry in series)
        numbers = map(show.measured, (rates.get(end_ms), total))
        rows.append([field.replace("_", " "), *numbers, curve(rates, end_ms)])
    queue = {entry["at_ms"]: entry["queue_asks"] for entry in series}
    rows.append(["waiting", show.measured(queue.get(end_ms)), None, curve(queue, end_ms)])
    newest = [entry["latency"] for entry in series if entry["at_ms"] == end_ms]
    for name, part in QUANTILES.items():
        spans = (newest, [entry["latency"] for entry in series])
        rows.append(
            [name, *(quantile([*map(sum, zip(*each, strict=True))], latency_ms, part) for each in spans), ""]
        )
    header = ["", "NOW", "LAST MINUTE", "CURVE"]
    used = len(header) if drawn else len(header) - 1
    return show.grid(header[:used], [row[:used] for row in rows], right=header[:3][1:])


def _store(store: Mapping[str, Any]) -> tuple[Any, ...]:
    used, most = store["memory_bytes"], store["max_bytes"]
    part = used / most if used is not None and most else None
    return (
        store["primary"],
        None if part is None else bar(part, drawn=sys.stdout.isatty()),
        "" if part is None else f"{part:.0%}",
        size(used),
        size(most or None),
        store["faults"],
    )


def curve(values: Mapping[int, float], end_ms: int) -> str:
    """Draw values by time (ms), one column a second; a second without a value is empty.

    >>> curve({1000: 0, 2000: 4, 4000: 8}, 5000)
    '▁▅ █ '
    """
    most, first_ms = max(values.values(), default=0) or 1, min(values, default=end_ms)
    width = min((end_ms - first_ms) // 1000 + 1, max(show.columns() - COUNTS_COLUMNS, 1))
    found = (values.get(end_ms - 1000 * place) for place in reversed(range(width)))
    return "".join(" " if one is None else BLOCKS[round(one / most * (len(BLOCKS) - 1))] for one in found)


def quantile(counts: Sequence[int], bounds_ms: Sequence[int], part: float) -> str:
    """Return the bound that a part of all answers did not exceed.

    >>> quantile([98, 1, 1], [1, 2], 0.99), quantile([98, 1, 1], [1, 2], 1), quantile([0, 0, 0], [1, 2], 0.5)
    ('≤ 2 ms', '> 2 ms', '-')
    """
    needed = part * sum(counts)
    if not needed:
        return "-"
    for bound, reached in zip(bounds_ms, accumulate(counts), strict=False):
        if reached >= needed:
            return f"≤ {duration(bound)}"
    return f"> {duration(bounds_ms[-1])}"
