"""Real-looking files of envoyproxy/ratelimit, and the answers that its documentation promises.

Each folder of ``ratelimit_files`` has files, and ``answers.yaml`` with a table of requests: the entries, the
limit that applies (``5/day``, with ``shadow`` if it refuses nothing, or ``none``), the bucket that counts
them (requests with the same one share it), and the domain, if it differs from the table's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import yaml

from app.envoy.importing import SECONDS, EnvoyImport

FOLDER: Final = Path(__file__).parent / "ratelimit_files"


class Limit(NamedTuple):
    """A limit that applies to a request."""

    number: int
    unit: str
    is_shadow: bool = False

    @property
    def seconds(self) -> int:
        return SECONDS[self.unit]


@dataclass(frozen=True, slots=True)
class Request:
    """A request, and the answer to it: the limit (None: unlimited), and the bucket that counts it."""

    domain: str
    entries: tuple[tuple[str, str], ...]
    limit: Limit | None
    bucket: str


@dataclass(frozen=True, slots=True)
class Case:
    """Files, and a table of requests."""

    name: str
    files: tuple[Path, ...]
    merge_domains: bool
    left_out: tuple[tuple[str, str], ...]
    requests: tuple[Request, ...]

    def imported(self) -> EnvoyImport:
        found = EnvoyImport(merge_domains=self.merge_domains)
        for file in self.files:
            found.add(file.read_bytes())
        return found


def cases() -> list[Case]:
    """All of them."""
    return [_case(folder) for folder in sorted(FOLDER.iterdir())]


def by_bucket(requests: Iterable[Request]) -> dict[str, list[Request]]:
    """The limited requests of each bucket."""
    found: dict[str, list[Request]] = {}
    for each in requests:
        if each.limit is not None:
            found.setdefault(each.bucket, []).append(each)
    return found


def _case(folder: Path) -> Case:
    answers = yaml.load((folder / "answers.yaml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    return Case(
        folder.name,
        tuple(file for file in sorted(folder.iterdir()) if file.name != "answers.yaml"),
        answers.get("merge_domains") == "true",
        tuple((what, effect) for what, effect in answers.get("left_out", ())),
        tuple(_request(answers["domain"], *row) for row in answers["requests"]),
    )


def _request(
    domain: str, entries: dict[str, str] | list[list[str]], limit: str, bucket: str = "", own_domain: str = ""
) -> Request:
    pairs = entries.items() if isinstance(entries, dict) else [(key, value) for key, value in entries]
    return Request(own_domain or domain, tuple(pairs), _limit(limit), bucket)


def _limit(spelled: str) -> Limit | None:
    if spelled == "none":
        return None
    rate, _, shadow = spelled.partition(" ")
    number, _, unit = rate.partition("/")
    return Limit(int(number), unit, shadow == "shadow")
