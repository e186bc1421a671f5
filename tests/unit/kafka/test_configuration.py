"""Properties of the Kafka client: read from text, with errors that name the variable."""

from __future__ import annotations

import subprocess

import pytest

from app.kafka.configuration import check, configuration, servers
from tests.authority import Authority
from tests.tools import need

LOGIN = {"sasl_mechanism": "PLAIN", "sasl_plain_username": "alice", "sasl_plain_password": "pass"}
MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule required"


def test_no_properties_give_an_empty_configuration():
    assert configuration({}) == {}
    assert configuration({"sasl_mechanism": "", "ssl_cafile": ""}) == {}


def test_numbers_and_flags_are_read(tmp_path):
    ca = Authority(tmp_path).ca
    given = {
        "security_protocol": "ssl",
        "ssl_cafile": str(ca),
        "ssl_check_hostname": "False",
        "request_timeout_ms": "2500",
    }
    assert configuration(given) == {
        "security_protocol": "SSL",
        "ssl_cafile": str(ca),
        "ssl_check_hostname": False,
        "request_timeout_ms": 2500,
    }


def test_login_is_read_from_a_jaas_config():
    jaas = f'{MODULE} username="alice"\n password="a \\"b\\"; c=d\\\\";'
    found = configuration(
        {"security_protocol": "SASL_SSL", "sasl_mechanism": "SCRAM-SHA-512", "sasl.jaas.config": jaas}
    )
    assert (found["sasl_plain_username"], found["sasl_plain_password"]) == ("alice", 'a "b"; c=d\\')
    assert "sasl_jaas_config" not in found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"securty_protocol": "SSL"}, "SECURTY_PROTOCOL: is not a property"),
        ({"ssl_truststore_location": "x"}, "SSL_TRUSTSTORE_LOCATION: .*_SSL_CAFILE, a PEM file"),
        ({"security_protocol": "TLS"}, "SECURITY_PROTOCOL: must be PLAINTEXT, "),
        ({"security_protocol": "SSL", "ssl_cafile": "/nowhere"}, "SSL_CAFILE: must name an existing file"),
        ({"security_protocol": "SSL", "ssl_cafile": __file__}, "SSL_CAFILE: must hold certificates"),
        ({"security_protocol": "SSL", "ssl_certfile": __file__}, "SSL_CERTFILE: must hold a certificate"),
        ({"security_protocol": "SSL", "ssl_keyfile": __file__}, "SSL_KEYFILE: goes with "),
        ({"security_protocol": "SSL", "ssl_check_hostname": "yes"}, "SSL_CHECK_HOSTNAME: must be true"),
        ({"ssl_cafile": __file__}, "SSL_CAFILE: needs QUOTAGATE_KAFKA_SECURITY_PROTOCOL=SSL or"),
        ({"security_protocol": "SSL", **LOGIN}, "SASL_MECHANISM: needs .*=SASL_SSL or"),
        ({"security_protocol": "SASL_SSL"}, "SASL_MECHANISM: is needed by "),
        (
            {**LOGIN, "security_protocol": "SASL_SSL", "sasl_plain_password": ""},
            "SASL_PLAIN_PASSWORD: is needed by ",
        ),
        ({**LOGIN, "security_protocol": "SASL_SSL", "sasl_mechanism": "GSSAPI"}, "SASL_MECHANISM: must be "),
        ({"security_protocol": "SASL_SSL", "sasl_jaas_config": "x"}, "SASL_JAAS_CONFIG: must be a "),
        ({"request_timeout_ms": "soon"}, "REQUEST_TIMEOUT_MS: must be a whole number"),
        ({"request_timeout_ms": "0"}, "REQUEST_TIMEOUT_MS: must be a whole number"),
    ],
)
def test_invalid_property_is_refused_by_name(given, message):
    with pytest.raises(ValueError, match=f"^QUOTAGATE_KAFKA_{message}"):
        check(given)


def test_error_contains_no_secret():
    with pytest.raises(ValueError) as refused:
        check({"sasl_jaas_config": "Module required password=topsecret;"})
    assert "topsecret" not in str(refused.value)


def test_encrypted_key_needs_its_password(tmp_path):
    """Without this check, OpenSSL would ask for the password at a terminal, for each connection."""
    shown = Authority(tmp_path).certify("alice")
    locked = tmp_path / "locked.key"
    subprocess.run(
        [need("openssl"), "pkey", "-in", shown.key, "-aes128", "-passout", "pass:open", "-out", locked],
        check=True,
    )
    given = {"security_protocol": "SSL", "ssl_certfile": str(shown.cert), "ssl_keyfile": str(locked)}
    check({**given, "ssl_password": "open"})
    for wrong in ("shut", ""):
        with pytest.raises(ValueError, match=r"^QUOTAGATE_KAFKA_SSL_CERTFILE: .*SSL_PASSWORD must open it"):
            check({**given, "ssl_password": wrong})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a:9092", ["a:9092"]),
        (" a:1, b.example.org:65535 ,", ["a:1", "b.example.org:65535"]),
        ("kafka", ["kafka:9092"]),
        ("[::1]:9094", ["[::1]:9094"]),
    ],
)
def test_bootstrap_servers_are_read(given, expected):
    assert servers(given) == expected


@pytest.mark.parametrize("given", ["", ",", "a:b", "a:0", "a:65536", "SSL://a:1", "a b:1", "::1:9092"])
def test_bootstrap_without_a_valid_broker_is_refused(given):
    with pytest.raises(ValueError, match=r"^QUOTAGATE_KAFKA_BOOTSTRAP: "):
        servers(given)
