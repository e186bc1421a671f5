"""Settings: their defaults, refused values with their errors, and the page that lists them."""

from __future__ import annotations

import os
from datetime import timedelta
from ipaddress import ip_network
from pathlib import Path

import pytest

from app.node import settings
from app.node.errors import SettingsError
from app.node.settings import Settings
from app.run import reference

ROOT = Path(__file__).parents[3]
OBSERVING = {"VOLUME_SOURCE": "kafka", "VOLUME_MIN_AVAILABLE_RATIO": "0.1", "KAFKA_BOOTSTRAP": "b1:9092"}


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Remove the settings of the person who runs the tests."""
    for name in [name for name in os.environ if name.startswith("QUOTAGATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def load(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Settings:
    for name, value in variables.items():
        monkeypatch.setenv(f"QUOTAGATE_{name}", value)
    return settings.load()


def test_defaults_are_a_loopback_node_with_embedded_state(monkeypatch):
    given = load(monkeypatch)
    assert (given.host, given.port, given.processes) == ("127.0.0.1", 8080, 1)
    assert given.redis_url is None
    assert given.catalog_url == f"sqlite:///{Path.cwd()}/.quotagate/catalog.db"
    assert given.open_to == (ip_network("127.0.0.0/8"), ip_network("::1/128"))
    assert (given.samples, given.sample_ms) == (11, 1_000)
    assert given.volume_check_interval == timedelta(seconds=60)
    assert (given.store_budget_ms, given.queue_ms) == (50, 2_000)
    assert (given.max_connections, given.max_connections_per_address) == (None, None)
    assert given.allowed_hosts == ("localhost",)
    assert given.log_max_bytes is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOST", ""),
        ("PORT", "http"),
        ("PORT", "0"),
        ("PORT", "65536"),
        ("PROCESSES", "0"),
        ("PROCESSES", "257"),
        ("PROCESSES", "automatic"),
        ("REDIS_URL", "localhost:6379"),
        ("REDIS_URL", "http://localhost"),
        ("REDIS_URL", "redis+sentinel://one:1,two:2"),
        ("REDIS_URL", "redis+sentinel:///primary"),
        ("REDIS_URL", "redis+sentinel://one:port/primary"),
        ("REDIS_URL", "redis+sentinel://one/primary/zero"),
        ("DATABASE_URL", "mysql://localhost/q"),
        ("ADMIN_KEY", "two words of a long key"),
        ("ADMIN_KEY", "a"),
        ("ADMIN_KEY", "fifteen-letters"),
        ("OPEN_TO", "10.0.0.0/33"),
        ("OPEN_TO", "10.0.0.1/8"),
        ("OPEN_TO", "everyone"),
        ("ALLOWED_HOSTS", "gate.example:8080"),
        ("ALLOWED_HOSTS", "http://gate.example"),
        ("ALLOWED_HOSTS", "*"),
        ("ALLOWED_HOSTS", "gate.example."),
        ("HASH_SECRET", "00" * 31),
        ("HASH_SECRET", "zz" * 32),
        ("CLOCK", "mine"),
        ("STORE_BUDGET_MS", "0"),
        ("STORE_BUDGET_MS", "1.5"),
        ("QUEUE_MS", "0"),
        ("QUEUE_MS", "60001"),
        ("MAX_CONNECTIONS", "0"),
        ("MAX_CONNECTIONS_PER_ADDRESS", "many"),
        ("COMBINE_DELAYS", "min"),
        ("CHECK_IP_HEADER", "X Forwarded"),
        ("TRUSTED_PROXIES", "proxy.example"),
        ("IPV6_PREFIX", "129"),
        ("SAMPLES", "1"),
        ("SAMPLES", "101"),
        ("SAMPLE_MS", "99"),
        ("PRODUCER_ID_WINDOW_MS", "999"),
        ("PRODUCER_ID_WINDOW_MS", "2073600001"),
        ("PRODUCER_ID_LAYERS", "4"),
        ("TLS_CERT", "/nowhere/cert.pem"),
        ("MAX_IDS_PER_PRINCIPAL", "-1"),
        ("VOLUME_SOURCE", "disk"),
        ("VOLUME_MIN_AVAILABLE_BYTES", "0"),
        ("VOLUME_MIN_AVAILABLE_BYTES", "-1"),
        ("VOLUME_MIN_AVAILABLE_RATIO", "1"),
        ("VOLUME_MIN_AVAILABLE_RATIO", "1.5"),
        ("VOLUME_MIN_AVAILABLE_RATIO", "-0.1"),
        ("VOLUME_CHECK_INTERVAL", "60"),
        ("VOLUME_CHECK_INTERVAL", "-PT1S"),
        ("VOLUME_VALIDITY", "5 minutes"),
        ("MAX_DEBT", "PT0S"),
        ("MAX_DEBT", "P25D"),
        ("MAX_DEBT", "3600"),
        ("HISTORY_RETENTION", "30"),
        ("HISTORY_RETENTION", "-P1D"),
        ("VOLUME_FALLBACK_FACTOR", "1.1"),
        ("VOLUME_FALLBACK_FACTOR", "nan"),
        ("LOG", "some"),
        ("LOG_IDS", "none"),
        ("LOG_RETENTION", "P"),
        ("LOG_MAX_BYTES", "0"),
        ("LOG_MAX_BYTES", "1GB"),
        ("REPORTS", "/nowhere"),
        ("REPORTS", __file__),
    ],
)
def test_invalid_value_is_refused_by_name(monkeypatch, name, value):
    with pytest.raises(SettingsError, match=f"^QUOTAGATE_{name}: ."):
        load(monkeypatch, **{name: value})


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("CLOCK", {"CLOCK": "caller", "HOST": "0.0.0.0"}),
        ("CLOCK", {"CLOCK": "caller", "HOST": "gate.example"}),
        ("TLS_CERT", {"TLS_CERT": __file__}),
        ("TLS_CLIENT_CA", {"TLS_CLIENT_CA": __file__}),
        ("ENVOY_PORT", {"ENVOY_PORT": "8080"}),
        ("VOLUME_MIN_AVAILABLE_BYTES", {"VOLUME_SOURCE": "push"}),
        ("VOLUME_CHECK_INTERVAL", {"VOLUME_CHECK_INTERVAL": "PT0.05S"}),
        (
            "VOLUME_MIN_AVAILABLE_BYTES",
            {"VOLUME_MIN_AVAILABLE_BYTES": "1", "VOLUME_MIN_AVAILABLE_RATIO": "0.1"},
        ),
        (
            "VOLUME_MIN_AVAILABLE_BYTES",
            {
                "VOLUME_SOURCE": "push",
                "VOLUME_MIN_AVAILABLE_BYTES": "1",
                "VOLUME_MIN_AVAILABLE_RATIO": "0.1",
            },
        ),
        (
            "VOLUME_VALIDITY",
            {"VOLUME_SOURCE": "push", "VOLUME_MIN_AVAILABLE_BYTES": "1", "VOLUME_VALIDITY": "PT59S"},
        ),
        ("KAFKA_BOOTSTRAP", {"VOLUME_SOURCE": "kafka", "VOLUME_MIN_AVAILABLE_RATIO": "0.1"}),
        ("KAFKA_BOOTSTRAP", {**OBSERVING, "KAFKA_BOOTSTRAP": "b1:http"}),
        ("KAFKA_SSL_CAFILE", {**OBSERVING, "KAFKA_SSL_CAFILE": "/nowhere"}),
        ("KAFKA_SECURTY_PROTOCOL", {**OBSERVING, "KAFKA_SECURTY_PROTOCOL": "SSL"}),
    ],
)
def test_invalid_combination_is_refused_by_name(monkeypatch, name, variables):
    with pytest.raises(SettingsError, match=f"^QUOTAGATE_{name}: ."):
        load(monkeypatch, **variables)


@pytest.mark.parametrize("reports", ["home", "home/..", ".", "linked", "linked-above", "/"])
def test_folder_of_reports_that_is_or_holds_the_home_is_refused(monkeypatch, tmp_path, reports):
    (tmp_path / "home").mkdir()
    (tmp_path / "linked").symlink_to("home")
    (tmp_path / "linked-above").symlink_to(tmp_path.parent)
    with pytest.raises(SettingsError, match=r"^QUOTAGATE_REPORTS: is or holds QUOTAGATE_HOME"):
        load(monkeypatch, HOME="home", REPORTS=reports)
    with pytest.raises(SettingsError, match=r"^QUOTAGATE_REPORTS: is or holds QUOTAGATE_HOME"):
        load(monkeypatch, HOME="linked/not/made/yet", REPORTS=reports)


def test_folder_of_reports_may_be_in_the_home_or_next_to_it(monkeypatch, tmp_path):
    for name in ("home/reports", "home-reports"):
        (tmp_path / name).mkdir(parents=True)
        assert load(monkeypatch, HOME="home", REPORTS=name).reports == Path(name)
    assert load(monkeypatch, REPORTS="").reports is None


def test_all_invalid_settings_are_named_at_once(monkeypatch):
    with pytest.raises(SettingsError) as refused:
        load(monkeypatch, PORT="x", LOG="x")
    assert [line.partition(":")[0] for line in str(refused.value).splitlines()] == [
        "QUOTAGATE_PORT",
        "QUOTAGATE_LOG",
    ]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_caller_clock_is_allowed_on_loopback(monkeypatch, host):
    assert load(monkeypatch, CLOCK="caller", HOST=host).clock == "caller"


def test_empty_open_to_is_no_network(monkeypatch):
    assert load(monkeypatch, OPEN_TO="").open_to == ()


def test_admin_key_of_sixteen_characters_is_accepted(monkeypatch):
    given = load(monkeypatch, ADMIN_KEY="sixteen-letters!")
    assert given.admin_key is not None
    assert given.admin_key.get_secret_value() == "sixteen-letters!"


def test_allowed_hosts_are_read_in_lower_case(monkeypatch):
    assert load(monkeypatch, ALLOWED_HOSTS="Gate.Example, localhost").allowed_hosts == (
        "gate.example",
        "localhost",
    )
    assert load(monkeypatch, ALLOWED_HOSTS="").allowed_hosts == ()


def test_lists_are_read(monkeypatch):
    given = load(
        monkeypatch,
        OPEN_TO="10.0.0.0/8, ::1",
        VOLUME_EXCLUDED_PRINCIPALS="CN=a,O=b; carol",
        KAFKA_BOOTSTRAP="b1:9092",
        KAFKA_SECURITY_PROTOCOL="SSL",
    )
    assert given.open_to == (ip_network("10.0.0.0/8"), ip_network("::1/128"))
    assert given.volume_excluded_principals == ("CN=a,O=b", "carol")
    assert given.kafka_bootstrap == "b1:9092"
    assert given.kafka == {"security_protocol": "SSL"}


def test_empty_value_is_none_where_none_is_possible(monkeypatch):
    given = load(monkeypatch, REDIS_URL="", VOLUME_SOURCE="", TLS_CERT="", HASH_SECRET="", LOG_MAX_BYTES="")
    assert (given.redis_url, given.volume_source, given.tls_cert, given.hash_secret) == (None,) * 4
    assert given.log_max_bytes is None


def test_secrets_are_not_in_messages_and_representations(monkeypatch):
    given = load(
        monkeypatch,
        ADMIN_KEY="key-4711-of-the-tests",
        HASH_SECRET="ab" * 32,
        REDIS_URL="redis://:pass-4711@host",
        KAFKA_SASL_PLAIN_PASSWORD="pass-4711",
    )
    assert given.hash_secret == b"\xab" * 32
    assert "4711" not in repr(given)
    assert "abab" not in repr(given)
    with pytest.raises(SettingsError) as refused:
        load(monkeypatch, REDIS_URL="redsi://:pass-4711@host", ADMIN_KEY="key 4711 of the tests")
    assert "4711" not in str(refused.value)


def test_environment_overrides_the_file(monkeypatch):
    Path(".env").write_text("QUOTAGATE_PORT=9000\nQUOTAGATE_SAMPLES=5\nOTHER=1\n", encoding="utf-8")
    given = load(monkeypatch, PORT="9001")
    assert (given.port, given.samples) == (9001, 5)
    named = Path("named.env")
    named.write_text("QUOTAGATE_SAMPLES=7\n", encoding="utf-8")
    assert settings.load(named).samples == 7
    with pytest.raises(SettingsError, match="no such file"):
        settings.load(Path("absent.env"))


def test_file_that_is_not_text_is_refused_by_name():
    Path("latin.env").write_bytes(b"QUOTAGATE_PORT=9000\nQUOTAGATE_HOST=\xff\n")
    with pytest.raises(SettingsError, match=r"latin\.env: is not UTF-8: byte 35 is wrong"):
        settings.load(Path("latin.env"))


def test_variables_that_nothing_reads_are_found(monkeypatch):
    Path(".env").write_text("QUOTAGATE_PROT=9000\n", encoding="utf-8")
    for name in ("QUOTAGATE_OPENTO", "QUOTAGATE_PORT", "QUOTAGATE_KAFKA_SSL_CAFILE", "QUOTAGATE_KEY"):
        monkeypatch.setenv(name, "1")
    assert settings.unknown_variables(settings.given_variables()) == ["QUOTAGATE_OPENTO", "QUOTAGATE_PROT"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("REDIS_URL", '"redis://:pass-4711@host"'),
        ("PORT", "'8080'"),
        ("PORT", '"8080'),
        ("ADMIN_KEY", '"key-4711-of-the-tests"'),
        ("HOME", "'/var/lib/quotagate'"),
        ("OPEN_TO", '"10.0.0.0/8"'),
        ("VOLUME_EXCLUDED_PRINCIPALS", '"CN=a,O=b"'),
        ("LOG", "\u201cdenied\u201d"),
        ("LOG_URL", "'s3://bucket/logs'"),
        ("KAFKA_BOOTSTRAP", '"b1:9092"'),
        ("KAFKA_SECURITY_PROTOCOL", "'SSL'"),
        ("KAFKA_SASL_PLAIN_PASSWORD", '"pass-4711"'),
        ("HOST", '"'),
    ],
)
def test_quotation_marks_around_a_value_are_named(monkeypatch, name, value):
    """Docker's --env-file takes them as a part of the value."""
    with pytest.raises(SettingsError) as refused:
        load(monkeypatch, **{name: value})
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"QUOTAGATE_{name}: begins with a quotation mark")
    assert "4711" not in line


