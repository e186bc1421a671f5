"""The names in a descriptor of Envoy (principal, client-id and so on): by its own entries, and by a file.

Entries ``principal``, ``client_id``, ``remote_address``, ``broker``, ``listener`` and ``usage`` mean what
they say. ``QUOTAGATE_ENVOY_MAPPING`` names a YAML file that says, for each domain, either of two things::

    domains:
      shop:                         # which other entries join into a principal and a client-id
        principal: [tenant, {key: plan, value: gold}]
        client_id: [path]
      messaging:                    # or what each descriptor names, as `quotas import-envoy` writes it
        descriptors:
          - entries: [{key: message_type, value: marketing}, to_number]
            principal: domain=messaging,message_type=marketing,to_number
            client_id: [to_number]
          - entries: [ldap]
            unlimited: true
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import yaml

from app.domain.ask import AMOUNTS, COUNTS
from app.domain.entity import check_name

USAGES: Final = (*COUNTS, *AMOUNTS)
MAX_BYTES: Final = 16 * 1024 * 1024
"""The largest file that is read."""

_LOADER: Final = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
"""Every value is text, as in a descriptor: `value: 010` is not 8."""
_OWN: Final = ("principal", "client_id", "remote_address", "broker", "listener", "usage")
_UNJOINED: Final = ("principal", "client_id", "usage")
_BRANCHES: Final = {"principal", "client_id", "descriptors"}
_RULE: Final = {"entries", "principal", "client_id", "usage", "unlimited"}
_SPELLED: Final = [quote(bytes((byte,)), safe="") for byte in range(256)]
_TRUE: Final = ("true", "True", "TRUE")
_FALSE: Final = ("false", "False", "FALSE")

Entries = Sequence[tuple[str, str]]
"""The entries of a descriptor: keys and values, in order. A byte that is not UTF-8 is a lone surrogate
(``surrogateescape``), so texts are equal, or begin and end alike, if their bytes do."""


class MappingError(ValueError):
    """A file of mappings is wrong; each line of the message names one place of it."""


class UnusableDescriptorError(ValueError):
    """A descriptor names nothing, as one of its entries is invalid; ``reason`` is the label of the metric."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Names(NamedTuple):
    """The names in a descriptor; addresses and names are spelled as sent.

    Attributes:
        usage: the usage field that its hits count for.
        is_ambiguous: whether an entry such as ``principal`` came more than once.
    """

    principal: str | None = None
    client_id: str | None = None
    ip: str | None = None
    broker: str | None = None
    listener: str | None = None
    usage: str = "requests"
    is_ambiguous: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether it names nothing to limit."""
        return not any((self.principal, self.client_id is not None, self.ip, self.broker, self.listener))


NOTHING: Final = Names()


class Pattern(NamedTuple):
    """A pattern of entries.

    Attributes:
        value: None for any value; each ``*`` in it matches any text, also none.
        is_shared: whether all matching values share one bucket: the entry joins no client-id.
    """

    key: str
    value: str | None = None
    is_shared: bool = False

    @property
    def is_open(self) -> bool:
        """Whether more than one value matches."""
        return self.value is None or "*" in self.value

    def fits(self, key: str, value: str) -> bool:
        """Whether an entry matches."""
        return key == self.key and (self.value is None or _fits(self.value.split("*"), value))

    def written(self) -> str | dict[str, str | bool]:
        """Return it in the form of a file."""
        if self.value is None and not self.is_shared:
            return self.key
        found: dict[str, str | bool] = {"key": self.key}
        if self.value is not None:
            found["value"] = self.value
        return found | {"shared": True} if self.is_shared else found


class DescriptorRule(NamedTuple):
    """The names for descriptors with these entries, in this order and no others.

    Attributes:
        principal: None if such descriptors are unlimited.
        client_id: the keys of the entries that join into a client-id.
    """

    entries: tuple[Pattern, ...]
    principal: str | None = None
    client_id: tuple[str, ...] = ()
    usage: str = "requests"

    def names(self, entries: Entries) -> Names:
        """Return the names for a matching descriptor."""
        if self.principal is None:
            return NOTHING
        theirs = (
            entry
            for entry, pattern in zip(entries, self.entries, strict=True)
            if pattern.key in self.client_id and not pattern.is_shared
        )
        return Names(self.principal, _joined(theirs), usage=self.usage)

    def written(self) -> dict[str, Any]:
        """Return it in the form of a file."""
        found: dict[str, Any] = {"entries": [pattern.written() for pattern in self.entries]}
        if self.principal is None:
            return found | {"unlimited": True}
        found["principal"] = self.principal
        if self.client_id:
            found["client_id"] = list(self.client_id)
        return found if self.usage == "requests" else found | {"usage": self.usage}


@dataclass(slots=True)
class _Node:
    """A node in the tree of rules: its children by the value as written, by ``*``, and by the key."""

    exact: dict[tuple[str, str], _Node] = field(default_factory=dict)
    wildcards: dict[str, list[tuple[Sequence[str], _Node]]] = field(default_factory=dict)
    keys: dict[str, _Node] = field(default_factory=dict)
    rule: DescriptorRule | None = None

    def below(self, pattern: Pattern) -> _Node:
        """Return the node for an entry, which may be a new one."""
        key, value, _ = pattern
        if value is None:
            return self.keys.setdefault(key, _Node())
        found = self.exact.get((key, value))
        if found is None:
            found = self.exact[key, value] = _Node()
            if pattern.is_open:
                self.wildcards.setdefault(key, []).append((value.split("*"), found))
        return found

    def next(self, key: str, value: str) -> _Node | None:
        """Return the child for an entry: by its value, else by the first ``*`` that matches, else by its key.

        There is no backtracking.
        """
        found = self.exact.get((key, value))
        if found is None and key in self.wildcards:
            found = next((node for parts, node in self.wildcards[key] if _fits(parts, value)), None)
        return self.keys.get(key) if found is None else found


class JoinedEntries:
    """A domain that says which entries join into a principal and a client-id."""

    def __init__(self, principal: Sequence[Pattern], client_id: Sequence[Pattern]) -> None:
        self._principal = tuple(principal)
        self._client_id = tuple(client_id)

    def names(self, entries: Entries) -> Names:
        """Return the names in a descriptor; entries such as ``principal`` go before joined ones."""
        own = own_names(entries)
        if own.principal is None:
            own = own._replace(principal=_joined(_found(self._principal, entries)))
        if own.client_id is None:
            own = own._replace(client_id=_joined(_found(self._client_id, entries)))
        return own


class RuleTree:
    """A domain with rules for its descriptors; a descriptor without a rule names nothing."""

    def __init__(self, rules: Sequence[DescriptorRule]) -> None:
        self._root = _Node()
        for rule in rules:
            node = self._root
            for pattern in rule.entries:
                node = node.below(pattern)
            if node.rule is not None:
                raise MappingError(f"the entries {_shown(rule.entries)} have two rules")
            node.rule = rule

    def names(self, entries: Entries) -> Names:
        """Return the names for a descriptor."""
        node: _Node | None = self._root
        for key, value in entries:
            node = node.next(key, value) if node is not None else None
        return node.rule.names(entries) if node is not None and node.rule is not None else NOTHING


class DescriptorMapping:
    """The mapping of all domains."""

    def __init__(self, domains: Mapping[str, JoinedEntries | RuleTree] | None = None) -> None:
        self._domains = dict(domains or {})

    def names(self, domain: str, entries: Entries) -> Names:
        """Return the names for a descriptor of a domain.

        Raises:
            UnusableDescriptorError: one of its entries is invalid.
        """
        domain_mapping = self._domains.get(domain)
        return own_names(entries) if domain_mapping is None else domain_mapping.names(entries)

    @classmethod
    def read(cls, text: str) -> DescriptorMapping:
        """Read a file.

        Raises:
            MappingError: it is wrong; the message names each place.
        """
        try:
            sent = yaml.load(text, Loader=_LOADER)  # noqa: S506  it makes nothing but text, lists and mappings
        except (yaml.YAMLError, RecursionError) as error:
            raise MappingError(f"not YAML: {' '.join(str(error).split())}") from None
        return _MappingReader().file(sent)

    @classmethod
    def load(cls, path: Path | None) -> DescriptorMapping:
        """Read the file at a path; without one no domain has a mapping.

        Raises:
            MappingError: it cannot be read, or is wrong.
        """
        if path is None:
            return cls()
        try:
            if path.stat().st_size > MAX_BYTES:
                raise MappingError(f"is larger than {MAX_BYTES:,} bytes")
            return cls.read(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise MappingError(f"cannot be read: {error}") from None


def own_names(entries: Entries) -> Names:
    """Return the names that a descriptor's own entries give; of equal keys the first non-empty value counts.

    Raises:
        UnusableDescriptorError: ``usage`` is not a field of usage.
    """
    sent: dict[str, str] = {}
    is_ambiguous = False
    for key, value in entries:
        if key in _OWN:
            is_ambiguous |= key in sent
            sent[key] = sent.get(key) or value
    usage = sent.get("usage", "requests")
    if usage not in USAGES:
        raise UnusableDescriptorError("usage")
    return Names(
        sent.get("principal") or None,
        sent.get("client_id"),
        sent.get("remote_address") or None,
        sent.get("broker") or None,
        sent.get("listener") or None,
        usage,
        is_ambiguous,
    )


def joined(key: str, value: str | None = None) -> str:
    """Return an entry as part of a name; without a value its key alone.

    >>> joined("path", "/a,b"), joined("to number")
    ('path=%2Fa%2Cb', 'to%20number')
    """
    return _quoted(key) if value is None else f"{_quoted(key)}={_quoted(value)}"


def _quoted(text: str) -> str:
    """Return a text percent-encoded, several times as fast as ``quote`` does it."""
    return text.encode(errors="surrogateescape").decode("latin-1").translate(_SPELLED)


def _fits(parts: Sequence[str], value: str) -> bool:
    """Whether a value is these parts in this order, with any text between them.

    >>> _fits(["/api/", "/v1"], "/api/users/v1"), _fits(["ab", "ba"], "aba"), _fits(["", "b", ""], "abc")
    (True, False, True)
    """
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return value == first
    end = len(value) - len(last)
    if len(first) > end or not (value.startswith(first) and value.endswith(last)):
        return False
    place = len(first)
    for part in parts[1:-1]:
        found = value.find(part, place, end)
        if found < 0:
            return False
        place = found + len(part)
    return True


def _joined(entries: Iterator[tuple[str, str]]) -> str | None:
    """Return entries as one name; None without entries."""
    return ",".join([joined(key, value) for key, value in entries]) or None


def _found(patterns: Sequence[Pattern], entries: Entries) -> Iterator[tuple[str, str]]:
    """Yield the matching entries, in the order of the patterns."""
    for pattern in patterns:
        for key, value in entries:
            if pattern.fits(key, value):
                yield key, value


def _shown(patterns: Sequence[Pattern]) -> str:
    return ",".join(joined(pattern.key, pattern.value) for pattern in patterns)


class _MappingReader:
    """Reads one file, and collects its faults."""

    def __init__(self) -> None:
        self._faults: list[str] = []

    def file(self, sent: object) -> DescriptorMapping:
        if not isinstance(sent, dict) or sent.keys() != {"domains"} or not isinstance(sent["domains"], dict):
            raise MappingError("must be a mapping with the one key domains, a mapping of domains")
        domains: dict[str, JoinedEntries | RuleTree] = {}
        for domain, content in sent["domains"].items():
            with self._collected(f"domains/{domain}"):
                domains[domain] = self._domain(f"domains/{domain}", content)
        if self._faults:
            raise MappingError("\n".join(self._faults))
        return DescriptorMapping(domains)

    def _domain(self, at: str, sent: object) -> JoinedEntries | RuleTree:
        if not isinstance(sent, dict) or not sent or not sent.keys() <= _BRANCHES:
            raise MappingError("must be a mapping with principal and client_id, or with descriptors")
        if "descriptors" not in sent:
            principal, client_id = (
                _patterns(name, sent.get(name, []), _UNJOINED) for name in ("principal", "client_id")
            )
            return JoinedEntries(principal, client_id)
        if len(sent) > 1:
            raise MappingError("descriptors leave no room for principal and client_id")
        if not isinstance(sent["descriptors"], list):
            raise MappingError("descriptors must be a list")
        rules = []
        for place, each in enumerate(sent["descriptors"]):
            with self._collected(f"{at}/descriptors/{place}"):
                rules.append(_rule(each))
        return RuleTree(rules)

    @contextmanager
    def _collected(self, at: str) -> Iterator[None]:
        """Note a fault of a place, and go on."""
        try:
            yield
        except MappingError as fault:
            self._faults.append(f"{at}: {fault}")


def _rule(sent: object) -> DescriptorRule:
    if not isinstance(sent, dict) or not sent.keys() <= _RULE or not sent.get("entries"):
        raise MappingError(f"must be a mapping with entries, and of {', '.join(sorted(_RULE))} alone")
    entries = _patterns("entries", sent["entries"], may_share=True)
    if sent.get("unlimited") in _TRUE:
        if len(sent) > 2:
            raise MappingError("is unlimited, and so takes nothing but entries")
        return DescriptorRule(tuple(entries))
    principal, keys, usage = sent.get("principal"), sent.get("client_id", []), sent.get("usage", "requests")
    if not isinstance(principal, str):
        raise MappingError("principal must be a name")
    if why := check_name(principal):
        raise MappingError(f"principal {why}")
    if not isinstance(keys, list) or any(key not in {entry.key for entry in entries} for key in keys):
        raise MappingError("client_id must be a list of keys of the entries")
    if usage not in USAGES:
        raise MappingError(f"usage must be one of {', '.join(USAGES)}")
    return DescriptorRule(tuple(entries), principal, tuple(keys), usage)


def _patterns(
    name: str, sent: object, taken: Sequence[str] = (), *, may_share: bool = False
) -> list[Pattern]:
    """Read a list of entries; keys in ``taken`` are refused."""
    fields = {"key", "value", "shared"} if may_share else {"key", "value"}
    if not isinstance(sent, list):
        raise MappingError(f"{name} must be a list of entries")
    found = []
    for each in sent:
        entry = each if isinstance(each, dict) else {"key": each}
        key, value = entry.get("key"), entry.get("value")
        if not (entry.keys() <= fields and isinstance(key, str) and key):
            raise MappingError(f"{name} must have keys, or mappings of {', '.join(sorted(fields))}")
        if not (value is None or isinstance(value, str)):
            raise MappingError(f"{name}: the value of {key} must be text")
        if key in taken:
            raise MappingError(f"{name}: {key} means what it says, and joins nothing")
        shared = entry.get("shared", _FALSE[0])
        if shared not in (*_TRUE, *_FALSE):
            raise MappingError(f"{name}: shared of {key} must be true or false")
        found.append(Pattern(key, value, shared in _TRUE))
    return found
