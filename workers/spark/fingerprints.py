"""The one secret that made a log's digests: ids that were hashed with another match nothing."""

from __future__ import annotations

from typing import Final

from pyarrow import parquet as pq

from workers.decision_log.fingerprints import KEY, secrets_of
from workers.decision_log.schema import BadFile
from workers.spark.refused import Refused

SHOWN: Final = 12
"""So many letters of a fingerprint tell it from another."""


class Fingerprints:
    """Looks at each file of a log.

    Args:
        known: the fingerprint of the deployment's secret, if that is known.

    Attributes:
        known: the fingerprint of the log's, once its files were looked at.
    """

    def __init__(self, known: str | None) -> None:
        self.known = known
        self._whose = "this deployment"

    def look(self, file: str, about: pq.FileMetaData) -> None:
        """See what a file says; older ones say nothing, and are taken as they are.

        Raises:
            Refused: it says another one.
        """
        try:
            found = sorted(secrets_of(file, about.metadata))
        except BadFile as bad:
            raise Refused(str(bad)) from None
        for said in found:
            if self.known is None:
                self.known, self._whose = said, file
            elif said != self.known:
                raise Refused(
                    f"{file}: metadata {KEY.decode()}: its ids were hashed with another secret"
                    f" ({said[:SHOWN]}) than that of {self._whose} ({self.known[:SHOWN]}), so none of them"
                    " would be known there; leave it out with --from or --at, or set QUOTAGATE_HASH_SECRET to"
                    " its own"
                )
