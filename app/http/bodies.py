"""The bodies of asks and decisions. In the OpenAPI document their names go without ``Body``."""

from __future__ import annotations

from typing import Annotated, Final, Generic, Literal, TypeVar

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from app.admission.lease_names import LONGEST_NAME
from app.domain.ask import Mode
from app.domain.decision import Outcome, Reason, Source
from app.domain.digest import INT64
from app.domain.holds import LONGEST_LEASE_MS
from app.domain.quota import MAX_EXACT, Enforcement

MAX_ASKS: Final = 1_000
MAX_IDS: Final = 1_000
MAX_IDS_IN_BATCH: Final = 10_000
MAX_ID_BYTES: Final = 64
MAX_PRODUCER_ID_BYTES: Final = 256
MAX_SETTLED: Final = 100
"""How many leases one request may settle: as many as one call of the store decides."""

_NO_CONTROLS: Final = {"pattern": r"^[^\u0000-\u001f\u007f-\u009f]*$"}
_AN_IP: Final = {"anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]}

Count = Annotated[int, Meta(ge=0, le=MAX_EXACT)]
Amount = Annotated[float, Meta(ge=0, le=MAX_EXACT)]
NumberId = Annotated[int, Meta(ge=INT64[0], le=INT64[-1])]
TextId = Annotated[str, Meta(min_length=1, max_length=MAX_PRODUCER_ID_BYTES)]
Name = Annotated[str, Meta(min_length=1, max_length=512, extra_json_schema=_NO_CONTROLS)]
ClientName = Annotated[str, Meta(max_length=512, extra_json_schema=_NO_CONTROLS)]
LeaseText = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
Address = Annotated[str, Meta(extra_json_schema=_AN_IP)]


U = TypeVar("U", bound="LeaseUsageBody")


class LeaseUsageBody(Struct, forbid_unknown_fields=True, gc=False):
    """Usage that a lease can hold: everything but producer ids."""

    requests: Count | UnsetType = UNSET
    connections: Count | UnsetType = UNSET
    mutations: Count | UnsetType = UNSET
    produce_bytes: Amount | UnsetType = UNSET
    fetch_bytes: Amount | UnsetType = UNSET
    request_time_ms: Amount | UnsetType = UNSET


class UsageBody(LeaseUsageBody):
    """The usage that an ask charges; at least one field."""

    producer_ids: Annotated[list[NumberId | TextId], Meta(max_length=MAX_IDS)] | UnsetType = UNSET


class NamedUsageBody(Struct, Generic[U], forbid_unknown_fields=True, gc=False):
    """Usage, and the names by which its quotas are found."""

    usage: U
    principal: Name | None = None
    client_id: ClientName | None = None
    ip: Address | None = None
    broker: Name | None = None
    listener: Name | None = None


class AskBody(NamedUsageBody[UsageBody]):
    """One ask."""

    mode: Mode = "admit"
    enforcement: Literal["deny"] | UnsetType = UNSET
    recheck: bool = False
    cluster_action: bool = False
    detail: bool = False
    id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_BYTES)] | UnsetType = UNSET
    at_ms: Count | UnsetType = UNSET


class BatchBody(Struct, forbid_unknown_fields=True, gc=False):
    """Asks, which are decided in this order, each by itself."""

    asks: Annotated[list[AskBody], Meta(min_length=1, max_length=MAX_ASKS)]


class RawBatchBody(Struct, forbid_unknown_fields=True, gc=False):
    """A batch whose asks are not read yet."""

    asks: Annotated[list[Raw], Meta(min_length=1, max_length=MAX_ASKS)]


class LimitedByBody(Struct, gc=False):
    """The quota that decided, or `throttle_factor`; `reason` if the cause was not the rate itself."""

    quota: str
    entity: str | None
    bucket: str | None
    reason: Reason | UnsetType = UNSET
    largest: float | UnsetType = UNSET


class VerdictBody(Struct, gc=False):
    """What one quota that applied would decide alone; unknown numbers are null."""

    quota: str
    entity: str
    bucket: str
    limit: float
    verdict: Outcome
    throttle_ms: int
    observed: float | None
    remaining: float | None
    enforcement: Enforcement
    shadow: bool


class DecisionBody(Struct, gc=False):
    """The answer to an ask; `quotas` only with `detail`."""

    decision: Outcome
    throttle_ms: int
    charged: bool
    applied: int
    source: Source
    limited_by: LimitedByBody | None
    quotas: list[VerdictBody] | UnsetType = UNSET


class DecisionsBody(Struct, gc=False):
    """The answers to a batch, in the order of its asks."""

    decisions: list[DecisionBody]


class WishBody(NamedUsageBody[LeaseUsageBody]):
    """The names that a lease is for, and the usage that it should hold at most; 0 to settle only."""

    at_ms: Count | UnsetType = UNSET


class SettlementBody(Struct, forbid_unknown_fields=True, gc=False):
    """What was spent of a lease; a field that is left out was not spent."""

    lease: LeaseText
    usage: LeaseUsageBody


class LeaseRequestBody(Struct, forbid_unknown_fields=True, gc=False):
    """A lease to ask for, and leases to settle before."""

    ask: WishBody
    lease_ms: Annotated[int, Meta(ge=1, le=LONGEST_LEASE_MS)]
    settle: Annotated[list[SettlementBody], Meta(max_length=MAX_SETTLED)] = []


class SpentBody(Struct, forbid_unknown_fields=True, gc=False):
    """What was spent of the lease that the path names; a field that is left out was not spent."""

    usage: LeaseUsageBody


class SettledBody(Struct, gc=False):
    """Whether a lease was settled: not if it is over, or if this key has no such lease."""

    lease: str
    ok: bool


class LeaseBody(Struct, gc=False):
    """What was granted; `lease` is null and `granted` empty if nothing was, and then the decision says why.

    Renew a lease within `renew_ms`, and stop spending `lease_ms` after the moment before it was asked for.
    """

    lease: str | None
    granted: dict[str, float]
    lease_ms: int
    renew_ms: int
    decision: Outcome
    throttle_ms: int
    limited_by: LimitedByBody | None
    source: Source
    settled: list[SettledBody]
