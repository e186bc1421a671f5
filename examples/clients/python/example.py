"""Puts a quota, asks until throttled, reads the error of a bad ask, and deletes the quota.

An overloaded node refuses an ask with 503, and charges nothing; `decide` asks again after its `Retry-After`.
"""
# ruff: noqa: INP001, T201  an example is a file to read and run, not a package

from __future__ import annotations

import json
import os
import random
import time

from quotagate_api import (
    ApiClient,
    ApiException,
    Ask,
    Configuration,
    Decision,
    DecisionsApi,
    Problem,
    Quota,
    QuotasApi,
    QuotaSet,
    Usage,
)

URL = os.environ.get("QUOTAGATE_URL", "http://127.0.0.1:8080")
WHO = "example-python"
ENTITY = f"user={WHO},client-id=*"
OVERLOADED = "urn:quotagate:overloaded"


def decide(decisions: DecisionsApi, ask: Ask, times: int = 3) -> Decision:
    """A decision; an overloaded node is asked again up to ``times`` times, a little after its Retry-After."""
    while True:
        try:
            return decisions.decide_one_ask(ask)
        except ApiException as refused:
            shed = refused.status == 503 and json.loads(refused.body or "{}").get("type") == OVERLOADED
            if times == 0 or not shed or refused.headers is None:
                raise
            times -= 1
            time.sleep(int(refused.headers.get("Retry-After", "1")) * random.uniform(1, 1.1))  # noqa: S311


def main() -> None:
    """Speak with a running service."""
    with ApiClient(Configuration(host=URL, access_token=os.environ["QUOTAGATE_KEY"])) as client:
        quotas, decisions = QuotasApi(client), DecisionsApi(client)

        three = Quota(limit=0.1, algorithm="token_bucket", burst=3, enforcement="deny")
        put = quotas.put_quotas(ENTITY, QuotaSet(request_rate=three))
        print(f"put {put.entity}")

        admitted = 0
        ask = Ask(principal=WHO, client_id="app", usage=Usage(requests=1))
        while (said := decide(decisions, ask)).decision == "admit" and admitted < 100:
            admitted += 1
        print(f"admitted {admitted} times, then {said.decision}")

        try:
            decisions.decide_one_ask(Ask(principal=WHO, usage=Usage(requests=-1)))
        except ApiException as refused:
            if isinstance(refused.data, Problem) and refused.data.errors:
                print(f"a bad ask: {refused.data.errors[0].var_field}")

        quotas.delete_quotas(ENTITY)
        print("deleted")


if __name__ == "__main__":
    main()
