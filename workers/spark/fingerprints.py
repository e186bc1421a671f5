"""Checks that all files of a log were hashed with one secret: ids hashed with another would match nothing."""

from __future__ import annotations

from typing import Final

from pyarrow import parquet as pq

from workers.decision_log.fingerprints import KEY, secrets_of
from workers.decision_log.schema import BadFileError
from workers.spark.errors import JobError

SHOWN: Final = 12
"""How many letters of a fingerprint a message shows."""


class Fingerprints:
    """Checks the secret of each file of a log.

    Attributes:
        known: the fingerprint that all files must have: the deployment's, else that of the first file which
            has one. None until then.
    """

    def __init__(self, known: str | None) -> None:
        self.known = known
        self._owner = "this deployment"

    def check(self, file: str, footer: pq.FileMetaData) -> None:
        """Check one file. A file of an older writer names no secret, and passes.

        Raises:
            JobError: the file names another secret.
        """
        try:
            fingerprints = sorted(secrets_of(file, footer.metadata))
        except BadFileError as error:
            raise JobError(str(error)) from None
        for fingerprint in fingerprints:
            if self.known is None:
                self.known, self._owner = fingerprint, file
            elif fingerprint != self.known:
                raise JobError(
                    f"{file}: metadata {KEY.decode()}: its ids were hashed with another secret"
                    f" ({fingerprint[:SHOWN]}) than that of {self._owner} ({self.known[:SHOWN]}), so they"
                    " would match no id there; leave this file out with --from or --at, or set"
                    " QUOTAGATE_HASH_SECRET to its secret"
                )
