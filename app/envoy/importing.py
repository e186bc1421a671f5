"""The configuration of envoyproxy/ratelimit as quotas and a mapping; what cannot be taken is named.

A path of descriptors with a limit becomes a rule of the mapping and a quota with a bucket of its own:

- the principal is the path as configured: the domain, ``key=value`` where a value is set, else the key alone;
- the client-id is what a request says where the path leaves the value open, one bucket for each;
- the quota is set on that principal, or on that principal with ``client-id=*``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import yaml

from app.domain.entity import ANY, MAX_NAME_BYTES, Entity
from app.domain.quota import REQUEST_RATE, Defaults
from app.domain.quota_value import Definition, check_all
from app.envoy.mapping import DescriptorRule, Pattern, joined

_LOADER: Final = getattr(yaml, "CBaseLoader", yaml.BaseLoader)

MAX_DEPTH: Final = 32
MAX_LIMIT: Final = 2**32 - 1

RATES: Final[Mapping[str, tuple[int, int]]] = {
    "second": (11, 100),
    "minute": (11, 6_000),
    "hour": (11, 360_000),
    "day": (25, 3_600_000),
}
"""Samples and their length by unit: all but one of them are the unit. Longer units are token buckets."""
SECONDS: Final[Mapping[str, int]] = {
    "second": 1,
    "minute": 60,
    "hour": 3_600,
    "day": 86_400,
    "week": 604_800,
    "month": 2_592_000,
    "year": 31_536_000,
}

_ROOT: Final = {"domain", "descriptors"}
_DESCRIPTOR: Final = {
    "key",
    "value",
    "rate_limit",
    "descriptors",
    "shadow_mode",
    "detailed_metric",
    "quota_mode",
}
_RATE_LIMIT: Final = {"unit", "requests_per_unit", "unlimited", "name", "replaces"}
_FOR_METRICS: Final = {"detailed_metric", "value_to_metric"}
_YES: Final = ("true", "yes", "on")
_NOTHING: Final = ("", "~", "null")


class EnvoyConfigurationError(ValueError):
    """A file is not a configuration of envoyproxy/ratelimit; the message says why."""


class ImportedRow(NamedTuple):
    """A path that was taken.

    Attributes:
        limit: as configured, such as ``5/day``, or ``unlimited``.
        entity: what the quota is set on; empty without one.
    """

    domain: str
    path: str
    limit: str
    shadow: bool
    entity: str


class LeftOut(NamedTuple):
    """Something that was not taken, and why."""

    domain: str
    path: str
    what: str
    reason: str


@dataclass(slots=True)
class EnvoyImport:
    """What an import makes of files.

    Attributes:
        quotas: by entity.
        rules: of the mapping, by domain.
    """

    quotas: dict[str, Mapping[str, Definition]] = field(default_factory=dict)
    rules: dict[str, list[DescriptorRule]] = field(default_factory=dict)
    rows: list[ImportedRow] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Add a file.

        Raises:
            EnvoyConfigurationError: it is not such a configuration.
        """
        try:
            root = yaml.load(text, Loader=_LOADER)  # noqa: S506  it makes nothing but text, lists and mappings
        except (yaml.YAMLError, RecursionError) as error:
            raise EnvoyConfigurationError(f"not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(root, dict) or not isinstance(root.get("domain"), str) or not root["domain"]:
            raise EnvoyConfigurationError("must be a mapping with a domain, and descriptors")
        domain = root["domain"]
        if domain in self.rules:
            raise EnvoyConfigurationError(f"the domain {domain} came before")
        self.rules[domain] = []
        for name in root.keys() - _ROOT:
            self.left_out.append(LeftOut(domain, "", str(name), "is unknown"))
        self._descriptors(domain, (), root.get("descriptors"))

    def mapping(self) -> dict[str, Any]:
        """Return the mapping as a file has it."""
        return {
            "domains": {
                domain: {"descriptors": [rule.written() for rule in rules]}
                for domain, rules in self.rules.items()
            }
        }

    def _descriptors(self, domain: str, above: tuple[Pattern, ...], sent: object) -> None:
        if sent in (None, *_NOTHING):
            return
        if not isinstance(sent, list) or len(above) >= MAX_DEPTH:
            why = "must be a list" if len(above) < MAX_DEPTH else f"are nested more than {MAX_DEPTH} deep"
            self.left_out.append(LeftOut(domain, _shown(above), "descriptors", why))
            return
        known = set()
        for each in sent:
            key, value = (_text(each, name) for name in ("key", "value"))
            if not key:
                self.left_out.append(LeftOut(domain, _shown(above), "a descriptor", "has no key"))
                continue
            path = (*above, Pattern(key, value or None))
            if path[-1] in known:
                self.left_out.append(LeftOut(domain, _shown(path), "a descriptor", "is duplicated"))
                continue
            known.add(path[-1])
            self._descriptor(domain, path, each)

    def _descriptor(self, domain: str, path: tuple[Pattern, ...], sent: Mapping[str, Any]) -> None:
        place = _shown(path)
        for name in sent.keys() - _DESCRIPTOR - _FOR_METRICS:
            self.left_out.append(LeftOut(domain, place, str(name), "is unknown"))
        is_shadow = _is_yes(sent.get("shadow_mode"))
        if _is_yes(sent.get("quota_mode")):
            is_shadow = True
            self.left_out.append(
                LeftOut(domain, place, "quota_mode", "no dynamic metadata is sent; the limit is in shadow")
            )
        limit = sent.get("rate_limit")
        below = sent.get("descriptors")
        if isinstance(limit, dict):
            self.rules[domain].append(self._limited(domain, path, limit, is_shadow=is_shadow))
        else:
            if limit not in (None, *_NOTHING):
                self.left_out.append(LeftOut(domain, place, "rate_limit", "must be a mapping"))
            if not below or limit not in (None, *_NOTHING):  # it is there so that nothing wider applies
                self.rules[domain].append(DescriptorRule(path))
                self.rows.append(ImportedRow(domain, place, "unlimited", shadow=False, entity=""))
        self._descriptors(domain, path, below)

    def _limited(
        self, domain: str, path: tuple[Pattern, ...], limit: Mapping[str, Any], *, is_shadow: bool
    ) -> DescriptorRule:
        """Return the rule of a path with a limit, and note its quota; unlimited if that is wrong."""
        place = _shown(path)
        for name in limit.keys() - _RATE_LIMIT:
            self.left_out.append(LeftOut(domain, place, str(name), "is unknown"))
        if limit.get("replaces") not in (None, *_NOTHING, []):
            why = "no limit replaces another; both apply"
            self.left_out.append(LeftOut(domain, place, "replaces", why))
        if _is_yes(limit.get("unlimited")):
            self.rows.append(ImportedRow(domain, place, "unlimited", shadow=False, entity=""))
            return DescriptorRule(path)
        principal = ",".join([joined("domain", domain), *(joined(*pattern) for pattern in path)])
        spelled, unit = _text(limit, "requests_per_unit"), (_text(limit, "unit") or "").lower()
        wrong = _fault(spelled, unit, principal)
        if wrong is not None:
            self.left_out.append(LeftOut(domain, place, "rate_limit", f"{wrong}; it is unlimited"))
            return DescriptorRule(path)
        number = int(spelled or 0)
        client_id = tuple(dict.fromkeys(pattern.key for pattern in path if _is_open(pattern)))
        entity = Entity.of(user=principal, **({"client_id": ANY} if client_id else {}))
        definition = {**_rate(number, unit), "enforcement": "deny", **({"shadow": True} if is_shadow else {})}
        self.quotas[str(entity)] = check_all({REQUEST_RATE: definition}, entity, Defaults())
        self.rows.append(ImportedRow(domain, place, f"{number}/{unit}", is_shadow, str(entity)))
        return DescriptorRule(path, principal, client_id)


def _rate(number: int, unit: str) -> dict[str, Any]:
    """Return a request rate of so many in a unit, which may come at once."""
    limit = number / SECONDS[unit]
    if unit in RATES:
        samples, sample_ms = RATES[unit]
        return {"limit": limit, "samples": samples, "sample_ms": sample_ms}
    return {"limit": limit, "algorithm": "token_bucket", **({"burst": number} if number else {})}


def _fault(number: str | None, unit: str, principal: str) -> str | None:
    """Return what is wrong with a limit, or None."""
    if unit not in SECONDS:
        return f"the unit must be one of {', '.join(SECONDS)}"
    if number is None or not (number.isascii() and number.isdigit()) or int(number) > MAX_LIMIT:
        return f"requests_per_unit must be a whole number up to {MAX_LIMIT}"
    if len(principal.encode()) > MAX_NAME_BYTES:
        return f"its path is longer than {MAX_NAME_BYTES} bytes as a name"
    return None


def _is_open(pattern: Pattern) -> bool:
    """Whether an entry takes many values, each with a bucket of its own."""
    return pattern.value is None or pattern.value.endswith("*")


def _shown(path: Sequence[Pattern]) -> str:
    return ", ".join(_spelled(path))


def _spelled(path: Sequence[Pattern]) -> Iterator[str]:
    for pattern in path:
        yield pattern.key if pattern.value is None else f"{pattern.key}={pattern.value}"


def _text(sent: object, name: str) -> str | None:
    """Return the text of a field; None if it is absent, or no text."""
    value = sent.get(name) if isinstance(sent, dict) else None
    return value if isinstance(value, str) and value not in _NOTHING else None


def _is_yes(value: object) -> bool:
    return isinstance(value, str) and value.lower() in _YES
