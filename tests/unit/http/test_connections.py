"""Connections are counted by address and in total, and the longest idle one makes room for a new one."""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass, field
from functools import partial
from weakref import ref

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from app.http.server.connections import ENDED, FIRST_REQUEST_S, ClientConnection, Connections


@dataclass
class Crowd:
    """Connections whose ends are recorded."""

    connections: Connections
    closed: list[ClientConnection] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.connections.refused = lambda port, reason: self.refused.append((port, reason))

    def enter(self, address: str, now: float = 0.0) -> ClientConnection | None:
        connection = self.connections.accept(address, "http", now)
        if connection is not None:
            connection.abort = lambda: self.closed.append(connection)
        return connection


def test_ipv6_network_is_one_address():
    crowd = Crowd(Connections(10, 2))
    entered = [
        crowd.enter(address) for address in ("2001:db8::1", "2001:db8::2", "2001:db8::3", "2001:db8:0:1::1")
    ]
    assert [each is not None for each in entered] == [True, True, False, True]
    assert crowd.refused == [("http", "address")]


def test_newcomer_is_refused_where_nobody_is_idle():
    crowd = Crowd(Connections(2, 2))
    for n in range(2):
        one = crowd.enter(f"10.0.0.{n}")
        assert one is not None
        one.idle_since = math.inf
    assert crowd.enter("10.0.0.9") is None
    assert (crowd.refused, crowd.closed) == ([("http", "process")], [])


def test_busy_connection_of_the_largest_address_makes_room_for_an_address_with_fewer():
    crowd = Crowd(Connections(3, 3))
    entered = [crowd.enter(address) for address in ("10.0.0.1", "10.0.0.1", "10.0.0.2")]
    for each in entered:
        assert each is not None
        each.idle_since = math.inf
    assert crowd.enter("10.0.0.2") is None, "two addresses would take turns"
    assert crowd.enter("10.0.0.3") is not None
    assert crowd.closed == entered[:1]


def test_longest_idle_connection_of_the_largest_address_makes_room():
    crowd = Crowd(Connections(4, 4))
    old, *large = (crowd.enter("10.0.0.1", 1.0), *(crowd.enter("10.0.0.2", now) for now in (5.0, 3.0, 4.0)))
    assert crowd.enter("10.0.0.3", 9.0) is not None
    assert crowd.closed == [large[1]], (
        "not the one that is idle for longer, of an address with one connection"
    )
    assert old is not None


def test_idle_connections_of_many_addresses_make_room_where_the_largest_address_is_busy():
    """So a proxy keeps its busy connections, and gets more, whatever thousands of addresses hold."""
    crowd = Crowd(Connections(6, 6))
    proxy = [crowd.enter("10.0.0.1", 0.0), crowd.enter("10.0.0.1", 0.0)]
    idle = [crowd.enter(f"10.0.1.{n}", now) for n, now in enumerate((3.0, 1.0, 2.0, 4.0))]
    for each in proxy:
        assert each is not None
        each.idle_since = math.inf
    assert crowd.enter("10.0.2.1", 9.0) is not None
    newer = crowd.enter("10.0.0.1", 9.0)
    assert newer is not None
    assert crowd.closed == [idle[1], idle[2]]
    newer.idle_since = math.inf
    assert idle[0] is not None
    idle[0].idle_since = 9.5
    assert crowd.enter("10.0.0.1", 9.6) is not None
    assert crowd.closed[2:] == [idle[3]], "the first one has been used since"


def test_connection_without_a_request_is_ended_in_time_and_no_other_one():
    crowd = Crowd(Connections())
    silent, slow, quick, late = (crowd.enter("10.0.0.1", now) for now in (0.0, 0.0, 0.0, 5.0))
    assert silent is not None
    assert slow is not None
    assert quick is not None
    ended: list[str] = []
    slow.time_out = lambda: ended.append("in its own way")
    quick.request_received()
    crowd.connections.time_out(FIRST_REQUEST_S - 0.1, 10)
    assert (crowd.closed, ended) == ([], [])
    crowd.connections.time_out(FIRST_REQUEST_S, 10)
    assert (crowd.closed, ended) == ([silent], ["in its own way"])
    assert list(crowd.connections.awaiting_request) == [late]


