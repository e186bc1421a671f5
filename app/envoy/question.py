"""A request of Envoy as asks: one for each descriptor that names something to limit.

Visitors choose some of the values. So a descriptor never makes a request invalid: its unusable parts are left
out and counted, and everything else applies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from google.protobuf.message import DecodeError

from app.domain.ask import Ask
from app.domain.errors import EntityError
from app.domain.quota import MAX_EXACT
from app.envoy.mapping import DescriptorMapping, UnusableDescriptorError
from app.envoy.names import BYTES, valid_name
from app.envoy.protos.ratelimit_pb2 import RateLimitDescriptor, RateLimitRequest
from app.http.wire import read_address

MAX_DESCRIPTORS: Final = 32
"""The most descriptors of a request: the store charges its buckets in one step, and other asks wait."""
MAX_ENTRIES: Final = 32
"""The most entries of a descriptor."""


class InvalidRequestError(ValueError):
    """A request cannot be understood; the message names the place, and nothing was charged."""


class QuestionReader:
    """Reads requests.

    Args:
        now_ms: the time of an ask; None under the store's clock.
        unusable: called with the reason for each part of a descriptor that is left out.
    """

    def __init__(
        self,
        mapping: DescriptorMapping,
        now_ms: Callable[[], int] | None = None,
        unusable: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self._mapping = mapping
        self._now_ms = now_ms
        self._unusable = unusable

    def read(self, body: bytes) -> Iterator[Ask | None]:
        """Yield the ask of each descriptor of a request; None for one that names nothing to limit.

        Raises:
            InvalidRequestError: it cannot be decoded, or has no domain, no descriptors or too many.
        """
        try:
            request = RateLimitRequest.FromString(body)
        except DecodeError:
            raise InvalidRequestError("the message is not a RateLimitRequest") from None
        if not request.domain:
            raise InvalidRequestError("domain: must not be empty")
        if not 1 <= len(request.descriptors) <= MAX_DESCRIPTORS:
            raise InvalidRequestError(f"descriptors: must be 1 to {MAX_DESCRIPTORS}")
        at_ms = None if self._now_ms is None else self._now_ms()
        for descriptor in request.descriptors:
            yield self._ask(request, descriptor, at_ms)

    def _ask(
        self, request: RateLimitRequest, descriptor: RateLimitDescriptor, at_ms: int | None
    ) -> Ask | None:
        hits = self._hits(request, descriptor)
        if descriptor.HasField("limit"):
            self._unusable("limit_override")
        if not 1 <= len(descriptor.entries) <= MAX_ENTRIES:
            self._unusable("too_many_entries" if descriptor.entries else "no_entries")
            return None
        entries = [
            (entry.key.decode(errors=BYTES), entry.value.decode(errors=BYTES)) for entry in descriptor.entries
        ]
        if not all(key for key, _ in entries):
            self._unusable("empty_key")
            entries = [(key, value) for key, value in entries if key]
        try:
            names = self._mapping.names(request.domain, entries)
        except UnusableDescriptorError as error:
            self._unusable(error.reason)
            return None
        if names.is_ambiguous:
            self._unusable("duplicate_entry")
        if names.ip is not None:
            names = names._replace(ip=self._address(names.ip))
        if names.is_empty:
            return None
        return Ask(
            usage={names.usage: hits},
            principal=valid_name(names.principal),
            client_id=valid_name(names.client_id),
            ip=names.ip,
            broker=valid_name(names.broker),
            listener=valid_name(names.listener),
            deny=True,
            detail=True,
            at_ms=at_ms,
        )

    def _hits(self, request: RateLimitRequest, descriptor: RateLimitDescriptor) -> int:
        """Return the hits of a descriptor."""
        if descriptor.is_negative_hits:
            self._unusable("negative_hits")
            return 1
        hits: int = (
            descriptor.hits_addend.value if descriptor.HasField("hits_addend") else request.hits_addend or 1
        )
        if hits > MAX_EXACT:
            self._unusable("hits_addend")
        return min(hits, MAX_EXACT)

    def _address(self, sent: str) -> str | None:
        """Return an address in normal spelling, without its zone; None if it is no address."""
        try:
            return read_address(sent.partition("%")[0])
        except EntityError:
            self._unusable("remote_address")
            return None
