"""URLs of the settings: the error for an invalid URL names the setting, and shows no part of the URL."""

from __future__ import annotations

import logging
import os
import re

import psycopg
import pytest
from sqlalchemy import make_url

from app.node import database_url, settings
from app.node.errors import SettingsError
from app.node.store_url import sentinel_address, single_url
from app.store.client import client_of

STORE, CATALOG, LOG = "REDIS_URL", "DATABASE_URL", "LOG_URL"
ENCODE = "percent-encode special characters"


@pytest.fixture(autouse=True)
def _bare(monkeypatch, tmp_path):
    """Remove the settings of the person who runs the tests."""
    for name in [name for name in os.environ if name.startswith("QUOTAGATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def loaded(monkeypatch, name: str, value: str) -> settings.Settings:
    monkeypatch.setenv(f"QUOTAGATE_{name}", value)
    return settings.load()


def refusal(monkeypatch, name: str, value: str) -> str:
    with pytest.raises(SettingsError) as refused:
        loaded(monkeypatch, name, value)
    assert refused.value.__cause__ is None
    return str(refused.value)


PLACES = {
    "redis": (STORE, "redis://{}127.0.0.1:6379/0"),
    "rediss": (STORE, "rediss://{}store.example:6379/0"),
    "unix": (STORE, "unix://{}/run/store.sock"),
    "redis+sentinel": (STORE, "redis+sentinel://{}one:26379,two/primary/0"),
    "rediss+sentinel": (STORE, "rediss+sentinel://{}one,two:26379/primary"),
    "redis+cluster": (STORE, "redis+cluster://{}one:6379,two:6379"),
    "rediss+cluster": (STORE, "rediss+cluster://{}one,two"),
    "postgresql": (CATALOG, "postgresql://{}db.example:5432/quotas"),
    "postgresql socket": (CATALOG, "postgresql://{}/quotas?host=/var/run/postgresql"),
    "s3": (LOG, "s3://{}bucket/logs"),
    "hdfs": (LOG, "hdfs://{}namenode:8020/logs"),
}
PASSWORDS = {
    "57#Wc903z": ENCODE,  # from a bug report: it was read as port 57 of localhost
    "57/Wc903z": ENCODE,
    "Wc903z/": ENCODE,
    "57?Wc903z": ENCODE,
    "Wc?a=903z": ENCODE,
    "Wc@903z": ENCODE,
    "@Wc903z": ENCODE,
    "Wc903z%": ENCODE,
    "Wc%zz903z": ENCODE,
    "Wc%2": ENCODE,
    "Wc%FF903z": "UTF-8",
    "Wc 903z": ENCODE,
    "Wc903z\n": ENCODE,
    "Wc\t903z": ENCODE,
    "Wc\x01903z": ENCODE,
    "Wc\\903z": ENCODE,
    "Wc[903z": ENCODE,
    "Wc]903z": ENCODE,
    "Wc[::1]903z": ENCODE,
    "Wc\u2100903z": ENCODE,  # NFKC makes a slash of it; the standard library quotes the host in its error
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("password", PASSWORDS)
def test_password_that_must_be_encoded_is_refused_and_not_shown(monkeypatch, caplog, place, password):
    name, url = PLACES[place]
    with caplog.at_level(logging.DEBUG):
        message = refusal(monkeypatch, name, url.format(f"user:{password}@"))
    assert message.startswith(f"QUOTAGATE_{name}: ")
    assert PASSWORDS[password] in message
    for part in re.findall(r"Wc|903z", password):
        assert part not in message + caplog.text


@pytest.mark.parametrize("place", PLACES)
def test_encoded_password_is_accepted(monkeypatch, place):
    name, url = PLACES[place]
    password = "57%23W%2Fc%40%3F%5B903z%25%20%5C%C3%A9"
    given = loaded(monkeypatch, name, url.format(f"user:{password}@"))
    plain = "57#W/c@?[903z% \\é"
    if name == CATALOG:
        assert make_url(given.catalog_url).password == plain
    elif "sentinel" in place:
        assert sentinel_address(str(given.redis_url)).options["password"] == plain
    elif "cluster" in place:
        assert f":{password}@" in single_url(str(given.redis_url), "one", 1)
    elif name == STORE:
        client = client_of(str(given.redis_url), 1.0)
        assert client.connection_pool.connection_kwargs["password"] == plain


@pytest.mark.parametrize(
    ("name", "url"),
    [
        (STORE, "redis://"),
        (STORE, "redis:///0"),
        (STORE, "redis://:secret@"),
        (STORE, "redis://:secret@/0"),
        (STORE, "redis://:6379/0"),
        (STORE, "redis+cluster://"),
        (STORE, "redis+sentinel:///primary"),
        (CATALOG, "postgresql://"),
        (CATALOG, "postgresql:///quotas"),
        (CATALOG, "postgresql://user:secret@/quotas"),
        (CATALOG, "postgresql://:5432/quotas"),
        (CATALOG, "postgresql:///quotas?sslmode=require"),
    ],
)
def test_url_without_a_host_is_refused(monkeypatch, name, url):
    message = refusal(monkeypatch, name, url)
    assert ENCODE in message
    assert "secret" not in message


@pytest.mark.parametrize(
    "port", ["http", "0", "65536", "-1", "", "6379x", "+6379", "\u0666\u0663", "63 79", "1:2"]
)
@pytest.mark.parametrize(
    ("name", "url"),
    [
        (STORE, "redis://host:{}/0"),
        (STORE, "rediss://[::1]:{}"),
        (STORE, "redis+sentinel://one,two:{}/primary"),
        (STORE, "redis+cluster://one:{},two"),
        (CATALOG, "postgresql://host:{}/quotas"),
        (CATALOG, "postgresql:///quotas?host=host:{}"),
        (LOG, "hdfs://namenode:{}/logs"),
        ("KAFKA_BOOTSTRAP", "one:9092,two:{}"),
    ],
)
def test_port_that_is_none_is_refused(monkeypatch, name, url, port):
    refusal(monkeypatch, name, url.format(port))


@pytest.mark.parametrize(
    ("name", "url"),
    [
        (STORE, "redis://host/zero"),
        (STORE, "redis://host/1/2"),
        (STORE, "redis://host/0/"),
        (STORE, "redis://host/-1"),
        (STORE, "redis://host/1.5"),
        (STORE, "redis://host/%31"),
        (STORE, "redis://host/1?db=2"),
        (STORE, "redis://host?db=zero"),
        (STORE, "redis://host?db=1&db=2"),
        (STORE, "redis://one,two"),
        (STORE, "redis://host name"),
        (STORE, "redis://::1:6379"),
        (STORE, "redis://[host]:6379"),
        (STORE, "redis+cluster://host/1"),
        (STORE, "redis+cluster://host?db=1"),
        (STORE, "redis+sentinel://host/primary/zero"),
        (STORE, "redis+sentinel://host/primary/0/1"),
        (STORE, "redis+sentinel://host/primary?sentinel_db=1"),
        (STORE, "unix://run/store.sock"),
        (STORE, "unix://"),
        (STORE, "unix:///run/store.sock?host=h"),
        (STORE, "redis://host?passw0rd=secret"),
        (STORE, "redis://host?secret"),
        (STORE, "redis://host?decode_responses=true"),
        (STORE, "redis://host?socket_timeout=secret"),
        (STORE, "redis://host?socket_timeout=0"),
        (STORE, "redis://host?socket_timeout="),
        (STORE, "redis://host?protocol=4"),
        (STORE, "redis://host?max_connections=0"),
        (STORE, "redis://host?ssl_cert_reqs=none"),
        (STORE, "rediss://host?ssl_cert_reqs=never"),
        (STORE, "rediss://host?ssl_min_version=1.2"),
        (STORE, "rediss+cluster://host?ssl_ca_path=/etc"),
        (STORE, "REDIS://host"),
        (STORE, "redis:host"),
        (STORE, " redis://host"),
        (STORE, "redis://host "),
        (CATALOG, "postgres://host/quotas"),
        (CATALOG, "postgresql+psycopg://host/quotas"),
        (CATALOG, "postgresql://host/quotas/secret"),
        (CATALOG, "postgresql://one,two/quotas"),
        (CATALOG, "postgresql://host/quotas?host=/run"),
        (CATALOG, "postgresql://host/quotas?pgbouncer=true"),
        (CATALOG, "postgresql://host/quotas?sslmode=maybe"),
        (CATALOG, "postgresql://host/quotas?connect_timeout=soon"),
        (CATALOG, "postgresql://host/quotas?connect_timeout=1&connect_timeout=2"),
        (CATALOG, "postgresql:///quotas?host=one&port=secret"),
        (CATALOG, "postgresql://host/quotas?replication=true"),
        (CATALOG, "sqlite://host/catalog.db"),
        (CATALOG, "sqlite://user:secret@/catalog.db"),
        (CATALOG, "sqlite:///catalog.db#secret"),
        (CATALOG, "sqlite:///catalog.db?mode=secret"),
        (CATALOG, "sqlite:///catalog.db?timeout=secret"),
        (CATALOG, "sqlite:///catalog%.db"),
        (CATALOG, "sqlite:///:memory:"),
        (CATALOG, "sqlite:catalog.db"),
        (LOG, "s4://bucket/logs"),
        (LOG, "s3:bucket/logs"),
        (LOG, "s3://KEY:se/cret@bucket/logs"),
        (LOG, "s3://KEY:se#cret@bucket/logs"),
        (LOG, "s3://bucket/logs?endpoint_override=http://u@secret"),
        ("KAFKA_BOOTSTRAP", "kafka://one:9092"),
        ("KAFKA_BOOTSTRAP", "user:secret@one:9092"),
        ("KAFKA_BOOTSTRAP", "one:9092/secret"),
    ],
)
def test_url_that_cannot_be_meant_is_refused(monkeypatch, name, url):
    message = refusal(monkeypatch, name, url)
    assert message.startswith(f"QUOTAGATE_{name}: ")
    assert ENCODE in message or name == "KAFKA_BOOTSTRAP"
    assert "secret" not in message


@pytest.mark.parametrize(
    ("name", "url"),
    [
        (STORE, "redis://host"),
        (STORE, "redis://host/"),
        (STORE, "redis://:@host:6379/15"),
        (STORE, "redis://user:a:b@[::1]:6379/0"),
        (STORE, "redis://valkey_1.example.?db=1&client_name=node&protocol=2&socket_keepalive=yes"),
        (STORE, "redis:///0?host=store.example&port=6380"),
        (STORE, "rediss://host?ssl_cert_reqs=none&ssl_check_hostname=false&ssl_min_version=772"),
        (STORE, "unix:///run/store.sock?db=2&password=secret"),
        (STORE, "unix://user:secret@/run/store.sock"),
        (STORE, "redis+sentinel://user:secret@one:1,[::1]/primary/2?sentinel_password=other"),
        (STORE, "redis+cluster://one:1,two:2/0?max_connections=4"),
        (CATALOG, "sqlite:///catalog.db"),
        (CATALOG, "sqlite:////srv/my files/me@work/catalog.db?timeout=2.5"),
        (CATALOG, "postgresql://host"),
        (CATALOG, "postgresql://user:a:b@[::1]:5432/quotas?sslmode=verify-full&sslrootcert=/etc/ca.pem"),
        (CATALOG, "postgresql:///quotas?host=/var/run/postgresql&user=quotagate"),
        (CATALOG, "postgresql:///quotas?host=one:5432&host=two:5433&target_session_attrs=read-write"),
        (CATALOG, "postgresql:///quotas?host=one,two&port=5432,5433"),
        (CATALOG, "postgresql:///?service=quotas"),
        (CATALOG, "postgresql://host/quotas?options=-c%20search_path%3Dquotas"),
        (LOG, "log"),
        (LOG, "/srv/logs of 2024/#1/me@work"),
        (LOG, "file:///srv/me@work/log"),
        (LOG, "s3://bucket/logs?region=eu-west-1&endpoint_override=localhost:9000"),
        (LOG, "s3://KEY:se%2Fcret@bucket/logs"),
        (LOG, "abfss://container@account.dfs.core.windows.net/logs"),
        (LOG, "gs://anonymous@bucket/logs"),
        (LOG, "hdfs://namenode:8020/logs"),
        (LOG, "viewfs:///logs"),
        ("KAFKA_BOOTSTRAP", "one:9092, two, [::1]:9093"),
    ],
)
def test_url_that_can_be_meant_is_accepted(monkeypatch, name, url):
    assert getattr(loaded(monkeypatch, name, url), name.lower()) == url


@pytest.mark.parametrize(
    ("name", "url", "said"),
    [
        (STORE, "redis://:secret@host:6379/0\n", "begins or ends with a blank or a line break"),
        (STORE, "redis+cluster://:secret@one,two\r\n", "begins or ends with a blank or a line break"),
        (CATALOG, "sqlite:///secret.db ", "begins or ends with a blank or a line break"),
        (CATALOG, "postgresql://u:secret@host/quotas\t", "begins or ends with a blank or a line break"),
        (STORE, "redis://:secret@host?ssl_cert_reqs=none", "those of TLS need rediss"),
        (STORE, "redis+sentinel://host/secret?ssl_ca_certs=/etc/ca.pem", "those of TLS need rediss"),
        (STORE, "redis+cluster://host?ssl_check_hostname=false", "those of TLS need rediss"),
        (CATALOG, "postgresql://%2Fvar%2Frun%2Fsecret/quotas", "postgresql:///NAME?host="),
        (CATALOG, "postgresql://u:secret@%2fvar%2frun/quotas", "postgresql:///NAME?host="),
        (CATALOG, "postgres://u:secret@host/quotas", "must begin with sqlite:// or postgresql://"),
    ],
)
def test_refusal_says_what_would_be_right(monkeypatch, name, url, said):
    message = refusal(monkeypatch, name, url)
    assert said in message
    assert "secret" not in message


def test_home_with_any_characters_has_its_catalog_in_it(monkeypatch, tmp_path):
    home = tmp_path / "who? 100% #1 me@work"
    given = loaded(monkeypatch, "HOME", str(home))
    assert make_url(given.catalog_url).database == str(home / "catalog.db")


def test_options_of_postgresql_are_those_of_libpq():
    theirs = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}
    assert theirs - {"host", "port", "replication"} <= database_url.LIBPQ.keys()
