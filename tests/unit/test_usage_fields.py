"""Each list of the usage fields of an ask has all of them, and the page of quota keys has every key."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from app.domain.ask import AMOUNTS, COUNTS
from app.domain.quota import KEYS
from app.http.bodies import Amount, Count, LeaseUsageBody, UsageBody
from app.run.commands.decide import decide
from quotagate_client.asks import Usage
from quotagate_client.leases import INTEGERS

IDS = "producer_ids"
FIELDS = {*COUNTS, *AMOUNTS, IDS}
DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "quota-keys.md"


def bare(kind: Any) -> Any:
    """The type of a field without its description."""
    return Annotated[kind.__origin__, kind.__metadata__[0]]


def missing_in(where: str, found: set[str]) -> str:
    return f"{where} lacks {sorted(FIELDS - found)}, and has {sorted(found - FIELDS)} in excess"


def test_usage_of_each_quota_key_is_a_count_or_an_amount():
    used = {key.usage for key in KEYS.values()}
    assert used <= FIELDS, f"COUNTS or AMOUNTS in app/domain/ask.py lacks {sorted(used - FIELDS)}"
    assert used == FIELDS, missing_in("KEYS in app/domain/quota.py", used)


def test_usage_fields_of_a_body_have_the_right_kind():
    found = set(LeaseUsageBody.__struct_fields__) | {IDS}
    assert found == FIELDS, missing_in("LeaseUsageBody in app/http/bodies.py", found)
    found = set(UsageBody.__struct_fields__)
    assert found == FIELDS, missing_in("UsageBody in app/http/bodies.py", found)
    hints: dict[str, Any] = get_type_hints(UsageBody, include_extras=True)
    kinds = {name: bare(hint.__args__[0]) for name, hint in hints.items() if name != IDS}
    right = dict.fromkeys(COUNTS, Count) | dict.fromkeys(AMOUNTS, Amount)
    assert kinds == right, "COUNTS are of the type Count in UsageBody, AMOUNTS of the type Amount"


def test_decide_has_an_option_for_each_usage_field():
    described = re.compile(r"Usage: ")
    options = inspect.signature(decide, eval_str=True).parameters.values()
    usages = {
        option.name
        for option in options
        for extra in getattr(option.annotation, "__metadata__", ())
        if described.match(getattr(extra, "help", None) or "")
    }
    found = {IDS if name == "producer_id" else name for name in usages}
    assert found == FIELDS, missing_in("`quotagate decide` in app/run/commands/decide.py", found)


def test_python_client_knows_each_usage_field():
    found = set(Usage.__annotations__)
    assert found == FIELDS, missing_in("Usage in clients/python/quotagate_client/asks.py", found)
    assert set(COUNTS) == INTEGERS, "INTEGERS in clients/python/quotagate_client/leases.py has the COUNTS"


def test_page_of_envoy_has_each_usage_field_without_ids():
    (row,) = re.findall(r"^\| `usage` \|.*$", (DOCS / "envoy.md").read_text(), re.MULTILINE)
    found = {*re.findall(r"`(\w+)`", row), IDS} - {"usage"}
    assert found == FIELDS, missing_in("the row `usage` in docs/envoy.md", found)


def test_page_of_quota_keys_has_each_with_its_defaults():
    rows = re.findall(
        r"^\| `(\w+)` \| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE.read_text(), re.MULTILINE
    )
    right = [
        (
            key.name,
            key.usage,
            "; ".join(",".join(types) for types in key.entities),
            key.algorithm.replace("_", " "),
            key.enforcement,
        )
        for key in KEYS.values()
    ]
    found = [row[:-1] for row in rows]
    assert found == right, f"in docs/quota-keys.md: {[row for row in right if row not in found]}"
