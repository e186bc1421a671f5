"""Limits a function with the hand-made Python client, without a line about HTTP."""
# ruff: noqa: INP001, T201  an example is a file to read and run, not a package

from __future__ import annotations

import os

from quotagate_client import Ask, Client, DeadlinePassed, Problem

WHO = "example-hand-made"


def ask(page: str) -> Ask:
    """The ask for each call of `fetch`."""
    return {"principal": WHO, "client_id": page, "usage": {"requests": 1}}


def main() -> None:
    """Fetch until throttled; a key is needed for quotas alone, so `make run` and a PUT come first."""
    with Client(os.environ.get("QUOTAGATE_URL", "http://127.0.0.1:8080")) as client:

        @client.limited(ask, within_s=1)
        def fetch(page: str) -> str:
            return f"fetched {page}"

        admitted = 0
        try:
            while admitted < 100:
                fetch("app")
                admitted += 1
        except DeadlinePassed as throttled:
            print(f"admitted {admitted} times, then {throttled.decision.decision}")
        try:
            client.decide(principal=WHO, usage={"requests": -1})
        except Problem as problem:
            print(f"a bad ask: {problem.errors[0].field}")
        print(f"waited {client.throttle_time_max} ms at most")


if __name__ == "__main__":
    main()