def test_quotation_marks_are_allowed_in_a_file_and_in_another_programs_password(monkeypatch):
    Path(".env").write_text("QUOTAGATE_PORT='9000'\nQUOTAGATE_LOG=\"all\"\n", encoding="utf-8")
    given = load(monkeypatch, KAFKA_SASL_PLAIN_PASSWORD='"begins with one')
    assert (given.port, given.log) == (9000, "all")
    assert given.kafka == {"sasl_plain_password": '"begins with one'}


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("PROT", "PORT"),
        ("OPENTO", "OPEN_TO"),
        ("REDIS", "REDIS_URL"),
        ("DATABASE", "DATABASE_URL"),
        ("DB_URL", "DATABASE_URL"),
        ("POSTGRES_URL", ""),
        ("DRAIN", "DRAIN_MS"),
        ("PRODUCER_ID_WINDOW", "PRODUCER_ID_WINDOW_MS"),
        ("KAFKA_BOOTSTRAP_SERVERS", "KAFKA_BOOTSTRAP"),
        ("KAFKA_SECURTY_PROTOCOL", "KAFKA_SECURITY_PROTOCOL"),
        ("MAX_CONNECTION", "MAX_CONNECTIONS"),
    ],
)
def test_unknown_variable_is_named_with_the_closest_setting(monkeypatch, name, closest):
    given = load(monkeypatch, **{name: "1"})
    assert given.unknown_variables == (f"QUOTAGATE_{name}",)
    explained = settings.explained(f"QUOTAGATE_{name}", settings.given_variables())
    assert explained.startswith("did you mean QUOTAGATE_")
    if closest:
        assert explained == f"did you mean QUOTAGATE_{closest}?"


