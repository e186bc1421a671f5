"""Rows of the decision log for replays, as Python objects; ``slices`` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from app.domain.ask import Ask
from app.domain.ladder import AppliedQuota


@dataclass(slots=True, eq=False)
class LoggedCaller:
    """A distinct caller: the fields of an ask that decide which quotas apply.

    Attributes:
        fields: the usage fields that its asks have.
        plan: a value that a replay derives from the caller and keeps here; None at first.
    """

    principal: str | None
    client_id: str | None
    ip: str | None
    broker: str | None
    listener: str | None
    cluster_action: bool
    has_ids: bool
    fields: tuple[str, ...]
    plan: Any = None

    def ask(self) -> Ask:
        """An ask of this caller, by which its quotas are found."""
        return Ask(
            dict.fromkeys(self.fields, 1.0),
            () if self.has_ids else None,
            self.principal,
            self.client_id,
            self.ip,
            self.broker,
            self.listener,
            cluster_action=self.cluster_action,
        )


@dataclass(slots=True, eq=False)
class VerdictQuota:
    """A distinct quota as it applied to a bucket, by the verdicts of the log.

    Attributes:
        target: a value that a replay derives from the quota and keeps here; None at first.
    """

    applied: AppliedQuota
    target: Any = None


class VerdictOfAsk(NamedTuple):
    """A verdict of the log.

    Attributes:
        rank: the place of the outcome in ``OUTCOMES``; a worse outcome has a higher rank.
        charged_ids: digests; empty unless the quota counts ids.
    """

    quota: VerdictQuota
    usage: float
    rank: int
    wait_ms: int
    observed: float | None
    remaining: float | None
    reason: str | None
    correction: int
    order: int | None
    charged_ids: tuple[bytes, ...]


class LoggedAsk(NamedTuple):
    """A row of the log with verdicts.

    Attributes:
        place: the row's place in the store's order.
        has_order: the store numbered it; else the place is an estimate.
        amounts: the usage of each field of the caller, in the caller's order.
        ids: the digests of its distinct ids.
        rank: the place of the decision in ``OUTCOMES``; 0 for kinds without a decision.
        change: of a lease or a settlement, its columns.
    """

    kind: str
    place: int
    has_order: bool
    at_ms: int
    node: str
    caller: LoggedCaller
    mode: str
    deny: bool
    recheck: bool
    amounts: tuple[float, ...]
    ids: tuple[bytes, ...]
    rank: int
    wait_ms: int
    charged: bool
    source: str | None
    replayed: bool
    failure: str | None
    limiting: str | None
    change: Mapping[str, Any] | None
    identity: tuple[str, int]
    verdicts: list[VerdictOfAsk]


class LoggedChange(NamedTuple):
    """A row of the log without verdicts: a reset, a load, a change of quotas or of the factor, and so on."""

    kind: str
    place: int
    at_ms: int
    node: str
    change: Mapping[str, Any]


LoggedRow = LoggedAsk | LoggedChange
