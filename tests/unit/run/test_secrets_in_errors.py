"""No error message repeats a word that may be a secret, at any place of the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from app.redaction import redact, url_without_secrets
from app.run import cli
from tests.commands import Command, Gate, Ran, noting, parser_of, quotagate
from tests.unit.run.test_every_command import COMMANDS, JOBS, _surroundings
from workers.arguments import PlainArgumentParser
from workers.generate.__main__ import cli as generate
from workers.jobs.__main__ import Processes
from workers.jobs.command import command_line
from workers.spark.__main__ import Spark

__all__ = ["_surroundings", "quotagate"]

SECRETS: Final = ("hunter2", "Tr0ub4dor&3", "correct-horse", "pä55wörd", "qg_zQ8Xw71", "Großstraße7")
SPELLINGS: Final = (
    "{}",
    "password={}",
    "user:{}@kafka:9092",
    "http://admin:{}@127.0.0.1:1/a",
    "redis://:{}@127.0.0.1:6379/0",
    "SCRAM-SHA-256=[iterations=8192,password={}]",
    'org.apache.kafka.PlainLoginModule required username="u" password="{}";',
)
"""How a person pastes a secret: alone, in a property, in a URL, as a credential of Kafka."""


@pytest.fixture(scope="module")
def gate() -> Iterator[Gate]:
    with noting() as noted:
        yield noted


def command(name: str) -> Any:
    found: Any = parser_of(cli.cli)
    for word in name.split():
        found = found.commands[word]
    return found


def options(name: str) -> list[list[str]]:
    """The options of a command that take a value, each with the words of its longest name."""
    if name in JOBS:
        parser: Any = command_line(Spark() if name == "spark" else Processes())
        job = name if name in {"audit", "recommend", "whatif"} else "backfill"
        actions = parser._subparsers._group_actions[0].choices[job]._actions
        return [[each.option_strings[-1]] for each in actions if each.option_strings and each.nargs != 0]
    found = command(name)
    if name == "generate":
        program: Any = parser_of(generate)
        found = program.commands["drive"]
    return [
        [param.opts[0]]
        for param in found.params
        if param.opts[0].startswith("-") and not (param.is_flag or param.count)
    ]


def placements(name: str) -> Iterator[tuple[str, Sequence[str]]]:
    """The words of a command with `SECRET` in each place."""
    given = list(COMMANDS[name])
    if name == "spark":
        given = ["backfill", "--out", "x", "--at", "soon"]
    yield "one more word", [*given, "SECRET"]
    yield "two more words", [*given, "SECRET", "SECRET"]
    yield "the only word", ["SECRET"]
    yield "an unknown option", [*given, "--no-such-option=SECRET"]
    for place in range(len(given)):
        yield f"word {place}", [*given[:place], "SECRET", *given[place + 1 :]]
    for [option] in options(name):
        if (name, option) != ("spark", "--java"):
            yield f"{option} SECRET", [*given, option, "SECRET"]


CASES: Final = [
    pytest.param(number, name, words, id=f"{name}: {place}")
    for number, (name, place, words) in enumerate(
        (name, place, words) for name in COMMANDS for place, words in placements(name)
    )
]


def assert_hidden(ran: Ran, secret: str) -> None:
    printed = ran.err if ran.code else ""
    # A frame of the terminal may split a word.
    for text in (printed, "".join(printed.replace("│", "").split())):
        assert secret not in text, text
        assert json.dumps(secret)[1:-1] not in text, text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # typer leaves files open
@pytest.mark.parametrize(("number", "name", "words"), CASES)
def test_secret_on_the_command_line_is_not_shown(
    number: int,
    name: str,
    words: Sequence[str],
    quotagate: Command,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("QUOTAGATE_URL", gate.url)
    monkeypatch.setenv("QUOTAGATE_HASH_SECRET", "ab" * 32)
    secret = SECRETS[number % len(SECRETS)]
    spelling = SPELLINGS[number % len(SPELLINGS)].format(secret)
    spelled = [word.replace("SECRET", spelling).replace("URL", gate.url) for word in words]
    assert_hidden(quotagate(*name.split(), *spelled), secret)


@pytest.mark.parametrize("secret", SECRETS)
def test_wrong_command_is_not_shown(secret: str, quotagate: Command):
    for words in ((secret,), ("quotas", secret), ("keys", secret, "x"), ("quotas", "--alter", secret)):
        ran = quotagate(*words)
        assert ran.code == 2
        assert_hidden(ran, secret)


@pytest.mark.parametrize("secret", SECRETS)
def test_secret_of_the_environment_is_not_shown(
    secret: str, quotagate: Command, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("QUOTAGATE_KEY", f"{secret}\n\x01")
    monkeypatch.setenv("QUOTAGATE_URL", gate.url)
    assert_hidden(quotagate("quotas", "list"), secret)
    for url in (f"http://me:{secret}@127.0.0.1:1", f"http://127.0.0.1:{secret}", f"http://[{secret}"):
        monkeypatch.setenv("QUOTAGATE_URL", url)
        ran = quotagate("quotas", "list")
        assert ran.code == 1
        assert_hidden(ran, secret)
    monkeypatch.setenv("QUOTAGATE_URL", "http://gate.example")
    for proxy in (f"http://me:{secret}@proxy:port", f"ftp://me:{secret}@proxy"):
        monkeypatch.setenv("HTTP_PROXY", proxy)
        ran = quotagate("quotas", "list")
        assert ran.code == 1
        assert_hidden(ran, secret)


PASTED: Final = (
    'sasl.jaas.config=org.apache.kafka.PlainLoginModule required username="u" password="{0}";\n',
    "password={0}\n",
    "password: {0}\n",
    "{0}\n",
    "- {0}\n",
    "quotas: *{0}\n",
    "quotas: !{0} 5\n",
    "quotas: {{user=a: {{request_rate: {0}}}}}\n",
    "key = {0}\n",
    '{{"password": "{0}"',
    '{{"password": "{0}"}}',
)
"""Files of another kind, such as properties of a Kafka client, that are given in place of ours."""


@pytest.mark.parametrize("text", PASTED)
@pytest.mark.parametrize(
    "words",
    [
        ("quotas", "lint", "-f", "FILE"),
        ("quotas", "plan", "-f", "FILE"),
        ("whatif", "--out", "out", "--quotas", "FILE"),
        ("quotas", "list", "--config", "FILE"),
        ("quotas", "import-envoy", "FILE", "--out", "out"),
        ("volumes", "push", "FILE"),
        ("quotas", "--alter", "--user", "a", "--add-config-file", "FILE"),
        ("quotas", "--describe", "--user", "a", "--command-config", "FILE"),
    ],
    ids=" ".join,
)
def test_content_of_a_wrong_file_is_not_shown(
    text: str, words: Sequence[str], quotagate: Command, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("QUOTAGATE_URL", gate.url)
    for secret in ("hunter2", "Tr0ub4dor", "qg_zQ8Xw71"):
        Path("client.properties").write_text(text.format(secret), encoding="utf-8")
        ran = quotagate(*(word.replace("FILE", "client.properties") for word in words))
        assert ran.code, ran
        assert_hidden(ran, secret)


def test_words_that_say_where_the_fault_is_are_shown(quotagate: Command, gate: Gate, tmp_path: Path):
    there = tmp_path / "broken.yaml"
    there.write_text("{")
    url = "http://127.0.0.1:1"
    for words, shown in (
        (("quotas", "plan", "-f", str(there)), "broken.yaml"),
        (("quotas", "lint", "-f", "missing.yaml"), "missing.yaml"),
        (("whatif", "--out", "x", "--quotas", str(there)), "broken.yaml:2: not YAML"),
        (("quotas", "get", "user=alice", "--url", url), f"{url}/v1/quotas/user=alice"),
        (("quotas", "get", "user=alice", "--url", "http://me:pw@127.0.0.1:1"), "--url or QUOTAGATE_URL"),
        (("quotas", "list", "--limit", "many"), "--limit"),
        (("quotas", "get", "user=alice", "-o", "xml"), "'table', 'json', 'yaml'"),
        (("quotas", "lst"), "list"),
        (("quotas", "--alter", "--user", "a", "--add-config", "request_rte=5"), "did you mean request_rate?"),
        (("spark", "audit", "--out", "x", "--clock", "wall"), "store"),
        (("quotas", "lst"), "'lst'"),
        (("quotas", "get", "usr=alice"), "unknown entity type 'usr'"),
        (("quotas", "get", "user=alice,clientid=etl"), "unknown entity type 'clientid'"),
    ):
        ran = quotagate(*words)
        assert ran.code
        assert "".join(shown.split()) in "".join(ran.err.replace("│", "").split()), ran.err


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://a/b", "http://a/b"),
        ("https://me:pw@a:1/b?token=x#y", "https://a:1/b"),
        ("redis://:p/w@a/0", "redis://..."),
        ("s3://key:pw@bucket/log?region=x", "s3://bucket/log"),
        ("http://[pw", "http://..."),
        ("/logs/a@b", "/logs/a@b"),
        ("me:pw@host", "me://..."),
        (":pw@host", "..."),
    ],
)
def test_url_is_named_without_secrets(url: str, shown: str):
    assert url_without_secrets(url) == shown


def test_short_and_known_words_stay():
    words = ["quotas", "set", "to", "request_rate=5", "--limit", "80", "x.yaml"]
    message = "write request_rate=5 to quotas, limit 80, of x.yaml"
    assert redact(message, words, {"quotas", "set", "request_rate"}) == message


@pytest.mark.parametrize(
    ("words", "message", "shown"),
    [
        (["request_rte=5"], "request_rte: use request_rate", "request_rte: use request_rate"),
        (["request_rate=limits=5"], "request_rate.limits: unknown", "request_rate.limits: unknown"),
        (["request_rate=hunter2"], "request_rate: hunter2", "request_rate: ..."),
        (["request_rat=request_rqte"], "request_rat: request_rqte", "request_rat: request_..."),
        (["limits7"], "limits7: unknown", "...: unknown"),
        (["-phunter"], "unrecognized: -phunter", "unrecognized: ..."),
        (["/hunterx"], "no file /hunterx", "no file ..."),
    ],
)
def test_slip_in_a_name_is_shown_and_a_value_is_not(words: Sequence[str], message: str, shown: str):
    assert redact(message, words, {"request_rate", "limit"}) == shown


def test_parser_hides_words_and_shows_choices(capsys: pytest.CaptureFixture[str]):
    parser = PlainArgumentParser()
    parser.add_argument("--clock", choices=("store", "caller"))
    with pytest.raises(SystemExit):
        parser.parse_args(["--clock", "hunter2"])
    said = capsys.readouterr().err
    assert "hunter2" not in said
    assert "store" in said