SERVICE_LINKS = {
    "SERVICE_HOST": "10.0.0.1",
    "SERVICE_PORT": "8080",
    "SERVICE_PORT_HTTP": "8080",
    "PORT_8080_TCP": "tcp://10.0.0.1:8080",
    "PORT_8080_TCP_PROTO": "tcp",
    "PORT_8080_TCP_PORT": "8080",
    "PORT_8080_TCP_ADDR": "10.0.0.1",
    "API_PORT": "tcp://10.0.0.2:80",
    "API_SERVICE_HOST": "10.0.0.2",
    "API_SERVICE_PORT_GRPC_ENVOY": "8081",
    "API_PORT_8081_UDP_ADDR": "10.0.0.2",
    "KAFKA_PORT": "tcp://10.0.0.3:9092",
    "KAFKA_SERVICE_HOST": "10.0.0.3",
    "KAFKA_PORT_9092_TCP": "tcp://10.0.0.3:9092",
}


def test_service_links_of_kubernetes_are_explained(monkeypatch):
    """The links of Services named quotagate, quotagate-api and quotagate-kafka."""
    given = load(monkeypatch, **OBSERVING, **SERVICE_LINKS)
    assert given.kafka == {}
    assert given.unknown_variables == tuple(sorted(f"QUOTAGATE_{name}" for name in SERVICE_LINKS))
    for name in given.unknown_variables:
        assert "enableServiceLinks: false" in settings.explained(name, settings.given_variables())


