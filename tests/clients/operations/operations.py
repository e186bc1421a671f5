"""Calls every operation with the generated Python client, and prints each answer as it would send it."""

from __future__ import annotations

import json
import os
from typing import Any

from quotagate_api import (
    ApiClient,
    Ask,
    Batch,
    BucketReset,
    BucketsApi,
    Configuration,
    DecisionsApi,
    DrillWanted,
    HealthApi,
    KeysApi,
    KeyWanted,
    LeaseRequest,
    LeasesApi,
    LeaseUsage,
    OverviewApi,
    PushedVolumes,
    Quota,
    QuotaAlteration,
    QuotaAlterations,
    QuotaApplication,
    QuotaPatch,
    QuotasApi,
    QuotaSet,
    QuotaSetting,
    ReportsApi,
    Rotation,
    Spent,
    Usage,
    VolumesApi,
    Wish,
)

WHO = "operations-python"
ENTITY = f"user={WHO}"

said: list[list[Any]] = []


def say(operation: str, answer: Any) -> Any:
    """Note an answer as the client would send it."""
    said.append([operation, answer.to_dict() if hasattr(answer, "to_dict") else answer])
    return answer


def from_dict(kind: Any, value: dict[str, Any]) -> Any:
    """Build an object from a dict, as a program that reads JSON would."""
    return kind.from_dict(value)


def of_quotas(quotas: QuotasApi) -> None:
    """Send back the quotas that were read, patch from a dict, and read the history and the shadow quotas."""
    layers = {"interval_ms": 3_600_000, "ttl_ms": 7_200_000}
    wanted = QuotaSet(
        request_rate=Quota(limit=16_777_217.5, burst=3e9, algorithm="token_bucket", enforcement="deny"),
        producer_byte_rate=Quota(limit=9_007_199_254_740_991),
        producer_ids_rate=Quota(limit=5, layers=layers),
        consumer_byte_rate=Quota(limit=2_147_483_649, shadow=True),
    )
    say("put_quotas", quotas.put_quotas(ENTITY, wanted, x_reason="the first"))
    read = say("get_quotas", quotas.get_quotas(ENTITY))
    say("put_quotas", quotas.put_quotas(ENTITY, read.quotas))
    say("shadow_quotas", quotas.shadow_quotas(entity=ENTITY))
    patch = from_dict(
        QuotaPatch,
        {"request_rate": {"limit": 10, "burst": None}, "producer_ids_rate": None, "consumer_byte_rate": 8},
    )
    say("patch_quotas", quotas.patch_quotas(ENTITY, patch))
    page = say("list_quotas", quotas.list_quotas(match=[ENTITY], strict=True, limit=10))
    history = say("quotas_history", quotas.quotas_history(entity=ENTITY))
    before = from_dict(QuotaSet, history.changes[0].before.to_dict())
    say("put_quotas", quotas.put_quotas(ENTITY, before))
    altered = from_dict(
        QuotaAlteration, {"entity": ENTITY, "quotas": {"request_rate": 7, "producer_byte_rate": None}}
    )
    say("alter_quotas", quotas.alter_quotas(QuotaAlterations(alterations=[altered])))
    found = page.quotas[0]
    setting = from_dict(
        QuotaSetting,
        {"entity": found.entity, "quotas": {**found.quotas.to_dict(), "consumer_byte_rate": None}},
    )
    say("apply_quotas", quotas.apply_quotas(QuotaApplication(alterations=[setting], validate_only=True)))
    say("effective_quotas", quotas.effective_quotas(principal=WHO))


def of_decisions(decisions: DecisionsApi, leases: LeasesApi, buckets: BucketsApi) -> None:
    """Decide, take a lease, and look at the buckets."""
    usage = Usage(requests=1, producer_ids=["123", "9223372036854775807"])
    ask = Ask(principal=WHO, usage=usage, detail=True)
    say("decide_one_ask", decisions.decide_one_ask(ask))
    say(
        "decide_a_batch_of_asks",
        decisions.decide_a_batch_of_asks(Batch(asks=[ask, Ask(usage=Usage(requests=1))])),
    )
    say("check_by_get", decisions.check_by_get(x_quotagate_principal=WHO, requests=1))
    wish = Wish(principal=WHO, usage=LeaseUsage(requests=1))
    lease = say("take_lease", leases.take_lease(LeaseRequest(ask=wish, lease_ms=10_000)))
    say("end_lease", leases.end_lease(lease.lease, Spent(usage=LeaseUsage(requests=0))))
    found = say("get_buckets", buckets.get_buckets(bucket=ENTITY))
    reset = BucketReset(bucket=found.buckets[0].bucket, quota=found.buckets[0].quota)
    say("reset_bucket", buckets.reset_bucket(reset))


def of_reports(reports: ReportsApi) -> None:
    """List reports, and read the newest."""
    listed = say("get_reports", reports.get_reports())
    say("get_report", reports.get_report(listed.reports[0].name))


def of_keys(keys: KeysApi) -> None:
    """Make, rotate and revoke a key."""
    wanted = KeyWanted(name=WHO, scopes=["decide"], bound_to=[ENTITY], expires_ms=4_102_444_800_000)
    say("create_key", keys.create_key(wanted))
    say("get_keys", keys.get_keys())
    say("rotate_key", keys.rotate_key(WHO, Rotation(grace_ms=1_000)))
    say("revoke_key", keys.revoke_key(WHO))


def of_volumes(volumes: VolumesApi, quotas: QuotasApi) -> None:
    """Push volumes, read them, push them again, and read a drill in the history."""
    free = {
        "broker": "1",
        "dir": "/a",
        "total_bytes": 4_611_686_018_427_387_905,
        "available_bytes": 2**53 + 1,
    }
    unknown = {"broker": "1", "dir": "/b", "total_bytes": None, "available_bytes": None}
    pushed = from_dict(PushedVolumes, {"volumes": [free, unknown], "complete": True})
    say("push_volumes", volumes.push_volumes(pushed))
    read = say("get_volumes", volumes.get_volumes())
    again = [{name: value for name, value in each.to_dict().items() if name in free} for each in read.volumes]
    say("push_volumes", volumes.push_volumes(from_dict(PushedVolumes, {"volumes": again, "complete": True})))
    say("forget_volumes", volumes.forget_volumes(broker="1"))
    say("begin_drill", volumes.begin_drill(DrillWanted(factor=0.5, for_ms=600_000)))
    say("end_drill", volumes.end_drill(x_reason="over"))
    say("quotas_history", quotas.quotas_history(entity="throttle_factor", limit=2))


def main() -> None:
    """Speak with a running service."""
    with ApiClient(
        Configuration(host=os.environ["QUOTAGATE_URL"], access_token=os.environ["QUOTAGATE_KEY"])
    ) as client:
        quotas, health = QuotasApi(client), HealthApi(client)
        of_quotas(quotas)
        of_decisions(DecisionsApi(client), LeasesApi(client), BucketsApi(client))
        say("get_overview", OverviewApi(client).get_overview(resolution="second", since_ms=1))
        of_reports(ReportsApi(client))
        of_keys(KeysApi(client))
        of_volumes(VolumesApi(client), quotas)
        say("live", health.live())
        say("is_ready", health.is_ready())
        say("scrape", health.scrape())
        say("delete_quotas", quotas.delete_quotas(ENTITY))
    print(json.dumps(said))


if __name__ == "__main__":
    main()
