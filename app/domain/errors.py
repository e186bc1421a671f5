"""Errors of the rules.

DomainError
├── EntityError         no entity, bucket or filter can be spelled like this
├── QuotaValueError     a quota's value is wrong; names every wrong field
├── OutOfBoundsError    a bound caller would record in, or refund to, a bucket that others share
├── ObservationError    the volumes of a cluster could not be observed
├── VolumeCountError    too many volumes would be known
└── UnknownBrokerError  no volume of this broker is known
"""

from __future__ import annotations

from collections.abc import Sequence


class DomainError(Exception):
    """The root of this package's exceptions."""


class EntityError(DomainError, ValueError):
    """No entity can be spelled like this; the text gives the reason and the correct form."""


class QuotaValueError(DomainError, ValueError):
    """A quota's value is wrong.

    Attributes:
        errors: pairs of a JSON pointer into the value and a message about the correct form; at least one.
            Very long lists are cut.
    """

    def __init__(self, errors: Sequence[tuple[str, str]]) -> None:
        self.errors = tuple(errors)
        super().__init__("; ".join(f"{field} {message}".lstrip() for field, message in self.errors))


class OutOfBoundsError(DomainError):
    """A bound caller would record in, or refund to, a bucket that others share.

    Attributes:
        bucket: the first such bucket.
        field: the field of the ask that leads to this bucket.
        place: the index of the ask in its batch.
    """

    def __init__(self, bucket: str, field: str, place: int) -> None:
        super().__init__(f"{bucket} is shared with others")
        self.bucket = bucket
        self.field = field
        self.place = place


class ObservationError(DomainError):
    """The volumes of a cluster could not be observed at all; the text says why."""


class VolumeCountError(DomainError):
    """After an incomplete observation, too many volumes would be known.

    Attributes:
        count: how many would be known.
    """

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} volumes would be known")
        self.count = count


class UnknownBrokerError(DomainError):
    """No volume of this broker is known."""
