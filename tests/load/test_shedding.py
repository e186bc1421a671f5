"""A node sheds requests that it cannot answer in time, says so, and charges nothing for them."""

from __future__ import annotations

from typing import Final

from tests.load.generator import CHECK, Load, outcomes
from tests.load.holding import counted, fallbacks_of, summary
from tests.report import say
from tests.service import running

SECONDS: Final = 6.0
OVERLOADING: Final = 512
"""Batches at a time. However fast the node, their bodies are more than may wait of one caller."""
PURSE: Final = {"limit": 1e-9, "algorithm": "token_bucket", "burst": 10**12, "enforcement": "deny"}
"""No token comes back within a day, so missing tokens were charged."""


def test_overload_is_shed_openly_and_charges_nothing():
    """Batches and checks for one principal from one caller: batches are shed with 503, checks with 429."""
    with running() as node:
        node.put("user=*", request_rate=PURSE)
        batches, checks = outcomes(
            Load(
                address=node.address,
                ask='{"principal":"p","usage":{"requests":1}}',
                batch=1_000,
                connections=OVERLOADING,
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
        say("batches:", summary(batches), "checks:", summary(checks))
        (bucket,) = node.http.get("/v1/buckets?bucket=user=p").json()["buckets"]
        assert batches.odd == checks.odd == []
        assert batches.lost == batches.unanswered == checks.lost == checks.unanswered == 0
        assert batches.statuses == {"200": batches.statuses["200"], "503": batches.shed}
        assert checks.statuses.get("429", 0) == checks.shed > 0
        assert counted(node, "quotagate_shed_total") == batches.shed + checks.shed
        assert fallbacks_of(node) == 0
        admitted = batches.decisions["admit"] + checks.decisions.get("admit", 0)
        assert PURSE["burst"] - bucket["tokens"] == admitted
