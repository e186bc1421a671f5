"""What a node cannot answer in time it does not take in, and says so; nothing is charged for it."""

from __future__ import annotations

from typing import Final

from tests.load.generator import CHECK, Load, outcomes
from tests.load.holding import counted, made_up, told
from tests.said import say
from tests.service import running

SECONDS: Final = 6.0
PURSE: Final = {"limit": 1e-9, "algorithm": "token_bucket", "burst": 10**12, "enforcement": "deny"}
"""None comes back within a day: what is missing was charged."""


def test_what_is_too_much_is_shed_in_the_open_and_charges_nothing():
    """Batches and checks in one principal's name, from one caller: 503 for these, a refusal for those."""
    with running() as node:
        node.put("user=*", request_rate=PURSE)
        batches, checks = outcomes(
            Load(
                address=node.address,
                ask='{"principal":"p","usage":{"requests":1}}',
                batch=1_000,
                connections=128,
                seconds=SECONDS,
            ),
            Load(
                address=node.address,
                path=CHECK,
                headers={"X-Quotagate-Principal": "p"},
                connections=8,
                seconds=SECONDS,
                pause_s=0.05,
            ),
        )
        say("batches:", told(batches), "checks:", told(checks))
        (bucket,) = node.http.get("/v1/buckets?bucket=user=p").json()["buckets"]
        assert batches.odd == checks.odd == []
        assert batches.lost == batches.unanswered == checks.lost == checks.unanswered == 0
        assert batches.statuses == {"200": batches.statuses["200"], "503": batches.shed}
        assert checks.statuses.get("429", 0) == checks.shed > 0
        assert counted(node, "quotagate_shed_total") == batches.shed + checks.shed
        assert made_up(node) == 0
        admitted = batches.decisions["admit"] + checks.decisions.get("admit", 0)
        assert PURSE["burst"] - bucket["tokens"] == admitted
