"""Writes `docs/settings.md` from `Settings`, with the names that the proposals use (`make settings`)."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from app.node.settings import PREFIX, Settings
from app.store import rights

SPELLINGS: Final[tuple[tuple[str, str, str], ...]] = (
    (
        "KIP-936, first draft",
        "`producer.id.quota.window.num`",
        "not needed: the window is counted exactly",
    ),
    ("KIP-936, first draft", "`producer.id.quota.window.size.seconds`", "`QUOTAGATE_PRODUCER_ID_WINDOW_MS`"),
    (
        "KIP-936, first draft",
        "`producer.id.quota.cache.cleanup.scheduler.interval.ms`",
        "not needed: keys expire by themselves",
    ),
    (
        "KIP-936, both",
        "the filter's false-positive rate and layer count",
        "`QUOTAGATE_PRODUCER_ID_LAYERS`; the rate is at most 1e-4",
    ),
    ("KIP-124, KIP-612", "`quota.window.num`", "`QUOTAGATE_SAMPLES`, or `samples` of a quota"),
    ("KIP-124, KIP-612", "`quota.window.size.seconds`", "`QUOTAGATE_SAMPLE_MS`, or `sample_ms` of a quota"),
    ("KIP-612", "`max.connection.creation.rate`", "`max_connection_creation_rate` on `broker=*`"),
    (
        "KIP-612",
        "`listener.name.{name}.max.connection.creation.rate`",
        "`max_connection_creation_rate` on `listener={name}`",
    ),
    ("KIP-612", "`max.connection.creation.rate.per.ip`", "`connection_creation_rate` on `ip=*`"),
    (
        "KIP-612",
        "`max.connection.creation.rate.per.ip.overrides`",
        "`connection_creation_rate` on `ip={address}`",
    ),
    ("KIP-612", "`inter.broker.listener.name`", "`QUOTAGATE_INTER_BROKER_LISTENER`"),
    ("Strimzi", "`storage.check.interval`", "`QUOTAGATE_VOLUME_CHECK_INTERVAL`"),
    ("Strimzi", "`throttle.factor.fallback`", "`QUOTAGATE_VOLUME_FALLBACK_FACTOR`"),
    ("Strimzi", "`throttle.factor.validity.duration`", "`QUOTAGATE_VOLUME_VALIDITY`"),
    (
        "Strimzi",
        "`storage.per.volume.limit.min.available.bytes`",
        "`QUOTAGATE_VOLUME_MIN_AVAILABLE_BYTES`",
    ),
    (
        "Strimzi",
        "`storage.per.volume.limit.min.available.ratio`",
        "`QUOTAGATE_VOLUME_MIN_AVAILABLE_RATIO`",
    ),
    ("Strimzi's plugin", "`excluded.principal.name.list`", "`QUOTAGATE_VOLUME_EXCLUDED_PRINCIPALS`"),
    ("Strimzi", "`kafka.admin.bootstrap.servers`", "`QUOTAGATE_KAFKA_BOOTSTRAP`"),
    ("Strimzi", "`kafka.admin.*`", "`QUOTAGATE_KAFKA_*`, in capitals, `_` for `.`"),
)
"""(proposal, its name, ours); Strimzi's names without `client.quota.callback.static.`"""

_HEAD = """\
# Settings

Generated from `app/node/settings.py` by `make settings`; a test checks that it is current.

Settings are read once, at start, from the environment or from a `.env` file in the working directory
(`--env-file` names another file). The environment overrides the file. With an invalid value, Quotagate does
not start and names the setting. Durations are ISO 8601: `PT60S`. Values have no quotation marks around them,
unlike in a `.env` file.

A `QUOTAGATE_*` variable that nothing reads gets a warning in the log, with the closest setting, and
`/health/ready` says `"settings": "unknown"`; callers with the scope `read` see its name there.

In URLs, percent-encode special characters of user names, passwords and paths, such as `/` by `%2F`, `#` by
`%23`, `@` by `%40` and `%` by `%25`: with the password `57#W/c`, `redis://:57%23W%2Fc@host:6379/0`. A URL
that cannot be meant is refused.

Traces have no settings here: the variables of OpenTelemetry turn them on ([traces.md](traces.md)).

| name | default | meaning |
|---|---|---|
"""

_SPELLINGS_HEAD = """
## The proposals' settings and ours

Strimzi's settings begin with `client.quota.callback.static.`

| proposal | its name | here |
|---|---|---|
"""


_RIGHTS = f"""
## The least rights in the store

A user of the store, on one server and behind sentinels, needs this rule of `ACL SETUSER` and a password:

```text
{rights.rule(clustered=False)}
```

On every node of a cluster:

```text
{rights.rule(clustered=True)}
```

On the sentinels, if they have users (`sentinel_username` and `sentinel_password` in the URL):

```text
{rights.rule_of_sentinels()}
```

The pattern covers all keys. With another database than 0, add `+select`; with
`health_check_interval`, add `+ping`. `CLIENT` is not needed: without it,
connections have no name. On a cluster, `+config|get` lets a node warn of `cluster-require-full-coverage`.

A node examines its rights at start and every few seconds. If one is missing, the log names it, such as
`the store's user may not run TIME`, and `/health/ready` says `missing_right` in `store`.
"""


def page() -> str:
    """Return the whole page."""
    rows = [
        f"| `{_name(field)}` | {_default(about.default)} | {_one_line(about.description)} |\n"
        for field, about in Settings.model_fields.items()
    ]
    spellings = [f"| {proposal} | {theirs} | {ours} |\n" for proposal, theirs, ours in SPELLINGS]
    return _HEAD + "".join(rows) + _RIGHTS + _SPELLINGS_HEAD + "".join(spellings)


def _name(field: str) -> str:
    return f"{PREFIX}{field.upper()}" + ("_*" if field == "kafka" else "")


def _one_line(text: str | None) -> str:
    """A documentation string as a cell of a table."""
    return " ".join((text or "").split())


def _default(value: Any) -> str:
    match value:
        case None | () | {}:
            return "none"
        case timedelta():
            return f"`{TypeAdapter(timedelta).dump_python(value, mode='json')}`"
        case tuple():
            return f"`{','.join(str(part) for part in value)}`"
        case str() | int() | float() | Path():
            return f"`{value}`"
    raise TypeError(f"cannot show {value!r}")


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201
