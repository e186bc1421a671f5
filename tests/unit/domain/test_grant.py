"""Grants of callers with a certificate: which asks they may send, and which are taken for theirs."""

from __future__ import annotations

from app.domain.ask import Ask
from app.domain.grant import BINDABLE, Grant


def test_name_of_a_certificate_is_the_principal_of_asks_that_name_none():
    assert Grant(None, BINDABLE).certified("alice").principal == "alice"
    assert Grant("gateway", BINDABLE).certified("alice").principal == "alice"


def test_caller_without_key_and_certificate_may_ask_for_nobody():
    nobody = Grant(None, BINDABLE).certified("")
    assert nobody.principal is None
    assert not nobody.covers(Ask(principal="alice"))
