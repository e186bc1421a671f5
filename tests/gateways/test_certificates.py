"""nginx with its lines for client certificates, and certificates that try to pass for another name."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.gateways import gateway as gateways
from tests.gateways.conftest import Limit
from tests.gateways.gateway import NGINX, Gateway
from tests.gateways.test_protect import burst, is_throttled
from tests.service import Service
from tests.tools import need

COMMENTED = (
    "ssl_certificate certs/server.pem;",
    "ssl_certificate_key certs/server.key;",
    "ssl_client_certificate certs/ca.pem;",
    "ssl_verify_client on;",
    'if ($client_name = "") { return 403; }',
)
BY_CERTIFICATE = replace(
    NGINX,
    places={
        **{line: other for line, other in NGINX.places.items() if not line.startswith("listen")},
        "    listen 8000;\n    listen [::]:8000;\n": "",
        '    auth_basic "site";\n    auth_basic_user_file passwords;\n': "",
        "# listen 8000 ssl;": "listen 127.0.0.1:PORT ssl;",
        "# listen [::]:8000 ssl;": "listen [::1]:PORT ssl;",
        "Principal $remote_user;": "Principal $client_name;",
        **{f"# {line}": line for line in COMMENTED},
    },
    by_certificate=True,
)


@pytest.fixture(scope="module")
def nginx(node: Service, site: int) -> Iterator[Gateway]:
    with gateways.running(BY_CERTIFICATE, node.address[1], site, NGINX.patience) as gateway:
        yield gateway


def certify(gateway: Gateway, person: str, subject: str) -> None:
    """A certificate of the gateway's authority with a chosen subject."""
    folder, key = gateway.folder / "certs", f"{person}.key"
    openssl = str(need("openssl"))
    subprocess.run([openssl, "genpkey", "-algorithm", "ed25519", "-out", key], cwd=folder, check=True)
    request = subprocess.run(
        [openssl, "req", "-new", "-key", key, "-subj", subject], cwd=folder, check=True, capture_output=True
    )
    signing = ["x509", "-req", "-CA", "ca.pem", "-CAkey", "ca.key", "-set_serial", "7", "-days", "1"]
    subprocess.run(
        [openssl, *signing, "-out", f"{person}.pem"],
        cwd=folder,
        input=request.stdout,
        check=True,
        capture_output=True,
    )


def test_principal_is_the_name_in_the_certificate(nginx: Gateway, limit: Limit):
    limit("user=alice", burst(1))
    assert nginx.ask("alice").status_code == 200
    assert is_throttled(nginx.ask("alice"))
    assert nginx.ask("bob").status_code == 200
    assert nginx.ask(None).status_code == 400


@pytest.mark.parametrize(
    "subject", ["/O=x,CN=alice/CN=eve", "/CN=alice/O=x/CN=eve", "/OU=\\,CN=alice/CN=eve"]
)
def test_name_inside_another_field_is_ignored(nginx: Gateway, limit: Limit, subject: str):
    limit("user=alice", 0)
    limit("user=eve", burst(1))
    certify(nginx, "eve", subject)
    assert nginx.ask("eve").status_code == 200
    assert is_throttled(nginx.ask("eve"))


@pytest.mark.parametrize("subject", ["/CN=alice/O=x", "/O=x", "/CN=alice,CN=bob", "/CN=bob/CN=alice+O=x"])
def test_certificate_without_a_plain_name_is_refused(nginx: Gateway, limit: Limit, subject: str):
    certify(nginx, "eve", subject)
    answer = nginx.ask("eve")
    assert answer.status_code == 403
    assert "x-throttle-ms" not in answer.headers
