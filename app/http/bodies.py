"""The bodies of asks and decisions. In the OpenAPI document their names go without ``Body``."""

from __future__ import annotations

from typing import Annotated, Final, Generic, Literal, TypeVar

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from app.admission.leases.names import LONGEST_NAME
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
NAME_SCHEMA: Final = {"type": "string", "minLength": 1, "maxLength": 512, **_NO_CONTROLS}
"""The schema of such a name, for parameters."""
ClientName = Annotated[str, Meta(max_length=512, extra_json_schema=_NO_CONTROLS)]
LeaseText = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
Address = Annotated[str, Meta(extra_json_schema=_AN_IP)]


U = TypeVar("U", bound="LeaseUsageBody")


class LeaseUsageBody(Struct, forbid_unknown_fields=True, gc=False):
    """Usage that a lease can hold: everything but producer ids."""

    requests: Annotated[Count, Meta(description="Requests.")] | UnsetType = UNSET
    connections: Annotated[Count, Meta(description="New connections.")] | UnsetType = UNSET
    mutations: Annotated[Count, Meta(description="Partitions created or deleted (KIP-599).")] | UnsetType = (
        UNSET
    )
    produce_bytes: (
        Annotated[
            Amount, Meta(description="Bytes produced. The throttle factor of volumes scales their limits.")
        ]
        | UnsetType
    ) = UNSET
    fetch_bytes: Annotated[Amount, Meta(description="Bytes fetched.")] | UnsetType = UNSET
    request_time_ms: (
        Annotated[Amount, Meta(description="Time that threads spent on the request, in milliseconds.")]
        | UnsetType
    ) = UNSET


class UsageBody(LeaseUsageBody):
    """The usage that an ask charges; at least one field."""

    producer_ids: (
        Annotated[
            list[NumberId | TextId],
            Meta(
                max_length=MAX_IDS,
                description="Producer ids that the work names; ids of the principal that are not remembered "
                "are charged. Duplicates count once, and -1 (no id) never. The text of a whole number is "
                "that number.",
            ),
        ]
        | UnsetType
    ) = UNSET


class NamedUsageBody(Struct, Generic[U], forbid_unknown_fields=True, gc=False):
    """Usage, and the names by which its quotas are found."""

    usage: Annotated[U, Meta(description="The work, by its kinds.")]
    principal: Annotated[
        Name | None,
        Meta(description="The user. null: no user, so no quota of users applies."),
    ] = None
    client_id: Annotated[
        ClientName | None,
        Meta(description="The client. It may be empty, and is then a client with an empty name; null: none."),
    ] = None
    ip: Annotated[
        Address | None,
        Meta(description="The address of the caller's connection, IPv4 or IPv6, without a zone."),
    ] = None
    broker: Annotated[Name | None, Meta(description="The broker that does the work.")] = None
    listener: Annotated[Name | None, Meta(description="The listener that the connection came in by.")] = None


class AskBody(NamedUsageBody[UsageBody]):
    """One ask."""

    mode: Annotated[
        Mode,
        Meta(
            description="`admit` decides and charges. `peek` answers the same and charges nothing. `record` "
            "is for work that is already done: it always charges, and never refuses. `refund` gives back."
        ),
    ] = "admit"
    enforcement: (
        Annotated[
            Literal["deny"],
            Meta(description="Decide every quota of this ask as `deny`: for work that can be refused."),
        ]
        | UnsetType
    ) = UNSET
    recheck: Annotated[
        bool,
        Meta(
            description="true: the second ask for a connection that was held (KIP-612). Over the limit of "
            "its address a new connection is answered `throttle`, with a `throttle_ms` of at most 1,000. The "
            "caller holds the socket for that long, and asks again with `recheck`; that is answered `admit`, "
            "or `reject`: close the connection."
        ),
    ] = False
    cluster_action: Annotated[
        bool,
        Meta(
            description="true: an authorised request of the cluster itself, such as StopReplica, "
            "ControlledShutdown, LeaderAndIsr, UpdateMetadata, or a fetch of a replica. It is exempt from "
            "`request_rate` and `request_percentage` (KIP-124). Needs a key with the scope `account`."
        ),
    ] = False
    detail: Annotated[bool, Meta(description="true: answer with `quotas`, each quota that applied.")] = False
    id: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=MAX_ID_BYTES,
                description="Names this attempt, for retries. If its answer charged, the same ask with the "
                "same id gets that answer again for 60 s, and is not charged again.",
            ),
        ]
        | UnsetType
    ) = UNSET
    at_ms: Annotated[Count, Meta(description="The time of the ask by the caller's clock.")] | UnsetType = (
        UNSET
    )


