"""Environment variables that Kubernetes made, or whose quotation marks were meant for another program."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from difflib import SequenceMatcher
from typing import Final

PREFIX: Final = "QUOTAGATE_"
QUOTATION_MARKS: Final = "\"'\u201c\u201d\u201e\u2018\u2019\u201a"

FREE_TEXTS: Final = frozenset({"SASL_PLAIN_PASSWORD", "SASL_PLAIN_USERNAME", "SSL_PASSWORD"})
"""Settings of Kafka whose value is another program's, so it may begin with a quotation mark."""

SERVICE_LINK: Final = (
    "is a service link of Kubernetes, not a setting; set enableServiceLinks: false in the pod"
)

_LINK: Final = re.compile(
    rf"{PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_LINK_VALUE: Final = re.compile(r"(tcp|udp|sctp)://")
_LIKENESS: Final = 0.5
"""The least likeness of two similar names: 1 is the same name, 0 has no letter in common."""


def is_service_link(name: str, value: str = "") -> bool:
    """Whether Kubernetes makes such a variable, for a Service whose name begins with `quotagate`.

    >>> is_service_link("QUOTAGATE_PORT", "tcp://10.0.0.1:8080"), is_service_link("QUOTAGATE_PORT", "8080")
    (True, False)
    >>> is_service_link("QUOTAGATE_API_SERVICE_PORT_HTTP"), is_service_link("QUOTAGATE_PORT_8080_TCP_ADDR")
    (True, True)
    """
    return bool(_LINK.fullmatch(name) or (name.endswith("_PORT") and _LINK_VALUE.match(value)))


def refusals(given: Mapping[str, str], known: Collection[str]) -> dict[str, str]:
    """Return an error line for each setting with a service link or a quoted value, by its name.

    Args:
        given: the variables of this program.
        known: the names of settings.
    """
    found = {}
    for name, value in given.items():
        if name not in known:
            continue
        if is_service_link(name, value):
            found[name] = f"{name}: {SERVICE_LINK}"
        elif is_quoted(value, free_text=name.endswith(tuple(FREE_TEXTS))):
            found[name] = f"{name}: {QUOTED}"
    return found


QUOTED: Final = (
    "begins with a quotation mark, which is taken as a part of the value; write it without quotes "
    "(docker's --env-file keeps them)"
)


def is_quoted(value: str, *, free_text: bool = False) -> bool:
    """Whether a value has quotation marks that were meant for another program.

    Args:
        free_text: the value may begin with a quotation mark, unless it ends with one too.
    """
    begins = value[:1] != "" and value[0] in QUOTATION_MARKS
    return begins and not (free_text and (len(value) == 1 or value[-1] not in QUOTATION_MARKS))


def explained(name: str, value: str, known: Collection[str]) -> str:
    """Return the likely reason why nothing reads a variable; empty if its name gives no hint.

    Of equally close settings it names the longest: for DB_URL it is DATABASE_URL, not URL.

    >>> explained("QUOTAGATE_PROT", "9000", {"QUOTAGATE_PORT", "QUOTAGATE_HOST"})
    'did you mean QUOTAGATE_PORT?'
    """
    if is_service_link(name, value):
        return SERVICE_LINK
    names = {each.removeprefix(PREFIX): each for each in sorted(known)}
    wanted = name.removeprefix(PREFIX)
    likeness, _, closest = max(
        (SequenceMatcher(None, each, wanted).ratio(), len(each), each) for each in names
    )
    return f"did you mean {names[closest]}?" if likeness >= _LIKENESS else ""
