"""Certificates for tests, made by openssl: a certificate authority, and certificates that it signs."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.tools import need

ED25519: Final = ("-algorithm", "ed25519")
P256: Final = ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its key, both PEM files."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates and writes them to a folder; ``ca`` is its own certificate."""

    def __init__(self, folder: Path, name: str = "authority", algorithm: Sequence[str] = ED25519) -> None:
        self._folder = folder
        self._algorithm = algorithm
        self._name = name
        self._serial = 0
        self.ca = folder / f"{name}.pem"
        subject = ["-subj", f"/CN={name}", "-addext", "basicConstraints=critical,CA:TRUE"]
        self._openssl("genpkey", *self._algorithm, "-out", f"{name}.key")
        usage = ["-addext", "keyUsage=critical,keyCertSign"]
        self._openssl("req", "-x509", "-new", "-key", f"{name}.key", *subject, *usage, "-out", f"{name}.pem")

    def certify(self, name: str, subject: str = "", san: str = "") -> Certificate:
        """A certificate for a subject such as ``/CN=alice``, with names such as ``DNS:localhost``."""
        self._serial += 1
        self._openssl("genpkey", *self._algorithm, "-out", f"{name}.key")
        self._openssl(
            "req", "-new", "-key", f"{name}.key", "-subj", subject or f"/CN={name}", "-out", "request"
        )
        extensions = self._folder / "extensions"
        names = f"subjectAltName={san}\n" if san else ""
        extensions.write_text(f"authorityKeyIdentifier=keyid\n{names}", encoding="utf-8")
        self._openssl(
            *("x509", "-req", "-in", "request", "-CA", self.ca.name, "-CAkey", f"{self._name}.key"),
            *(
                "-set_serial",
                str(self._serial),
                "-days",
                "1",
                "-extfile",
                "extensions",
                "-out",
                f"{name}.pem",
            ),
        )
        return Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")

    def trusted(self, shown: Certificate | None = None) -> ssl.SSLContext:
        """The context of a client that trusts this authority, optionally with a certificate of its own."""
        context = ssl.create_default_context(cafile=str(self.ca))
        if shown is not None:
            context.load_cert_chain(shown.cert, shown.key)
        return context

    def _openssl(self, *arguments: str) -> None:
        subprocess.run([need("openssl"), *arguments], cwd=self._folder, check=True, capture_output=True)
