"""Sends traffic to running nodes over HTTP, and records the truth of their answers.

The charges of exact sets follow from the answers alone: an id must have been charged if its ask went on and
no earlier ask had brought it in. The sums do not depend on the order of the decisions.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import httpx

from app.redaction import url_without_secrets
from workers.generate import quotas
from workers.generate.aside import written_aside
from workers.generate.traffic import LISTENER, Event, Traffic
from workers.generate.truth import Truth, Use, write_totals

TIMEOUT_S: Final = 30.0
FOLLOWED_WITHIN_S: Final = 10.0
OVERLOADED: Final = "urn:quotagate:overloaded"
SHED_TIMES: Final = 10
"""How often a call is sent again that a busy node shed without charging anything."""
WENT_ON: Final = frozenset({"admit", "delay"})


class DriveFailedError(Exception):
    """The traffic could not be sent as ordered; the text says why."""


@dataclass(frozen=True, slots=True)
class Drive:
    """The traffic to send, and the way to send it.

    Attributes:
        urls: the nodes, which are asked in turn.
        at_once: the most calls in flight at a time.
        batch: how many asks a call carries; 1 asks without a batch.
        paced: an ask is sent at its own time; otherwise as soon as ``at_once`` allows.
        retries: how often a throttled ask is asked again, after its throttle_ms.
        longest_wait_ms: an ask with a longer wait is not sent again.
        key: the API key to send, if any.
        set_quotas: whether to set the quotas of the traffic first.
    """

    traffic: Traffic
    urls: Sequence[str]
    at_once: int = 8
    batch: int = 20
    paced: bool = False
    retries: int = 0
    longest_wait_ms: int = 2_000
    key: str | None = None
    set_quotas: bool = False


def write_truth(
    order: Drive, truth: Path, progress: Callable[[int], None] = lambda _done: None
) -> dict[str, Any]:
    """Send the traffic, write its truth into a new folder, and return the totals.

    Raises:
        DriveFailedError: the quotas could not be set, or the truth could not be written.
    """
    try:
        with written_aside(truth) as (aside,):
            driven = _Driven(order, Truth(aside / "uses-0.parquet"), progress)
            began_ms = _now_ms()
            asyncio.run(driven.run())
            driven.truth.close()
            parameters = {
                "seed": order.traffic.seed,
                "events": order.traffic.events,
                "from_ms": began_ms,
                "to_ms": _now_ms(),
                "quotas": quotas.DEFINITIONS,
                "retries": driven.asked_again,
                "sources": driven.sources,
                "failed": driven.failed,
                "failures": driven.failures,
            }
            return write_totals(aside, parameters, [driven.truth.sums])
    except OSError as error:
        raise DriveFailedError(str(error)) from None


class Posts(Protocol):
    """The part of an HTTP client that is used here."""

    async def post(self, url: str, *, json: Any) -> httpx.Response:
        """Send JSON."""


@dataclass(slots=True)
class _Driven:
    """Traffic being sent, and the answers to it.

    Attributes:
        failed: asks that got no decision; whether they were charged is unknown.
        failures: some of the reasons, without repetition.
        sources: the number of answers by source; an answer without the store charged nothing.
    """

    order: Drive
    truth: Truth
    progress: Callable[[int], None]
    failed: int = 0
    asked_again: int = 0
    failures: list[str] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)
    _answered: int = 0
    _brought_in: set[tuple[str, int]] = field(default_factory=set)

    async def run(self) -> None:
        """Send everything, and wait for every answer."""
        order = self.order
        headers = {"Authorization": f"Bearer {order.key}"} if order.key else {}
        limits = httpx.Limits(max_connections=order.at_once)
        async with httpx.AsyncClient(
            headers=headers, limits=limits, timeout=TIMEOUT_S, trust_env=False
        ) as client:
            if order.set_quotas:
                await self._set_quotas(client)
            events = order.traffic.stream()
            calls = enumerate(iter(lambda: list(itertools.islice(events, order.batch)), []))
            began = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for _ in range(order.at_once):
                    group.create_task(self._send_some(client, calls, began))

    async def _set_quotas(self, client: httpx.AsyncClient) -> None:
        for entity, definitions in quotas.DEFINITIONS.items():
            path = f"/v1/quotas/{entity}"
            url, name = self.order.urls[0] + path, url_without_secrets(self.order.urls[0]) + path
            try:
                answer = await client.put(url, json=definitions, headers={"X-Reason": "quotagate generate"})
            except httpx.HTTPError as error:
                raise DriveFailedError(f"{name}: {str(error) or type(error).__name__}") from None
            if not answer.is_success:
                raise DriveFailedError(f"{name}: {answer.status_code} {answer.text}")
        for node in self.order.urls:
            await self._until_followed(client, node)

    async def _until_followed(self, client: httpx.AsyncClient, node: str) -> None:
        """Wait until a node decides by the new quotas; the other nodes follow within a second."""
        someone = {"principal": "p", "ip": "10.0.0.1", "broker": "1", "listener": LISTENER}
        wanted = {(entity, key) for entity, by_key in quotas.DEFINITIONS.items() for key in by_key}
        give_up = time.monotonic() + FOLLOWED_WITHIN_S
        while True:
            try:
                answer = await client.get(f"{node}/v1/quotas:effective", params=someone)
                answer.raise_for_status()
            except httpx.HTTPError as error:
                raise DriveFailedError(
                    f"{url_without_secrets(node)}: {str(error) or type(error).__name__}"
                ) from None
            if wanted <= {(each["entity"], each["quota"]) for each in answer.json()["quotas"]}:
                return
            if time.monotonic() > give_up:
                raise DriveFailedError(f"{url_without_secrets(node)}: does not decide by the new quotas")
            await asyncio.sleep(0.02)

    async def _send_some(
        self, client: Posts, calls: Iterator[tuple[int, Sequence[Event]]], began: float
    ) -> None:
        for number, events in calls:
            if self.order.paced:
                await asyncio.sleep(began + events[-1].at_ms / 1000 - time.monotonic())
            throttled = await self._ask(client, number, [(event, event.ask) for event in events])
            for _ in range(self.order.retries):
                throttled = await self._ask_again(client, number, throttled)

    async def _ask_again(
        self, client: Posts, number: int, throttled: Sequence[tuple[Event, dict[str, Any], int]]
    ) -> list[tuple[Event, dict[str, Any], int]]:
        """Repeat the asks whose wait is short enough; connections with a re-check, as in KIP-612."""
        waiting = [each for each in throttled if each[2] <= self.order.longest_wait_ms]
        if not waiting:
            return []
        await asyncio.sleep(max(wait for _, _, wait in waiting) / 1000)
        self.asked_again += len(waiting)
        asks = [
            (event, ask if event.principal is not None else {**ask, "recheck": True})
            for event, ask, _ in waiting
        ]
        return await self._ask(client, number + 1, asks)

    async def _ask(
        self, client: Posts, number: int, asks: Sequence[tuple[Event, dict[str, Any]]]
    ) -> list[tuple[Event, dict[str, Any], int]]:
        """Ask the next node; return the throttled asks and their waits."""
        node = self.order.urls[number % len(self.order.urls)]
        try:
            decisions = await _decisions(client, node, [ask for _, ask in asks])
        except (httpx.HTTPError, _RefusedError) as error:
            self._fail(f"{url_without_secrets(node)}: {str(error) or type(error).__name__}", len(asks))
            return []
        throttled = []
        for (event, ask), decision in zip(asks, decisions, strict=True):
            self._note(event, decision["decision"], decision["source"])
            if decision["decision"] == "throttle":
                throttled.append((event, ask, decision["throttle_ms"]))
        self._answered += len(asks)
        self.progress(self._answered)
        return throttled

    def _fail(self, why: str, asks: int) -> None:
        self.failed += asks
        if why not in self.failures and len(self.failures) < 10:
            self.failures.append(why)

    def _note(self, event: Event, decision: str, source: str) -> None:
        """Record the effect of an answer on each id of its ask."""
        principal, now_ms = event.principal or "", _now_ms()
        self.sources[source] += 1
        went_on = decision in WENT_ON and source == "store"
        new = [(principal, each) not in self._brought_in for each in event.ids]
        uses = [
            Use(event.number, now_ms, principal, id_, None, cause, is_new, is_new and went_on, decision)
            for id_, cause, is_new in zip(event.ids, event.causes, new, strict=True)
        ]
        if went_on:
            self._brought_in.update((principal, each) for each in event.ids)
        self.truth.asked(principal, decision, uses)


class _RefusedError(Exception):
    """A node answered with an error."""


async def _decisions(client: Posts, node: str, asks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(asks) == 1:
        return [await _posted(client, f"{node}/v1/decisions", asks[0])]
    return list((await _posted(client, f"{node}/v1/decisions:batch", {"asks": asks}))["decisions"])


async def _posted(client: Posts, url: str, body: Any) -> dict[str, Any]:
    answer = await client.post(url, json=body)
    for _ in range(SHED_TIMES):
        if (after_s := _shed_for_s(answer)) is None:
            break
        await asyncio.sleep(after_s)
        answer = await client.post(url, json=body)
    if not answer.is_success:
        raise _RefusedError(f"{answer.status_code} {answer.text[:300]}")
    return dict(answer.json())


def _shed_for_s(answer: httpx.Response) -> int | None:
    """Seconds until a call that was shed may be sent again; None if it was not shed."""
    if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or OVERLOADED not in answer.text:
        return None
    after = answer.headers.get("Retry-After", "")
    return int(after) if after.isdecimal() else 1


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