def test_late_connection_is_counted_once_whoever_ends_it_and_not_if_it_has_asked():
    crowd = Crowd(Connections())
    one, asked = crowd.enter("10.0.0.1"), crowd.enter("10.0.0.2")
    assert one is not None
    assert asked is not None
    asked.request_received()
    for each in (one, one, asked):
        each.late()
    crowd.connections.time_out(FIRST_REQUEST_S, 10)
    assert crowd.refused == [("http", "timeout")]


@given(st.integers(1, 5))
def test_so_many_late_ones_are_ended_at_once(most: int):
    crowd = Crowd(Connections())
    late = [crowd.enter("10.0.0.1") for _ in range(5)]
    crowd.connections.time_out(math.inf, most)
    assert crowd.closed == late[:most]


def test_ended_connection_keeps_neither_task_nor_protocol_alive():
    """They refer back to the connection, and garbage collection seldom looks for such cycles."""
    connection = Connections().accept("10.0.0.1", "http", 0.0)
    assert connection is not None
    connection.abort = connection.time_out = end = partial(print, connection)
    found = ref(end)
    gc.disable()
    try:
        del end
        connection.closed()
        assert found() is None
    finally:
        gc.enable()


def test_memory_is_given_back_after_many_connections():
    connections, times = Connections(), list[int]()
    connections.freed = lambda: times.append(connections.open)
    for _ in range(2 * ENDED + 1):
        one = connections.accept("10.0.0.1", "http", 0.0)
        assert one is not None
        one.closed()
    assert len(times) == 2


class Machine(RuleBasedStateMachine):
    """Compares the counts with a plain list of all open connections."""

    held = Bundle("held")
    MOST = 6
    OF_ADDRESS = 4

    def __init__(self) -> None:
        super().__init__()
        self.crowd = Crowd(Connections(self.MOST, self.OF_ADDRESS))
        self.open: list[ClientConnection] = []
        self.now = 0.0

    @rule(target=held, address=st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]))
    def enter(self, address: str) -> object:
        self.now += 1
        by_address: dict[str, list[ClientConnection]] = {}
        for each in self.open:
            by_address.setdefault(each.address, []).append(each)
        of_address = len(by_address.get(address, ()))
        largest = max(map(len, by_address.values()), default=0)
        closed = len(self.crowd.closed)
        new = self.crowd.enter(address, self.now)
        gone = self.crowd.closed[closed:]
        if of_address == self.OF_ADDRESS:
            assert (new, gone) == (None, [])
        elif len(self.open) == self.MOST:
            candidates = [ones for ones in by_address.values() if len(ones) == largest]
            victims = [min(ones, key=lambda one: one.idle_since) for ones in candidates]
            idle = sorted(one.idle_since for one in self.open if one.idle_since < math.inf)
            if new is None:
                assert gone == []
                assert not idle
                assert largest < of_address + 2
            else:
                (victim,) = gone
                if any(each.idle_since == math.inf for each in victims) and victim not in victims:
                    assert victim.idle_since == idle[0]
                else:
                    assert victim in victims
                    assert not idle or victim.idle_since < math.inf
                self.open.remove(victim)
        else:
            assert new is not None
            assert gone == []
        if new is None:
            return multiple()
        self.open.append(new)
        return new

    @rule(one=held)
    def work(self, one: ClientConnection) -> None:
        one.request_received()
        one.idle_since = math.inf

    @rule(one=held)
    def rest(self, one: ClientConnection) -> None:
        self.now += 1
        one.idle_since = self.now

    @rule(one=held)
    def leave(self, one: ClientConnection) -> None:
        one.closed()
        if one in self.open:
            self.open.remove(one)

    @invariant()
    def counts_agree(self) -> None:
        assert self.crowd.connections.open == len(self.open)
        assert set(self.crowd.connections.awaiting_request) <= set(self.open)


TestMachine = Machine.TestCase
