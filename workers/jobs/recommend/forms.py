"""The forms of the quotas that are recommended: all their fields but the limit.

A form is taken from the default quota of the log, so that the buckets of a running deployment keep their
history. Without such a quota, the deployment's defaults give the form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from app.decision_log import columns
from app.domain.entity import Entity
from app.domain.ladder import Quotas
from app.domain.quota import (
    CONNECTION_CREATION_RATE,
    KEYS,
    LAYER_POLICIES,
    MAX_CONNECTION_CREATION_RATE,
    Defaults,
    Layers,
    Quota,
)
from app.domain.quota_value import check, resolve
from workers.jobs.batches import Task
from workers.jobs.verdicts import LogRows, among, flags, integers
from workers.jobs.whatif.log import ReplayedLog

DEFAULTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(KEYS, "user=*"),
    CONNECTION_CREATION_RATE: "ip=*",
    MAX_CONNECTION_CREATION_RATE: "listener=*",
}
"""The default entity for which each quota key is recommended."""

COLUMNS: Final = ("kind", "at_ms", "mode", "deny", "verdicts")

Form = tuple[int, dict[str, Any]]
"""A time, and the columns of a verdict that describe a quota."""


def forms_of(task: Task) -> dict[str, Form]:
    """The newest form of the default quota of each key among the rows of a task.

    Raises:
        JobError: the file cannot be read.
    """
    found: dict[str, Form] = {}
    for rows in task.each(COLUMNS):
        _add(found, _newest(rows))
    return found


def _newest(rows: LogRows) -> dict[str, Form]:
    plain = among(rows.column("kind"), "decision") & among(rows.column("mode"), "admit")
    plain &= ~flags(rows.column("deny"))  # it changes the enforcement
    at_ms = integers(rows.column("at_ms"))[rows.of_row]
    quota, entity = rows.verdict("quota"), rows.verdict("entity")
    found = {}
    for key, default in DEFAULTS.items():
        places = np.flatnonzero(plain[rows.of_row] & among(quota, key) & among(entity, default))
        if len(places):
            newest = int(places[np.argmax(at_ms[places])])
            fields = {name: rows.verdict(name)[newest].as_py() for name in columns.QUOTA}
            found[key] = int(at_ms[newest]), fields
    return found


def _add(found: dict[str, Form], others: Mapping[str, Form]) -> None:
    for key, form in others.items():
        if key not in found or found[key][0] < form[0]:
            found[key] = form


def forms(log: ReplayedLog, keys: Iterable[str], defaults: Defaults, share: float) -> Quotas:
    """A quota of each key for the default entity, in the form of the log, with a limit of 1.

    Args:
        share: see ``Runner``.

    Raises:
        JobError: a file cannot be read.
    """
    newest: dict[str, Form] = {}
    for found in log.runner.each(forms_of, log.tasks, share):
        _add(newest, found)
    quotas: dict[str, dict[Entity, Quota]] = {}
    for key in keys:
        entity = Entity.parse(DEFAULTS[key])
        quota = resolve(key, {"limit": 1}, entity, defaults, epoch=0)
        if key in newest:
            logged = columns.as_quota(newest[key][1])
            quota = replace(
                logged, limit=1.0, shadow=False, epoch=0, burst=logged.samples * logged.sample_ms / 1000
            )
        quotas[key] = {entity: quota}
    return quotas


def definition(form: Quota, entity: Entity, limit: float, defaults: Defaults) -> Mapping[str, object]:
    """A quota of a form as a file has it: the limit, and the fields that are not the defaults.

    >>> form = Quota("request_rate", 1.0, "sampled_rate", "deny")
    >>> definition(form, Entity.of(user="alice"), 7.0, Defaults())
    {'limit': 7, 'enforcement': 'deny'}
    """
    usual = resolve(form.key, {"limit": 1}, entity, defaults, epoch=0)
    written: dict[str, object] = {"limit": limit}
    if form.algorithm == "producer_ids":
        if form.window_ms != usual.window_ms:
            written["window_ms"] = form.window_ms
        if not _equal(form.layers, Layers.named(defaults.layers, form.window_ms)):
            written["layers"] = _layers(form)
    else:
        names = ("enforcement", "algorithm", "samples", "sample_ms", "scope")
        written |= {
            name: getattr(form, name) for name in names if getattr(form, name) != getattr(usual, name)
        }
    return check(form.key, written, entity, defaults)


def _layers(form: Quota) -> object:
    for policy in LAYER_POLICIES:
        if _equal(form.layers, Layers.named(policy, form.window_ms)):
            return policy
    return {"interval_ms": form.layers.interval_ms, "ttl_ms": form.layers.ttl_ms}


def _equal(one: Layers, other: Layers) -> bool:
    return (one.interval_ms, one.ttl_ms) == (other.interval_ms, other.ttl_ms)
