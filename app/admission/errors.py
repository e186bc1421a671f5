"""Why asks are not decided; nothing was charged for them.

AdmissionError
├── OverloadedError   the node has more to do than it can answer in time
└── CallerGoneError   the caller closed its connection before anything was sent

Two other errors pass through this package: ``StoreError`` (``app.store.port``), which the quotas' own failure
policies turn into decisions, and ``OutOfBoundsError`` (``app.domain.errors``).
"""


class AdmissionError(Exception):
    """An ask was not decided, and nothing was charged."""


class OverloadedError(AdmissionError):
    """The node has more to do than it can answer in time, and sheds this request.

    Args:
        cause: the label of the metric ``quotagate_shed_total``.
    """

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class CallerGoneError(AdmissionError):
    """The caller has left, and nothing was sent for it."""
