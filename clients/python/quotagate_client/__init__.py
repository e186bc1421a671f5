"""Asks Quotagate: may this work go ahead, or must it wait N milliseconds?"""

from __future__ import annotations

from quotagate_client.aio import AsyncClient, AsyncLeased
from quotagate_client.asks import Ask, Usage
from quotagate_client.check import Check, CheckHeaders
from quotagate_client.client import Client, Leased
from quotagate_client.errors import (
    BatchCutShort,
    DeadlinePassed,
    FieldError,
    NotAdmitted,
    NotUnderstood,
    Overloaded,
    Problem,
    QuotagateError,
    Rejected,
    Unreachable,
)
from quotagate_client.results import Decision, LimitedBy, Verdict
from quotagate_client.retries import Retries

__all__ = [
    "Ask",
    "AsyncClient",
    "AsyncLeased",
    "BatchCutShort",
    "Check",
    "CheckHeaders",
    "Client",
    "DeadlinePassed",
    "Decision",
    "FieldError",
    "Leased",
    "LimitedBy",
    "NotAdmitted",
    "NotUnderstood",
    "Overloaded",
    "Problem",
    "QuotagateError",
    "Rejected",
    "Retries",
    "Unreachable",
    "Usage",
    "Verdict",
]