@pytest.mark.parametrize("name", ["PORT", "ENVOY_PORT"])
def test_service_link_in_place_of_a_setting_is_refused_and_explained(monkeypatch, name):
    with pytest.raises(SettingsError) as refused:
        load(monkeypatch, **{name: "tcp://10.0.0.1:8080"})
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"QUOTAGATE_{name}: is a service link of Kubernetes")
    assert "enableServiceLinks: false" in line


def test_settings_are_immutable(monkeypatch):
    given = load(monkeypatch)
    with pytest.raises(ValueError, match="frozen"):
        given.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8080"),
        ("::", "http://[::1]:8080"),
        ("gate.example", "http://gate.example:8080"),
    ],
)
def test_base_url_reaches_the_api_from_this_machine(monkeypatch, host, url):
    assert load(monkeypatch, HOST=host).base_url == url


def test_settings_page_is_current():
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == reference.page(), (
        "run `make settings`"
    )


def test_every_setting_has_a_description():
    assert all(about.description for about in Settings.model_fields.values())


def test_page_of_proposals_names_existing_settings():
    known = {f"QUOTAGATE_{name.upper()}" for name in Settings.model_fields} | {"QUOTAGATE_KAFKA_*"}
    ours = {
        part
        for _, _, here in reference.SPELLINGS
        for part in here.split("`")
        if part.startswith("QUOTAGATE_")
    }
    assert ours <= known
