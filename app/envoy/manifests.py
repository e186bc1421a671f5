"""Configurations of envoyproxy/ratelimit in manifests of Kubernetes: each key of a ConfigMap is a file."""

from __future__ import annotations

from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

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
    text_of,
)

_LISTS: Final = ("List", "ConfigMapList", "SecretList")
_AS_TEXT: Final = {"ConfigMap": "data", "Secret": "stringData"}
_AS_BASE64: Final = {"ConfigMap": "binaryData", "Secret": "data"}


class Configuration(NamedTuple):
    """A configuration, and a prefix for messages about it: the key of the ConfigMap that holds it."""

    place: str
    root: Node


class Unread(NamedTuple):
    """A part of a manifest without a configuration.

    Attributes:
        may_limit: whether it may hold limits all the same.
    """

    what: str
    reason: str
    may_limit: bool


class Manifests:
    """Finds configurations in documents, and collects the parts without one."""

    def __init__(self) -> None:
        self.unread: list[Unread] = []

    def of(self, document: Node) -> Iterator[Configuration]:
        """Yield the configurations of a document: itself, unless it is a manifest.

        Raises:
            GoYamlError: a key of a mapping is no text.
        """
        fields = fields_of(document)
        if not {"apiVersion", "kind"} <= fields.keys():
            if not is_null(document):
                yield Configuration("", document)
            return
        kind = field_text(fields, "kind")
        if kind in _LISTS:
            items = fields.get("items")
            for each in items.items if isinstance(items, Items) else ():
                yield from self.of(_of_kind(each, kind.removesuffix("List")))
        elif kind in _AS_TEXT:
            yield from self._files(kind, fields)
        else:
            why = "is no configuration of envoyproxy/ratelimit, and is not read"
            self.unread.append(Unread(_title(kind, fields), why, may_limit=False))

    def _files(self, kind: str, fields: Mapping[str, Node]) -> Iterator[Configuration]:
        for section, is_base64 in ((_AS_TEXT[kind], False), (_AS_BASE64[kind], True)):
            for name, sent in fields_of(fields.get(section)).items():
                place = f"{_title(kind, fields)}, {name}"
                try:
                    roots = documents(_content(sent, is_base64=is_base64))
                    for root in roots:
                        yield from self._file(place, root)
                except GoYamlError as error:
                    self.unread.append(Unread(place, str(error), may_limit=True))

    def _file(self, place: str, root: Node) -> Iterator[Configuration]:
        fields = fields_of(root)
        if "domain" in fields:
            yield Configuration(f"{place}: ", root)
        elif not is_null(root):
            why = "is no mapping with a domain"
            self.unread.append(Unread(place, why, may_limit="descriptors" in fields))


def _content(sent: Node, *, is_base64: bool) -> str | bytes:
    if not isinstance(sent, Scalar):
        raise GoYamlError("must be text")
    if not is_base64:
        return text_of(sent)
    try:
        return b64decode("".join(text_of(sent).split()), validate=True)
    except Base64Error:
        raise GoYamlError("must be base64") from None


def _of_kind(item: Node, kind: str) -> Node:
    """Return an item of a list; items of a list of one kind may omit the kind."""
    if not kind or not isinstance(item, Pairs):
        return item
    return Pairs([(Scalar("apiVersion"), Scalar("v1")), (Scalar("kind"), Scalar(kind)), *item.pairs])


def _title(kind: str, fields: Mapping[str, Node]) -> str:
    return f"{kind} {field_text(fields_of(fields.get('metadata')), 'name')}".strip()