class BatchBody(Struct, forbid_unknown_fields=True, gc=False):
    """Asks, which are decided in this order, each by itself."""

    asks: Annotated[
        list[AskBody], Meta(min_length=1, max_length=MAX_ASKS, description="The asks, in their order.")
    ]


class RawBatchBody(Struct, forbid_unknown_fields=True, gc=False):
    """A batch whose asks are not read yet."""

    asks: Annotated[list[Raw], Meta(min_length=1, max_length=MAX_ASKS)]


class LimitedByBody(Struct, gc=False):
    """The quota that decided, or `throttle_factor`; `reason` if the cause was not the rate itself."""

    quota: Annotated[str, Meta(description="The quota key, or `throttle_factor`.")]
    entity: Annotated[
        str | None, Meta(description="The entity that the quota is set on; null for `throttle_factor`.")
    ]
    bucket: Annotated[
        str | None, Meta(description="The bucket that the quota charges; null for `throttle_factor`.")
    ]
    reason: (
        Annotated[
            Reason,
            Meta(
                description="`capacity`: no more producer ids can be remembered. `too_large`: no empty "
                "bucket could hold the usage. `store_failure`, `store_full`: `on_store_failure` of the "
                "quota decided."
            ),
        ]
        | UnsetType
    ) = UNSET
    largest: (
        Annotated[
            float,
            Meta(
                description="With `too_large`: the most that an empty bucket can hold, in the unit of the "
                "limit times seconds, or in ids."
            ),
        ]
        | UnsetType
    ) = UNSET


class VerdictBody(Struct, gc=False):
    """What one quota that applied would decide alone; unknown numbers are null."""

    quota: Annotated[str, Meta(description="The quota key.")]
    entity: Annotated[str, Meta(description="The entity that the quota is set on.")]
    bucket: Annotated[str, Meta(description="The bucket that the quota charges.")]
    limit: Annotated[float, Meta(description="The limit by which it decided.")]
    verdict: Annotated[Outcome, Meta(description="Its decision, if there were no other quota.")]
    throttle_ms: Annotated[int, Meta(description="Its wait in milliseconds; 0 with `admit` and `reject`.")]
    observed: Annotated[
        float | None,
        Meta(
            description="After the ask: the measured rate, the ids charged in the trailing window, or the "
            "burst minus the tokens."
        ),
    ]
    remaining: Annotated[
        float | None, Meta(description="Units that would be admitted after the ask; below 0 in debt.")
    ]
    enforcement: Annotated[Enforcement, Meta(description="The enforcement by which it decided.")]
    shadow: Annotated[
        bool, Meta(description="true: a shadow quota, which charges but never changes a decision.")
    ]


