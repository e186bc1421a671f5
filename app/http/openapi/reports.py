"""The answers of the routes of reports in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from app.http.openapi.schema import Schema, access_problems, answer_of, components, route
from app.http.problems import FieldError, ProblemError, away, unprocessable
from app.node.reports import MAX_BYTES, MAX_LISTED, MAX_ROWS, ReportBody, ReportListBody

OFF: Final = "No folder of reports is set: set QUOTAGATE_REPORTS on this node."
UNREADABLE: Final = "The folder of QUOTAGATE_REPORTS cannot be read."
SLOW: Final = "Reading the folder of QUOTAGATE_REPORTS takes too long."

COMPONENTS: Final[Mapping[str, Schema]] = components(ReportListBody, ReportBody)
"""Schemas of the OpenAPI document (``components.schemas``) that no router can add."""

_SUMMARY: Final = {
    "decisions": 100_000,
    "verdicts": 296_925,
    "judged": 296_925,
    "unjudged": 0,
    "findings": [],
}
_ENTRY: Final = {
    "name": "nightly-2026-11-21",
    "kind": "audit",
    "from_ms": 1_795_219_200_000,
    "to_ms": 1_795_305_599_000,
    "modified_ms": 1_795_306_000_000,
    "summary": _SUMMARY,
}
_TABLE: Final = {
    "name": "decisions_over_time",
    "title": "Decisions over time",
    "columns": ["at_ms", "admit", "delay", "throttle", "reject"],
    "rows": [[1_795_219_200_000, 960, 3, 36, 1]],
    "count": 1,
}
_REPORT: Final = {**_ENTRY, "log": "log", "tables": [_TABLE]}
_PROBLEMS: Final = (
    unprocessable(FieldError("/limit", "is unknown, as every parameter here")),
    away(UNREADABLE),
)

LIST: Final = route(
    "List reports",
    {
        200: answer_of(
            "The newest reports.", "ReportList", {"reports": [_ENTRY], "unreadable": 0, "more": False}
        )
    },
    (*access_problems("read"), ProblemError(404, OFF), *_PROBLEMS),
    description=f"The newest {MAX_LISTED} folders of `QUOTAGATE_REPORTS` that a job has written, on the node "
    "that answers. Links, and names that begin with `_` or a dot, are left out.",
)

SHOW: Final = route(
    "Show a report",
    {200: answer_of("The report.", "Report", _REPORT)},
    (*access_problems("read"), ProblemError(404, "There is no report named nightly."), *_PROBLEMS),
    description=f"Its summary as the job wrote it, and up to {MAX_ROWS:,} rows of each table. Only regular "
    f"files of at most {MAX_BYTES:,} bytes are read, and links are not followed; 404 says what is wrong "
    "with a report that cannot be shown.",
)
