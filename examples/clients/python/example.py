"""Puts a quota, asks until throttled, reads what is wrong with a bad ask, and deletes the quota."""
# ruff: noqa: INP001, T201  an example is a file to read and run, not a package

from __future__ import annotations

import os

from quotagate_api import (
    ApiClient,
    ApiException,
    Ask,
    Configuration,
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


def main() -> None:
    """Speak with a running service."""
    with ApiClient(Configuration(host=URL, access_token=os.environ["QUOTAGATE_KEY"])) as client:
        quotas, decisions = QuotasApi(client), DecisionsApi(client)

        three = Quota(limit=0.1, algorithm="token_bucket", burst=3, enforcement="deny")
        put = quotas.put_quotas(ENTITY, QuotaSet(request_rate=three))
        print(f"put {put.entity}")

        admitted = 0
        ask = Ask(principal=WHO, client_id="app", usage=Usage(requests=1))
        while (said := decisions.decide_one_ask(ask)).decision == "admit" and admitted < 100:
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