class DecisionBody(Struct, gc=False):
    """The answer to an ask; `quotas` only with `detail`."""

    decision: Annotated[
        Outcome,
        Meta(
            description="`admit`: do the work. `delay`: do it, and hold the answer for `throttle_ms`. "
            "`throttle`: do not do it, and ask again after `throttle_ms`. `reject`: do not do it, nor ask "
            "again for the same."
        ),
    ]
    throttle_ms: Annotated[
        int, Meta(description="How long to wait, in milliseconds; 0 with `admit` and `reject`.")
    ]
    charged: Annotated[
        bool, Meta(description="Whether the ask changed the counts; false for what was refused or peeked.")
    ]
    applied: Annotated[int, Meta(description="How many quotas applied to the ask; 0: none limits it.")]
    source: Annotated[
        Source,
        Meta(
            description="`store`: the shared store decided. `local`: the node decided alone, just as binding."
            " `fallback`: the store was away, and each quota's `on_store_failure` decided."
        ),
    ]
    limited_by: Annotated[
        LimitedByBody | None, Meta(description="The quota that decided; null with `admit`.")
    ]
    quotas: (
        Annotated[list[VerdictBody], Meta(description="With `detail`: each quota that applied.")] | UnsetType
    ) = UNSET


class DecisionsBody(Struct, gc=False):
    """The answers to a batch, in the order of its asks."""

    decisions: Annotated[list[DecisionBody], Meta(description="One for each ask.")]


class WishBody(NamedUsageBody[LeaseUsageBody]):
    """The names that a lease is for, and the usage that it should hold at most; 0 to settle only."""

    at_ms: Annotated[Count, Meta(description="The time by the caller's clock.")] | UnsetType = UNSET


class SettlementBody(Struct, forbid_unknown_fields=True, gc=False):
    """What was spent of a lease; a field that is left out was not spent."""

    lease: Annotated[LeaseText, Meta(description="The name of the lease.")]
    usage: Annotated[LeaseUsageBody, Meta(description="What was spent, at most what was granted.")]


class LeaseRequestBody(Struct, forbid_unknown_fields=True, gc=False):
    """A lease to ask for, and leases to settle before."""

    ask: Annotated[WishBody, Meta(description="The names and the usage that the lease is for.")]
    lease_ms: Annotated[
        int,
        Meta(ge=1, le=LONGEST_LEASE_MS, description="How long the lease should last, in milliseconds."),
    ]
    settle: Annotated[
        list[SettlementBody],
        Meta(max_length=MAX_SETTLED, description="Leases to settle first: what was spent of each."),
    ] = []


class SpentBody(Struct, forbid_unknown_fields=True, gc=False):
    """What was spent of the lease that the path names; a field that is left out was not spent."""

    usage: Annotated[LeaseUsageBody, Meta(description="What was spent, at most what was granted.")]


class SettledBody(Struct, gc=False):
    """Whether a lease was settled: not if it is over, or if this key has no such lease."""

    lease: Annotated[str, Meta(description="The name of the lease.")]
    ok: Annotated[bool, Meta(description="Whether it was settled.")]


class LeaseBody(Struct, gc=False):
    """What was granted; `lease` is null and `granted` empty if nothing was, and then the decision says why.

    Renew a lease within `renew_ms`, and stop spending `lease_ms` after the moment before it was asked for.
    """

    lease: Annotated[str | None, Meta(description="The name of the lease; null: nothing was granted.")]
    granted: Annotated[
        dict[str, float], Meta(description="The usage that the caller may spend, by its kinds.")
    ]
    lease_ms: Annotated[int, Meta(description="How long the lease lasts, in milliseconds.")]
    renew_ms: Annotated[int, Meta(description="After how long to ask for the next one, in milliseconds.")]
    decision: Annotated[Outcome, Meta(description="`admit`: granted. Otherwise nothing was granted.")]
    throttle_ms: Annotated[
        int, Meta(description="With `throttle`: after how many milliseconds to ask again.")
    ]
    limited_by: Annotated[
        LimitedByBody | None, Meta(description="The quota that granted nothing; null with `admit`.")
    ]
    source: Annotated[
        Source, Meta(description="`store`: the shared store decided. `local`: no quota applied.")
    ]
    settled: Annotated[list[SettledBody], Meta(description="One for each lease to settle.")]
