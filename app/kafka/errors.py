"""Errors of requests to a Kafka cluster.

KafkaError
└── BrokerSilentError       a broker did not answer
    └── BrokerTooOldError   it supports no version of a request
"""


class KafkaError(Exception):
    """A request to a Kafka cluster failed or was refused; each argument is a line, which names a server."""

    def __init__(self, *lines: str) -> None:
        super().__init__(*lines)

    def __str__(self) -> str:
        return "\n".join(self.args)


class BrokerSilentError(KafkaError):
    """A broker did not answer; the text gives the reason in a few words."""


class BrokerTooOldError(BrokerSilentError):
    """The broker supports none of the versions of a request."""
