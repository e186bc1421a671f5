"""Failures of the store by name, as redis-py raises them; most of them happen for real in test_outages."""

from __future__ import annotations

import pytest
from redis._parsers.base import BaseParser
from redis.exceptions import ConnectionError as Lost
from redis.exceptions import TimeoutError as Late

from app.store.port import Memory
from app.store.redis import _faults, failure


def reply(text: str) -> Exception:
    """The exception that redis-py makes of an error reply."""
    error: Exception = BaseParser.parse_error(text)  # type: ignore[no-untyped-call]
    return error


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "OOM command not allowed when used memory > 'maxmemory'. script: 1, on @user_function:1.",
            "out_of_memory",
        ),
        ("READONLY You can't write against a read only replica. script: 1", "read_only"),
        ("LOADING Redis is loading the dataset in memory", "loading"),
        ("BUSY Redis is busy running a script. You can only call SCRIPT KILL", "busy"),
        ("NOAUTH Authentication required.", "authentication"),
        ("WRONGPASS invalid username-password pair or user is disabled.", "authentication"),
        ("NOPERM User a has no permissions to run the 'fcall' command", "permission"),
        ("ERR The user executing the script can't run this command or subcommand script: 1", "permission"),
        ("ERR ACL failure in script: User a has no permissions to run the 'set' command", "permission"),
        ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", "master_down"),
        ("MISCONF Errors writing to the AOF file: No space left on device", "disk_full"),
        ("MISCONF Errors writing to the AOF file: Disk quota exceeded", "disk_full"),
        ("MISCONF Valkey is configured to save RDB snapshots, but it's currently unable", "misconfigured"),
        ("NOREPLICAS Not enough good replicas to write.", "no_replicas"),
        ("ERR unknown command 'FCALL', with args beginning with: ", "scripting"),
        ("ERR Function not found", "scripting"),
        ("ERR max number of clients reached", "connection"),
        ("ERR user_function:1: something of ours", "response"),
    ],
)
def test_a_reply_has_a_name(text: str, reason: str):
    assert failure(reply(text)).reason == reason


def test_a_refused_greeting_is_named_for_what_refused_it():
    dressed = Lost("HELLO must be called with the client already authenticated")
    dressed.__cause__ = reply("NOAUTH HELLO must be called with the client authenticated")
    assert failure(dressed).reason == "authentication"


@pytest.mark.parametrize(
    ("error", "reason"),
    [(Lost("closed"), "connection"), (Late("late"), "timeout"), (BrokenPipeError(), "connection")],
)
def test_a_lost_connection_has_a_name(error: Exception, reason: str):
    assert failure(error).reason == reason


def test_an_old_store_is_a_fault():
    assert [fault.name for fault in _faults({"redis_version": "6.2.14"}, Memory(0, 1))] == ["version"]
    assert not list(_faults({"redis_version": "7.0.15", "maxmemory_policy": "noeviction"}, Memory(7, 8)))


@pytest.mark.parametrize(("used", "most", "names"), [(7, 8, []), (8, 9, ["full"]), (8, 0, ["maxmemory"])])
def test_a_store_that_is_full_or_has_no_bound_is_a_fault(used: int, most: int, names: list[str]):
    assert [fault.name for fault in _faults({"redis_version": "7.2.4"}, Memory(used, most))] == names
