"""A request of Envoy as asks: one for each descriptor that names something to limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from google.protobuf.message import DecodeError

from app.domain.ask import Ask
from app.domain.errors import EntityError
from app.domain.quota import MAX_EXACT
from app.envoy.mapping import DescriptorMapping, MappingError, Names
from app.envoy.protos.ratelimit_pb2 import RateLimitDescriptor, RateLimitRequest
from app.http.wire import read_address, wrong_name

MAX_DESCRIPTORS: Final = 32
MAX_ENTRIES: Final = 32
"""What a request takes at most: its buckets are charged in one step of the store, which others wait for."""


class InvalidRequestError(ValueError):
    """A request cannot be understood; the message names the place, and nothing was charged."""


class QuestionReader:
    """Reads requests.

    Args:
        now_ms: the time of an ask; None under the store's clock.
    """

    def __init__(self, mapping: DescriptorMapping, now_ms: Callable[[], int] | None = None) -> None:
        self._mapping = mapping
        self._now_ms = now_ms

    def read(self, body: bytes) -> Sequence[Ask | None]:
        """Return the ask of each descriptor of a request; None for one that names nothing to limit.

        Raises:
            InvalidRequestError: a descriptor is wrong, or asks for what there is not.
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
        asks = []
        for place, descriptor in enumerate(request.descriptors):
            try:
                asks.append(self._ask(request, descriptor, at_ms))
            except ValueError as error:
                raise InvalidRequestError(f"descriptors[{place}]: {error}") from None
        return asks

    def _ask(
        self, request: RateLimitRequest, descriptor: RateLimitDescriptor, at_ms: int | None
    ) -> Ask | None:
        if descriptor.is_negative_hits:
            raise ValueError("hits cannot be given back")
        if descriptor.HasField("limit"):
            raise ValueError("a limit of its own is not taken: limits are quotas here")
        if not 1 <= len(descriptor.entries) <= MAX_ENTRIES:
            raise ValueError(f"entries: must be 1 to {MAX_ENTRIES}")
        entries = [(entry.key, entry.value) for entry in descriptor.entries]
        if not all(key for key, _ in entries):
            raise ValueError("entries: a key must not be empty")
        own = descriptor.HasField("hits_addend")
        hits = descriptor.hits_addend.value if own else request.hits_addend or 1
        if hits > MAX_EXACT:
            raise ValueError(f"hits_addend: must be at most {MAX_EXACT}")
        try:
            names = self._mapping.names(request.domain, entries)
        except MappingError as error:
            raise ValueError(f"entries: {error}") from None
        return None if names.is_empty else _ask_of(names, hits, at_ms)


def _ask_of(names: Names, hits: int, at_ms: int | None) -> Ask:
    """Return the ask for what a descriptor names.

    Raises:
        ValueError: a name or an address is not valid.
    """
    for kind in ("principal", "client_id", "broker", "listener"):
        name = getattr(names, kind)
        if name and (why := wrong_name(name)):
            raise ValueError(f"{kind} {why}")
    ip = names.ip
    if ip is not None:
        try:
            ip = read_address(ip)
        except EntityError as error:
            raise ValueError(f"remote_address {error}") from None
    return Ask(
        usage={names.usage: hits},
        principal=names.principal,
        client_id=names.client_id,
        ip=ip,
        broker=names.broker,
        listener=names.listener,
        deny=True,
        detail=True,
        at_ms=at_ms,
    )
