"""Imports configurations of envoyproxy/ratelimit as quotas and a mapping, and names the parts left out.

A path of descriptors with a limit becomes a rule of the mapping and a quota with a bucket of its own:

- the principal is the path as configured: the domain, ``key=value`` where a value is set, else the key alone;
- the client-id joins the request's values of entries whose value the path leaves open, one bucket for each;
  entries with ``share_threshold`` are not part of it;
- the quota is set on that principal, or on that principal with ``client-id=*``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final, Literal, NamedTuple

from app.domain.entity import ANY, Entity
from app.domain.quota import REQUEST_RATE, Defaults
from app.domain.quota_value import Definition, check_all
from app.envoy.go_yaml import (
    GoYamlError,
    Items,
    Node,
    Pairs,
    Scalar,
    documents,
    field_text,
    fields_of,
    is_null,
    named,
    plain_value,
    text_of,
    value_of,
)
from app.envoy.manifests import Manifests
from app.envoy.mapping import DescriptorRule, Pattern, joined
from app.envoy.names import valid_name

MAX_DEPTH: Final = 32
MAX_LIMIT: Final = 2**32 - 1

RATES: Final[Mapping[str, tuple[int, int]]] = {
    "second": (11, 100),
    "minute": (11, 6_000),
    "hour": (11, 360_000),
    "day": (25, 3_600_000),
}
"""Samples and their length by unit: all samples but one make up the unit. Longer units are token buckets."""
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
_FOR_METRICS: Final = ("detailed_metric", "value_to_metric")
_DESCRIPTOR: Final = {
    *_FOR_METRICS,
    "key",
    "value",
    "rate_limit",
    "descriptors",
    "shadow_mode",
    "quota_mode",
    "share_threshold",
    "metadata",
}
_RATE_LIMIT: Final = {"unit", "requests_per_unit", "unlimited", "name", "replaces"}
_HARMLESS: Final = {*_FOR_METRICS, "name", "metadata"}
_KNOWN: Final = _ROOT | _DESCRIPTOR | _RATE_LIMIT
_ANCHORS: Final = ("x-", ".")
"""The prefixes of keys that only hold anchors."""
_REFUSED: Final = "envoyproxy/ratelimit refuses the file"

Effect = Literal["looser", "stricter", "same"]
"""The result compared with the original, or with the intent of a file that the original refuses."""


class EnvoyConfigurationError(ValueError):
    """A file is not a configuration of envoyproxy/ratelimit; the message says why."""


class ImportedRow(NamedTuple):
    """An imported path.

    Attributes:
        limit: as configured, such as ``5/day``, or ``unlimited``.
        entity: the entity of the quota; empty without one.
    """

    domain: str
    path: str
    limit: str
    shadow: bool
    entity: str


class LeftOut(NamedTuple):
    """A part that was left out or changed, and the reason."""

    domain: str
    path: str
    what: str
    reason: str
    effect: Effect


@dataclass(slots=True)
class EnvoyImport:
    """An import of files, and its result.

    Attributes:
        merge_domains: whether a domain that comes again adds to the first, as with MERGE_DOMAIN_CONFIG.
        quotas: by entity.
        rules: of the mapping, by domain.
    """

    merge_domains: bool = False
    quotas: dict[str, Mapping[str, Definition]] = field(default_factory=dict)
    rules: dict[str, list[DescriptorRule]] = field(default_factory=dict)
    rows: list[ImportedRow] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    _first: dict[str, set[Pattern]] = field(default_factory=dict)

    @property
    def is_looser(self) -> bool:
        """Whether a limit is lost, or looser than the original."""
        return any(each.effect == "looser" for each in self.left_out)

    def add(self, source: str | bytes) -> None:
        """Add a file: one or more configurations, or manifests of Kubernetes that hold them.

        Raises:
            EnvoyConfigurationError: the file has no configuration, is not YAML, or repeats a domain.
        """
        try:
            manifests = Manifests()
            configurations = [found for each in documents(source) for found in manifests.of(each)]
            for what, reason, may_limit in manifests.unread:
                self._leave_out("", "", what, reason, "looser" if may_limit else "same")
            if not configurations:
                raise EnvoyConfigurationError("must be a mapping with a domain, and descriptors")
            for place, each in configurations:
                self._configuration(place, each)
        except GoYamlError as error:
            raise EnvoyConfigurationError(str(error)) from None

    def mapping(self) -> dict[str, Any]:
        """Return the mapping in the form of a file."""
        return {
            "domains": {
                domain: {"descriptors": [rule.written() for rule in rules]}
                for domain, rules in self.rules.items()
            }
        }

    def _leave_out(self, domain: str, path: str, what: str, reason: str, effect: Effect) -> None:
        self.left_out.append(LeftOut(domain, path, what, reason, effect))

    def _configuration(self, place: str, root: Node) -> None:
        fields = fields_of(root)
        domain = field_text(fields, "domain")
        if not domain:
            raise EnvoyConfigurationError(f"{place}must be a mapping with a domain, and descriptors")
        if domain in self.rules and not self.merge_domains:
            why = "--merge-domains joins both, as MERGE_DOMAIN_CONFIG does"
            raise EnvoyConfigurationError(f"{place}the domain {domain} came before; {why}")
        self.rules.setdefault(domain, [])
        self._note_unknown(domain, "", fields.keys() - _ROOT)
        self._descriptors(domain, (), fields.get("descriptors"))

    def _descriptors(self, domain: str, above: tuple[Pattern, ...], sent: Node | None) -> None:
        if is_null(sent):
            return
        if not isinstance(sent, Items) or len(above) >= MAX_DEPTH:
            deep = f"are nested more than {MAX_DEPTH} deep"
            why = deep if isinstance(sent, Items) else f"must be a list; {_REFUSED}"
            self._leave_out(domain, _shown(above), "descriptors", why, "looser")
            return
        known = set() if above else self._first.setdefault(domain, set())
        for each in sent.items:
            if not isinstance(each, Pairs):
                self._leave_out(
                    domain, _shown(above), "a descriptor", f"must be a mapping; {_REFUSED}", "looser"
                )
                continue
            fields = named(each, ["rate_limit"])
            key, value = fields.get("key"), fields.get("value")
            if not isinstance(key, Scalar) or not text_of(key):
                self._leave_out(domain, _shown(above), "a descriptor", f"has no key; {_REFUSED}", "looser")
                continue
            if not (value is None or isinstance(value, Scalar)):
                place = _shown((*above, Pattern(text_of(key))))
                self._leave_out(domain, place, "value", f"must be text; {_REFUSED}", "looser")
                continue
            path = (*above, Pattern(text_of(key), text_of(value) or None if value else None))
            for name, scalar in (("key", key), ("value", value)):
                self._note_text(domain, path, name, scalar)
            if path[-1] in known:
                why = f"is duplicated; {_REFUSED}; the first one is taken"
                self._leave_out(domain, _shown(path), "a descriptor", why, "looser")
                continue
            known.add(path[-1])
            self._descriptor(domain, path, fields)

    def _note_unknown(self, domain: str, path: str, names: AbstractSet[str]) -> None:
        """List fields that do not belong in this mapping; the original ignores fields of other mappings."""
        for name in sorted(names - _HARMLESS):
            if name in _KNOWN:
                self._leave_out(domain, path, name, "has no effect here, nor in envoyproxy/ratelimit", "same")
            else:
                effect: Effect = "same" if not path and name.startswith(_ANCHORS) else "looser"
                self._leave_out(domain, path, name, f"is unknown; {_REFUSED}", effect)

    def _note_text(self, domain: str, path: tuple[Pattern, ...], name: str, sent: Scalar | None) -> None:
        """List a key or a value that the original does not take as text, or takes as a pattern."""
        value = None if sent is None else value_of(sent)
        if isinstance(value, float):
            why = "without quotation marks it is a number that envoyproxy/ratelimit refuses; here it is text"
            self._leave_out(domain, _shown(path), name, why, "same")
        if name == "key" and "*" in path[-1].key:
            why = "here * is a *; envoyproxy/ratelimit joins key and value, and so may match more"
            self._leave_out(domain, _shown(path), name, why, "looser")

    def _descriptor(self, domain: str, path: tuple[Pattern, ...], fields: Mapping[str, Node]) -> None:
        place = _shown(path)
        self._note_unknown(domain, place, fields.keys() - _DESCRIPTOR)
        for name in _FOR_METRICS:
            self._flag(domain, place, fields, name, "same")
        is_shadow = self._flag(domain, place, fields, "shadow_mode", "stricter")
        if self._flag(domain, place, fields, "quota_mode", "stricter"):
            is_shadow = True
            why = "no dynamic metadata is sent; the limit is in shadow, so it refuses nothing either"
            self._leave_out(domain, place, "quota_mode", why, "same")
        if self._flag(domain, place, fields, "share_threshold", "looser"):
            path = (*path[:-1], path[-1]._replace(is_shared=True))
            self._note_shared(domain, path)
        rules = self.rules[domain]
        before = len(rules)
        limit = fields.get("rate_limit")
        if isinstance(limit, Pairs):
            rules.append(self._limited(domain, path, named(limit), is_shadow=is_shadow))
        elif not is_null(limit):
            why = f"must be a mapping; {_REFUSED}; it is unlimited"
            self._leave_out(domain, place, "rate_limit", why, "looser")
            rules.append(DescriptorRule(path))
        self._descriptors(domain, path, fields.get("descriptors"))
        if len(rules) == before:  # it only exempts its requests from wider rules
            rules.append(DescriptorRule(path))
            self.rows.append(ImportedRow(domain, place, "unlimited", shadow=False, entity=""))

    def _note_shared(self, domain: str, path: tuple[Pattern, ...]) -> None:
        """List an entry that shares one bucket without ``*``, which the original refuses."""
        value = path[-1].value
        if value is None:
            why = f"needs a value with *; {_REFUSED}; all values share one bucket"
            self._leave_out(domain, _shown(path), "share_threshold", why, "stricter")
        elif "*" not in value:
            why = f"needs a value with *; {_REFUSED}; one value has one bucket"
            self._leave_out(domain, _shown(path), "share_threshold", why, "same")

    def _flag(
        self, domain: str, place: str, fields: Mapping[str, Node], name: str, otherwise: Effect
    ) -> bool:
        """Return a field that is true or false; anything else is noted and false."""
        sent = fields.get(name)
        value = value_of(sent) if isinstance(sent, Scalar) else None
        if not isinstance(value, bool) and not is_null(sent):
            why = f"must be true or false; {_REFUSED}; it is false"
            self._leave_out(domain, place, name, why, otherwise)
        return value is True

    def _limited(
        self, domain: str, path: tuple[Pattern, ...], limit: Mapping[str, Node], *, is_shadow: bool
    ) -> DescriptorRule:
        """Return the rule of a path with a limit, and note its quota; unlimited if the limit is invalid."""
        place = _shown(path)
        self._note_unknown(domain, place, limit.keys() - _RATE_LIMIT)
        if not is_null(limit.get("replaces")):
            self._note_replaces(domain, place, limit)
        unit = field_text(limit, "unit").lower()
        if self._flag(domain, place, limit, "unlimited", "stricter"):
            self.rows.append(ImportedRow(domain, place, "unlimited", shadow=False, entity=""))
            if unit in SECONDS:
                why = f"contradicts the unit {unit}; {_REFUSED}; it is unlimited"
                self._leave_out(domain, place, "unlimited", why, "looser")
            return DescriptorRule(path)
        number = self._number(domain, place, limit.get("requests_per_unit"))
        if unit not in SECONDS:
            why = f"the unit must be one of {', '.join(SECONDS)}; {_REFUSED}; it is unlimited"
            self._leave_out(domain, place, "rate_limit", why, "looser")
        if number is None or unit not in SECONDS:
            return DescriptorRule(path)
        path_name = ",".join([joined("domain", domain), *(joined(p.key, p.value) for p in path)])
        principal = valid_name(path_name) or path_name
        open_keys = [pattern.key for pattern in path if pattern.is_open and not pattern.is_shared]
        client_id = tuple(dict.fromkeys(open_keys))
        entity = Entity.of(user=principal, **({"client_id": ANY} if client_id else {}))
        definition = {**_rate(number, unit), "enforcement": "deny", **({"shadow": True} if is_shadow else {})}
        self.quotas[str(entity)] = check_all({REQUEST_RATE: definition}, entity, Defaults())
        self.rows.append(ImportedRow(domain, place, f"{number}/{unit}", is_shadow, str(entity)))
        return DescriptorRule(path, principal, client_id)

    def _note_replaces(self, domain: str, place: str, limit: Mapping[str, Node]) -> None:
        sent = limit["replaces"]
        if isinstance(sent, Items) and not sent.items:
            return
        own = field_text(limit, "name")
        names = [field_text(named(each), "name") for each in _mappings(sent)]
        is_refused = not names or not all(names) or own in names
        why = f"no limit replaces another; both apply{f'; {_REFUSED}' if is_refused else ''}"
        self._leave_out(domain, place, "replaces", why, "stricter")

    def _number(self, domain: str, place: str, sent: Node | None) -> int | None:
        """Return how many requests a limit lets pass; None, and a note, if the number is invalid."""
        must = f"requests_per_unit must be a whole number up to {MAX_LIMIT}"
        value = value_of(sent) if isinstance(sent, Scalar) else None
        if is_null(sent):
            why = f"{must}; without one it is 0, as in envoyproxy/ratelimit: all are refused"
            self._leave_out(domain, place, "rate_limit", why, "same")
            return 0
        number = plain_value(value) if isinstance(value, str) else value
        if isinstance(number, float) and isfinite(number):
            number = int(number)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_LIMIT:
            self._leave_out(domain, place, "rate_limit", f"{must}; {_REFUSED}; it is unlimited", "looser")
            return None
        if type(value) is not int:
            effect: Effect = "stricter" if isinstance(value, float) and number < value else "same"
            self._leave_out(domain, place, "rate_limit", f"{must}; {_REFUSED}; it is {number}", effect)
        return number


def _rate(number: int, unit: str) -> dict[str, Any]:
    """Return a request rate of ``number`` per unit, all of which may come at once."""
    limit = number / SECONDS[unit]
    if unit in RATES:
        samples, sample_ms = RATES[unit]
        return {"limit": limit, "samples": samples, "sample_ms": sample_ms}
    return {"limit": limit, "algorithm": "token_bucket", **({"burst": number} if number else {})}


def _mappings(sent: Node) -> Iterator[Pairs]:
    yield from (each for each in sent.items if isinstance(each, Pairs)) if isinstance(sent, Items) else ()


def _shown(path: Sequence[Pattern]) -> str:
    return ", ".join(p.key if p.value is None else f"{p.key}={p.value}" for p in path)
